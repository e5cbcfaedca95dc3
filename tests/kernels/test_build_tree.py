"""Tree building on a pool worked by hand, against the drafter's own rerank, and the kernel bit by bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.inference.draft import DynamicTree
from eyas.kernels.build_tree import Trees, _launch_build_tree, build_tree, build_tree_reference
from eyas.kernels.tree_layout import check_trees, unpack_ancestors

BUILDERS = {"reference": build_tree_reference, "kernel": _launch_build_tree}


def pool(rows: int, depth: int, top_k: int, *, ties: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random tokens, parents, depths and scores as drafting leaves them: children of the top_k best of each level."""
    tokens, parents, depths, scores = [], [], [], []
    level = -torch.rand(rows, top_k).sort(dim=1).values * 3
    frontier, frontier_scores, size = torch.arange(top_k).expand(rows, -1), level, top_k
    parents.append(torch.full((rows, top_k), -1))
    scores.append(level)
    depths.append(torch.full((top_k,), 1))
    for d in range(2, depth + 1):
        totals = (frontier_scores[:, :, None] - torch.rand(rows, top_k, top_k) * 3).flatten(1)
        if ties:
            totals = torch.minimum((totals * 2).round() / 2, frontier_scores.repeat_interleave(top_k, 1))
        parents.append(frontier.repeat_interleave(top_k, dim=1))
        scores.append(totals)
        depths.append(torch.full((top_k**2,), d))
        best = totals.topk(top_k, dim=1)
        frontier, frontier_scores, size = size + best.indices, best.values, size + top_k**2
    tokens = torch.randint(0, 10**6, (rows, size))
    return tokens, torch.cat(parents, 1), torch.cat(depths), torch.cat(scores, 1)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.usefixtures("poisoned_empty")
def test_hand_worked(build: Callable[..., Trees], device: torch.device) -> None:
    """Candidates a, b, then a's children c, d and b's e, f. The best four: a, c (ties with b), b, e."""
    tokens = torch.tensor([[10, 11, 20, 21, 22, 23]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]])
    depths = torch.tensor([1, 1, 2, 2, 2, 2])
    scores = torch.tensor([[-0.5, -1.0, -1.0, -3.0, -1.5, -1.5]])
    inputs = (x.to(device) for x in (torch.tensor([7]), tokens, parents, depths, scores))
    tree = build(*inputs, 4)
    assert tree.tokens_BN.tolist() == [[7, 10, 11, 20, 22]]
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.depths_BN.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.scores_BN.tolist() == [[0.0, -0.5, -1.0, -1.0, -1.5]]
    assert tree.ancestors_BNW[0, :, 0].tolist() == [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]


@pytest.mark.parametrize("ties", [False, True])
def test_the_reference_is_the_drafter_s_rerank(ties: bool) -> None:
    maker = DynamicTree(depth=5, top_k=4, num_draft_tokens=23)
    tokens, parents, depths, scores = pool(6, 5, 4, ties=ties)
    trees = build_tree_reference(torch.arange(6), tokens, parents, depths, scores, 23)
    for row, tree in enumerate(maker.rerank(list(range(6)), tokens, parents, depths.expand(6, -1), scores, count=23)):
        assert torch.equal(trees.tokens_BN[row], tree.tokens_N)
        assert torch.equal(trees.parents_BN[row], tree.parents_N)
        assert torch.equal(trees.depths_BN[row], tree.depths_N)
        assert torch.equal(trees.scores_BN[row], tree.scores_N)
        assert torch.equal(unpack_ancestors(trees.ancestors_BNW[row : row + 1])[0], tree.ancestors_NN)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("depth", "top_k", "nodes"), [(1, 1, 1), (1, 5, 3), (3, 2, 10), (5, 4, 60), (5, 4, 63), (7, 10, 63), (6, 8, 140)]
)
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(depth: int, top_k: int, nodes: int, ties: bool, device: torch.device) -> None:
    inputs = (torch.tensor([3, 4, 5]), *pool(3, depth, top_k, ties=ties))
    expected = build_tree_reference(*inputs, nodes)
    for got, want in zip(_launch_build_tree(*(x.to(device) for x in inputs), nodes), expected, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_broken_scores_still_give_trees(build: Callable[..., Trees], device: torch.device) -> None:
    """NaN everywhere on one row; children above their parents on another; -inf and signed zeros on a third."""
    tokens, parents, depths, scores = pool(3, 4, 3)
    scores[0] = torch.nan
    scores[0, 1] = -torch.nan
    scores[1] = -scores[1]
    scores[2] = torch.tensor([0.0, -0.0, -torch.inf]).repeat(scores.shape[1] // 3)
    inputs = (torch.zeros(3, dtype=torch.int64), tokens, parents, depths, scores)
    tree = build(*(x.to(device) for x in inputs), 11)
    check_trees(tree.parents_BN.cpu(), torch.full((3,), 12))
    for got, want in zip(tree, build_tree_reference(*inputs, 11), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("num_draft_tokens", lambda n: 7, "num_draft_tokens is 7: the pool of 6 candidates allows 1 to 6"),
        ("parents_BP", lambda p: p + 1, r"parents_BP\[0, 0\] is 0: give -1 \(the root\) to -1"),
        ("parents_BP", lambda p: p.int(), "parents_BP is torch.int32"),
        ("scores_BP", lambda s: s.double(), "scores_BP is torch.float64"),
        ("root_B", lambda r: r.repeat(2), r"root_B is torch.int64 \(2,\)"),
    ],
)
def test_the_op_says_what_is_wrong(name: str, change: Callable[..., object], message: str) -> None:
    tokens, parents, depths, scores = pool(1, 2, 2)
    inputs: dict[str, object] = {
        "root_B": torch.tensor([1]),
        "tokens_BP": tokens,
        "parents_BP": parents,
        "depths_P": depths,
        "scores_BP": scores,
        "num_draft_tokens": 3,
    }
    assert build_tree(**inputs).tokens_BN.shape == (1, 4)
    with pytest.raises(ValueError, match=message):
        build_tree(**{**inputs, name: change(inputs[name])})


@pytest.mark.gpu
def test_the_op_runs_the_kernel_on_a_gpu() -> None:
    names = ("root_B", "tokens_BP", "parents_BP", "depths_P", "scores_BP")
    inputs = (torch.arange(64), *pool(64, 7, 10))
    there = {name: x.cuda() for name, x in zip(names, inputs, strict=True)}
    for got, want in zip(build_tree(**there, num_draft_tokens=59), build_tree_reference(*inputs, 59), strict=True):
        assert torch.equal(got.cpu(), want)
