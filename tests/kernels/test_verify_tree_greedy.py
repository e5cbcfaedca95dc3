"""Greedy verification on trees worked by hand, the kernel against the reference, and malformed input."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.kernels.verify_tree_greedy import (
    TreeVerification,
    _launch_verify_tree_greedy,
    verify_tree_greedy,
    verify_tree_greedy_reference,
)

# name: (tokens, parents, argmax, number of nodes, path, bonus)
HAND_WORKED: dict[str, tuple[list[int], list[int], list[int], int, list[int], int]] = {
    # Node 6 has the right token under the wrong parent, node 1 the token that is right one level deeper.
    "three deep": ([50, 7, 8, 9, 7, 3, 3], [-1, 0, 0, 2, 2, 4, 3], [8, 7, 7, 3, 3, 99, 98], 7, [0, 2, 4, 5], 99),
    "nothing accepted": ([50, 7, 8, 9], [-1, 0, 0, 1], [9, 9, 9, 9], 4, [0], 9),
    "only the root": ([50], [-1], [4], 1, [0], 4),
    "the root is no child of itself": ([50, 7], [-1, 0], [50, 7], 2, [0], 50),
    "of equal siblings the first": ([50, 7, 7, 4, 4], [-1, 0, 0, 2, 1], [7, 4, 4, 0, 1], 5, [0, 1, 4], 1),
    "padding is not accepted": ([50, 7, 8], [-1, 0, 1], [7, 8, 9], 2, [0, 1], 8),
    "an idle row": ([50, 7], [-1, 0], [7, 7], 0, [], -1),
    "NaN at the root": ([50, 7, -1], [-1, 0, 0], [-1, 7, 7], 3, [0], -1),
    "NaN further down": ([50, 7, 8], [-1, 0, 1], [7, -5, 8], 3, [0, 1], -1),
    "NaN off the path": ([50, 7, 8], [-1, 0, 0], [8, -1, 2], 3, [0, 2], 2),
}

VERIFIERS = {"reference": verify_tree_greedy_reference, "kernel": _launch_verify_tree_greedy}


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
@pytest.mark.parametrize("case", HAND_WORKED.values(), ids=HAND_WORKED)
@pytest.mark.usefixtures("poisoned_empty")
def test_hand_worked(
    case: tuple[list[int], list[int], list[int], int, list[int], int],
    verifier: Callable[..., TreeVerification],
    device: torch.device,
) -> None:
    tokens, parents, argmax, num_nodes, path, bonus = case
    inputs = [torch.tensor(x, device=device) for x in ([tokens], [parents], [num_nodes], [argmax])]
    result = verifier(*inputs)
    assert result.path_BN.tolist() == [path + [-1] * (len(tokens) - len(path))]
    assert result.num_accepted_B.tolist() == [max(len(path) - 1, 0)]
    assert result.bonus_B.tolist() == [bonus]
    assert {x.dtype for x in result} == {torch.int64}


def draw_inputs(parents_BN: Tensor, num_nodes_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random tokens, and an argmax that leads to the last node unless an equal sibling diverts it; random elsewhere."""
    tokens_BN = torch.randint(0, 8, parents_BN.shape)
    argmax_BN = torch.randint(-1, 8, parents_BN.shape)
    for row, num_nodes in enumerate(num_nodes_B.tolist()):
        node = num_nodes - 1
        while node > 0:
            parent = int(parents_BN[row, node])
            argmax_BN[row, parent] = tokens_BN[row, node]
            node = parent
    return tokens_BN, parents_BN, num_nodes_B, argmax_BN


@pytest.mark.parametrize("nodes", [1, 5, 7, 60, 63, 65])
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(
    nodes: int, random_parents: Callable[[int, int], Tensor], device: torch.device
) -> None:
    num_nodes = torch.tensor([nodes, nodes, 1, 0, (nodes + 1) // 2] * 2)
    inputs = draw_inputs(random_parents(10, nodes), num_nodes)
    expected = verify_tree_greedy_reference(*inputs)
    result = _launch_verify_tree_greedy(*(x.to(device) for x in inputs))
    for got, want in zip(result, expected, strict=True):
        assert torch.equal(got.cpu(), want)
    assert nodes < 60 or expected.num_accepted_B.max() >= 10  # otherwise the walk was hardly tested


@pytest.mark.usefixtures("poisoned_empty")
def test_a_chain_is_accepted_to_its_end(device: torch.device) -> None:
    tokens = torch.arange(63, device=device)[None] + 100
    inputs = (tokens, torch.arange(-1, 62, device=device)[None], torch.tensor([63], device=device), tokens + 1)
    result = _launch_verify_tree_greedy(*inputs)
    assert result.path_BN.tolist() == [list(range(63))]
    assert (result.num_accepted_B.item(), result.bonus_B.item()) == (62, 163)


def test_strided_inputs(random_parents: Callable[[int, int], Tensor], device: torch.device) -> None:
    inputs = draw_inputs(random_parents(4, 7), torch.tensor([7, 6, 5, 1]))
    spread = [torch.stack((x, torch.full_like(x, 1)), dim=-1).to(device)[..., 0] for x in inputs]
    assert not spread[0].is_contiguous()
    for got, want in zip(_launch_verify_tree_greedy(*spread), verify_tree_greedy_reference(*inputs), strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(
    ("parents", "num_nodes", "path"),
    [
        ([-1, 1, 2, 3, 4], 5, [0]),  # nodes that are their own parents
        ([4, 0, 1, 2, 3], 5, [0, 1, 2, 3, 4]),  # a ring through the root
        ([-1, 4, 1, 2, 3], 5, [0]),  # a ring beside the root
        ([-1, 0, 10**12, -(10**12), 2], 5, [0, 1]),  # parents outside the tree
        ([-1, 0, 1, 2, 3], 10**9, [0, 1, 2, 3, 4]),  # more nodes than the row has
        ([-1, 0, 1, 2, 3], -3, []),
    ],
)
def test_the_kernel_ends_on_malformed_trees(
    parents: list[int], num_nodes: int, path: list[int], device: torch.device
) -> None:
    # Every token agrees everywhere, and the next row in memory would continue a path that ran over the end of its row.
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=device)
    parents_BN = torch.tensor([[-1, 0, 1, 2, 3], parents, [4, 5, 6, 7, 8]], device=device)
    result = _launch_verify_tree_greedy(tokens, parents_BN, torch.tensor([5, num_nodes, 5], device=device), tokens)
    assert result.path_BN[1].tolist() == path + [-1] * (5 - len(path))
    assert result.num_accepted_B[1].item() == max(len(path) - 1, 0)


def test_the_op_refuses_malformed_trees_on_the_cpu() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"parents_BN\[0, 1\] is 2, but must be 0 to 0"):
        verify_tree_greedy(tokens, torch.tensor([[-1, 2, 1]]), torch.tensor([3]), tokens)


def test_the_op_refuses_wrong_shapes_and_dtypes() -> None:
    tokens, parents, num_nodes = (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([[-1, 0, 1]] * 2),
        torch.tensor([3, 3]),
    )
    with pytest.raises(ValueError, match=r"target_argmax_BN is torch.int32 .* give torch.int64 \(2, 3\)"):
        verify_tree_greedy(tokens, parents, num_nodes, tokens.int())
    with pytest.raises(ValueError, match=r"num_nodes_B is torch.int64 \(1,\)"):
        verify_tree_greedy(tokens, parents, num_nodes[:1], tokens)
    with pytest.raises(ValueError, match="at least one node"):
        verify_tree_greedy(tokens[:, :0], parents, num_nodes, tokens)


def test_the_op_is_the_reference_on_the_cpu(random_parents: Callable[[int, int], Tensor]) -> None:
    inputs = draw_inputs(random_parents(3, 60), torch.tensor([60, 1, 31]))
    for got, want in zip(verify_tree_greedy(*inputs), verify_tree_greedy_reference(*inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_the_op_runs_the_kernel_on_a_gpu(random_parents: Callable[[int, int], Tensor]) -> None:
    inputs = draw_inputs(random_parents(64, 60), torch.randint(0, 61, (64,)))
    for got, want in zip(
        verify_tree_greedy(*(x.cuda() for x in inputs)), verify_tree_greedy_reference(*inputs), strict=True
    ):
        assert got.is_cuda
        assert torch.equal(got.cpu(), want)
