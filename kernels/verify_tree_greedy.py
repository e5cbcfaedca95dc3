"""Greedy verification of draft trees: how far the target's own argmax follows each tree.

Walk from the root; at each node step to the child whose token is the target's argmax there, until no child is. The
bonus token is the argmax at the last node reached, so a round emits the accepted tokens and one more.

A negative argmax says that the target's logits were NaN: no child is accepted there, and if the walk ends there the
bonus is -1. The caller must treat a bonus of -1 as a failed forward, never as a token.

Source: EAGLE-2, Li et al. 2024 (arXiv 2406.16858), section 4, at temperature 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.tree_layout import check_trees
from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl


class TreeVerification(NamedTuple):
    """The accepted path of each row, all int64.

    path_BN: node indices from the root (0) down to the last accepted node, then -1.
    num_accepted_B: accepted draft tokens, so the root is not counted.
    bonus_B: the target's token after the last accepted node; -1 if its logits were NaN or the row is idle.
    """

    path_BN: Tensor
    num_accepted_B: Tensor
    bonus_B: Tensor


def verify_tree_greedy(
    tokens_BN: Tensor, parents_BN: Tensor, num_nodes_B: Tensor, target_argmax_BN: Tensor
) -> TreeVerification:
    """The accepted path, its length and the bonus token of each row of a ragged batch of draft trees.

    All inputs int64. tokens_BN: node 0 is the last committed token. parents_BN: -1 for node 0, else below the node.
    num_nodes_B: nodes from there on are padding; 0 is an idle row (empty path, bonus -1). target_argmax_BN: the argmax
    of the target's logits at each node, negative for NaN logits. Of siblings with equal tokens the first is taken.

    Shapes and dtypes are always checked, the values only on the CPU (a GPU would have to wait); there a malformed tree
    gives a shorter path, never a hang or a read outside the tensors. Errors: ValueError.
    """
    inputs = {"tokens_BN": tokens_BN, "parents_BN": parents_BN, "target_argmax_BN": target_argmax_BN}
    if tokens_BN.ndim != 2 or tokens_BN.shape[1] == 0:
        raise ValueError(f"tokens_BN has shape {tuple(tokens_BN.shape)}: give [rows, nodes] with at least one node")
    for name, tensor in {**inputs, "num_nodes_B": num_nodes_B}.items():
        shape = tokens_BN.shape[:1] if name == "num_nodes_B" else tokens_BN.shape
        if tensor.shape != shape or tensor.dtype != torch.int64 or tensor.device != tokens_BN.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give torch.int64 {tuple(shape)} "
                f"on {tokens_BN.device}, as tokens_BN is"
            )
    if available(tokens_BN.device):
        return _launch_verify_tree_greedy(tokens_BN, parents_BN, num_nodes_B, target_argmax_BN)
    check_trees(parents_BN, num_nodes_B)
    return verify_tree_greedy_reference(tokens_BN, parents_BN, num_nodes_B, target_argmax_BN)


def verify_tree_greedy_reference(
    tokens_BN: Tensor, parents_BN: Tensor, num_nodes_B: Tensor, target_argmax_BN: Tensor
) -> TreeVerification:
    """The same as `verify_tree_greedy`, row by row in Python: the definition, and the CPU path."""
    path_BN = torch.full_like(tokens_BN, -1)
    num_accepted_B = torch.zeros_like(num_nodes_B)
    bonus_B = torch.full_like(num_nodes_B, -1)
    for row, num_nodes in enumerate(num_nodes_B.tolist()):
        if num_nodes == 0:
            continue
        tokens, parents, argmax = (x[row].tolist() for x in (tokens_BN, parents_BN, target_argmax_BN))
        path = [0]
        # Children come after their parent, so one pass in node order meets each level of the path in turn.
        for node in range(1, num_nodes):
            wanted = argmax[path[-1]]
            if parents[node] == path[-1] and tokens[node] == wanted and wanted >= 0:
                path.append(node)
        path_BN[row, : len(path)] = torch.tensor(path)
        num_accepted_B[row] = len(path) - 1
        bonus_B[row] = max(argmax[path[-1]], -1)
    return TreeVerification(path_BN, num_accepted_B, bonus_B)


def _launch_verify_tree_greedy(
    tokens_BN: Tensor, parents_BN: Tensor, num_nodes_B: Tensor, target_argmax_BN: Tensor
) -> TreeVerification:
    num_rows, num_slots = tokens_BN.shape
    path_BN = torch.empty_like(tokens_BN, memory_format=torch.contiguous_format)
    num_accepted_B = torch.empty_like(num_nodes_B, memory_format=torch.contiguous_format)
    bonus_B = torch.empty_like(num_accepted_B)
    with on_device(tokens_BN.device):
        _verify_tree_greedy_kernel[(num_rows,)](
            tokens_BN.contiguous(),
            parents_BN.contiguous(),
            num_nodes_B.contiguous(),
            target_argmax_BN.contiguous(),
            path_BN,
            num_accepted_B,
            bonus_B,
            num_slots,
            BLOCK_N=next_power_of_two(num_slots),
            num_warps=1,
        )
    return TreeVerification(path_BN, num_accepted_B, bonus_B)


@jit
def _first_child(node, wanted, tokens_N, parents_N, node_N, BLOCK_N: tl.constexpr):
    # `node_N > node` bounds the walk: the path only ever moves to higher indices, whatever the parents say.
    is_child_N = (parents_N == node) & (tokens_N == wanted) & (node_N > node) & (wanted >= 0)
    return tl.min(tl.where(is_child_N, node_N, BLOCK_N))


@jit
def _verify_tree_greedy_kernel(
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    target_argmax_ptr,
    path_ptr,
    num_accepted_ptr,
    bonus_ptr,
    num_slots,
    BLOCK_N: tl.constexpr,
):
    # One program (one warp) per row. The whole tree sits in registers, so no index read from it is ever an address.
    row = tl.program_id(0).to(tl.int64)
    node_N = tl.arange(0, BLOCK_N)
    in_row_N = node_N < num_slots
    is_node_N = in_row_N & (node_N < tl.load(num_nodes_ptr + row))
    offset_N = row * num_slots + node_N
    tokens_N = tl.load(tokens_ptr + offset_N, mask=is_node_N, other=-1)
    parents_N = tl.load(parents_ptr + offset_N, mask=is_node_N, other=-1)
    argmax_N = tl.load(target_argmax_ptr + offset_N, mask=is_node_N, other=-1)

    path_N = tl.where(is_node_N & (node_N == 0), 0, -1)
    num_accepted = 0
    wanted = tl.max(tl.where(node_N == 0, argmax_N, -1))
    child = _first_child(0, wanted, tokens_N, parents_N, node_N, BLOCK_N)
    while child < BLOCK_N:
        num_accepted += 1
        path_N = tl.where(node_N == num_accepted, child, path_N)
        wanted = tl.max(tl.where(node_N == child, argmax_N, -1))
        child = _first_child(child, wanted, tokens_N, parents_N, node_N, BLOCK_N)

    tl.store(path_ptr + offset_N, path_N, mask=in_row_N)
    tl.store(num_accepted_ptr + row, num_accepted)
    tl.store(bonus_ptr + row, wanted)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks."""
    pointers = ("tokens", "parents", "num_nodes", "target_argmax", "path", "num_accepted", "bonus")
    types = {f"{name}_ptr": "*i64" for name in pointers}
    return [
        KernelBuild(
            name="verify_tree_greedy nodes=60",
            kernel=_verify_tree_greedy_kernel,
            types={**types, "num_slots": "i32"},
            aligned=frozenset(types),
            constants={"BLOCK_N": next_power_of_two(60)},
            options={"num_warps": 1},
        )
    ]
