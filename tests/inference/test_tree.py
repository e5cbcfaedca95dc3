"""The one tree type: what it derives, and which tensors are no tree."""

import pytest
import torch

from eyas.inference.tree import DraftTree

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
