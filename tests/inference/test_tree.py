"""The one tree type: what it derives, and which tensors are no tree."""

import pytest
import torch

from eyas.inference.tree import DraftTree, TreeBatch

#      0
#     / \
#    1   2
#   /   / \
#  3   4   5
PARENTS, DEPTHS = [-1, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2]


def tree(parents: list[int], depths: list[int], *, tokens: int | None = None, scores: int | None = None) -> DraftTree:
    nodes = len(parents)
    return DraftTree(
        torch.arange(nodes if tokens is None else tokens) + 10,
        torch.tensor(parents),
        torch.tensor(depths),
        torch.zeros(nodes if scores is None else scores),
    )


def test_nodes_see_their_ancestors_and_themselves() -> None:
    drawn = tree(PARENTS, DEPTHS)
    assert (len(drawn), drawn.depth) == (6, 2)
    expected = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]
    assert [row.nonzero().flatten().tolist() for row in drawn.ancestors_NN] == expected


def test_a_root_alone_is_a_tree() -> None:
    root = DraftTree.root(7)
    assert (root.tokens_N.tolist(), root.parents_N.tolist(), root.depths_N.tolist()) == ([7], [-1], [0])
    assert root.ancestors_NN.tolist() == [[True]]
    assert root.depth == 0


def test_a_chain_is_a_path() -> None:
    chain = DraftTree.chain(7, [3, 1, 4], [-0.5, -0.75, -2.0])
    assert chain.tokens_N.tolist() == [7, 3, 1, 4]
    assert chain.parents_N.tolist() == [-1, 0, 1, 2]
    assert chain.depths_N.tolist() == [0, 1, 2, 3]
    assert chain.scores_N.tolist() == [0.0, -0.5, -0.75, -2.0]
    assert torch.equal(chain.ancestors_NN, torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0, 0, 0, 1, 2, 2], r"parents_BN\[0, 0\] is 0, but must be -1, because node 0 is the root"),
        ([-1, 0, -1, 1, 2, 2], r"parents_BN\[0, 2\] is -1, but must be 0 to 1: parents precede their children"),
        ([-1, 0, 2, 1, 2, 2], r"parents_BN\[0, 2\] is 2, but must be 0 to 1"),
        ([-1, 0, 0, 5, 2, 2], r"parents_BN\[0, 3\] is 5, but must be 0 to 2"),
        ([-1, 0, 0, 1, 2, -3], r"parents_BN\[0, 5\] is -3"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree(parents, DEPTHS)


@pytest.mark.parametrize("depths", [[1, 2, 2, 3, 3, 3], [0, 1, 1, 2, 2, 1], [0, 0, 1, 1, 2, 2]])
def test_depths_that_do_not_follow_are_refused(depths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not follow from parents"):
        tree(PARENTS, depths)


@pytest.mark.parametrize("wrong", [{"tokens": 5}, {"tokens": 7}, {"scores": 5}])
def test_tensors_of_other_lengths_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"one entry per node, given \{'tokens_N': \d, 'parents_N': 6"):
        tree(PARENTS, DEPTHS, **wrong)


def drawn(tokens: list[int], q: list[list[float]], parents: list[int] | None = None) -> DraftTree:
    nodes = torch.arange(len(tokens) + 1)
    upwards = nodes - 1 if parents is None else torch.tensor(parents)
    depths = nodes if parents is None else torch.tensor([0, 1, 1])
    return DraftTree(torch.tensor([1, *tokens]), upwards, depths, torch.zeros(len(nodes)), torch.tensor(q).double())


def test_only_a_chain_with_one_distribution_per_draft_can_be_drawn() -> None:
    assert len(drawn([0, 2], [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])) == 3
    with pytest.raises(ValueError, match="only a chain can be drawn, with one distribution per draft token"):
        drawn([0, 2], [[0.5, 0.5, 0.0]])
    with pytest.raises(ValueError, match="only a chain can be drawn"):
        drawn([0, 2], [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]], parents=[-1, 0, 0])
    with pytest.raises(ValueError, match="a drawn token has probability 0 in the distribution it was drawn from"):
        drawn([2, 0], [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])


def test_a_batch_sees_each_rows_text_and_paths_and_padding_sees_something() -> None:
    trees = [tree(PARENTS, DEPTHS), DraftTree.root(7), DraftTree.chain(7, [3, 1], [0.0, 0.0])]
    batch = TreeBatch.of(trees)
    assert batch.tokens_RN.shape == (3, 6)
    assert batch.num_nodes_R.tolist() == [6, 1, 3]
    lengths = torch.tensor([2, 5, 1])
    seen = batch.sight(lengths)
    assert seen.shape == (3, 6, 11)
    for r, (row, length) in enumerate(zip(trees, lengths.tolist(), strict=True)):
        for node in range(len(row)):
            expected = [*range(length), *(length + n for n in row.ancestors_NN[node].nonzero().flatten().tolist())]
            assert seen[r, node].nonzero().flatten().tolist() == expected
    assert bool(seen.any(-1).all()), "attention over nothing would be NaN"
    alone = TreeBatch.of(trees[:1]).sight(lengths[:1])
    assert torch.equal(alone[0], seen[0, :, :8])
