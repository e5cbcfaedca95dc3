"""The dynamic tree of every row from its pool of candidates: the best N - 1, with parents, depths and ancestor bits.

The pool lists the candidates of all drafted levels in level order, so that parents stand before their children; a
parent is named by its index in the pool, -1 for the root. The best by score are kept; of equal scores the earlier, so
the parent. A child's score never exceeds its parent's, hence what is kept is a tree. Kept nodes stay in pool order.

Where a pool breaks that rule (NaN scores), a node whose parent was not kept hangs on the last kept one before it: the
result is always a tree that attention and verification can walk.

Source: EAGLE-2, Li et al. 2024 (arXiv 2406.16858), section 4.2 (reranking).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.tree_layout import WORD_BITS, ancestor_mask, pack_ancestors
from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl
from eyas.kernels.truncate import order_key


class Trees(NamedTuple):
    """Whole trees of N nodes per row: node 0 is the root. int64 but for scores_BN (fp32); ancestors_BNW holds bits."""

    tokens_BN: Tensor
    parents_BN: Tensor
    depths_BN: Tensor
    scores_BN: Tensor
    ancestors_BNW: Tensor


def build_tree(
    root_B: Tensor, tokens_BP: Tensor, parents_BP: Tensor, depths_P: Tensor, scores_BP: Tensor, *, num_draft_tokens: int
) -> Trees:
    """The trees of root and best `num_draft_tokens` candidates of each row.

    root_B, tokens_BP, parents_BP and depths_P (the same levels for all rows): int64. scores_BP: fp32 log-probabilities.
    Shapes and dtypes are always checked, parents only on the CPU. Errors: ValueError.
    """
    rows, pool = tokens_BP.shape
    expected = {
        "root_B": (root_B, (rows,), torch.int64),
        "tokens_BP": (tokens_BP, (rows, pool), torch.int64),
        "parents_BP": (parents_BP, (rows, pool), torch.int64),
        "depths_P": (depths_P, (pool,), torch.int64),
        "scores_BP": (scores_BP, (rows, pool), torch.float32),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != tokens_BP.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {dtype} {shape} on "
                f"{tokens_BP.device}, to match tokens_BP"
            )
    if not 1 <= num_draft_tokens <= pool:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}: the pool of {pool} candidates allows 1 to {pool}")
    if available(tokens_BP.device):
        return _launch_build_tree(root_B, tokens_BP, parents_BP, depths_P, scores_BP, num_draft_tokens)
    wrong_BP = (parents_BP < -1) | (parents_BP >= torch.arange(pool))
    if wrong_BP.any():
        row, candidate = wrong_BP.nonzero()[0].tolist()
        raise ValueError(
            f"parents_BP[{row}, {candidate}] is {int(parents_BP[row, candidate])}: give -1 (the root) to "
            f"{candidate - 1}, since parents precede their children"
        )
    return build_tree_reference(root_B, tokens_BP, parents_BP, depths_P, scores_BP, num_draft_tokens)


def build_tree_reference(
    root_B: Tensor, tokens_BP: Tensor, parents_BP: Tensor, depths_P: Tensor, scores_BP: Tensor, num_draft_tokens: int
) -> Trees:
    """The same as `build_tree`, by a stable sort: the definition, and the CPU path. Reads nothing back."""
    rows = len(root_B)
    best = torch.sort(scores_BP, dim=1, descending=True, stable=True).indices[:, :num_draft_tokens]
    chosen_BN = best.sort(dim=1).values
    above_BN = parents_BP.gather(1, chosen_BN)
    place_BN = torch.where(above_BN < 0, 0, torch.searchsorted(chosen_BN, above_BN.clamp(min=0)) + 1)
    place_BN = torch.minimum(place_BN, torch.arange(num_draft_tokens, device=place_BN.device))

    def below(root: Tensor, rest_BN: Tensor) -> Tensor:
        return torch.cat((root[:, None], rest_BN), dim=1)

    zero_B = torch.zeros_like(root_B)
    parents_BN = below(zero_B - 1, place_BN)
    nodes_B = zero_B + num_draft_tokens + 1
    return Trees(
        tokens_BN=below(root_B, tokens_BP.gather(1, chosen_BN)),
        parents_BN=parents_BN,
        depths_BN=below(zero_B, depths_P.expand(rows, -1).gather(1, chosen_BN)),
        scores_BN=below(zero_B.to(scores_BP.dtype), scores_BP.gather(1, chosen_BN)),
        ancestors_BNW=pack_ancestors(ancestor_mask(parents_BN, nodes_B)),
    )


def _launch_build_tree(
    root_B: Tensor, tokens_BP: Tensor, parents_BP: Tensor, depths_P: Tensor, scores_BP: Tensor, num_draft_tokens: int
) -> Trees:
    rows, pool = tokens_BP.shape
    nodes = num_draft_tokens + 1
    words = -(-nodes // WORD_BITS)
    tokens_BN = torch.empty((rows, nodes), dtype=torch.int64, device=root_B.device)
    parents_BN, depths_BN = torch.empty_like(tokens_BN), torch.empty_like(tokens_BN)
    scores_BN = torch.empty((rows, nodes), dtype=torch.float32, device=root_B.device)
    ancestors_BNW = torch.empty((rows, nodes, words), dtype=torch.int64, device=root_B.device)
    if rows:
        with on_device(root_B.device):
            _build_tree_kernel[(rows,)](
                root_B.contiguous(),
                tokens_BP.contiguous(),
                parents_BP.contiguous(),
                depths_P.contiguous(),
                scores_BP.contiguous(),
                tokens_BN,
                parents_BN,
                depths_BN,
                scores_BN,
                ancestors_BNW,
                pool,
                num_draft_tokens,
                words,
                BLOCK_P=next_power_of_two(pool),
                BLOCK_W=next_power_of_two(words),
                WORD_BITS=WORD_BITS,
                num_warps=_warps(next_power_of_two(pool)),
            )
    return Trees(tokens_BN, parents_BN, depths_BN, scores_BN, ancestors_BNW)


@jit
def _build_tree_kernel(
    root_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    scores_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_depths_ptr,
    out_scores_ptr,
    ancestors_ptr,
    pool,
    num_chosen,
    num_words,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WORD_BITS: tl.constexpr,
):
    # One program per row; the whole pool sits in registers.
    row = tl.program_id(0).to(tl.int64)
    candidate_P = tl.arange(0, BLOCK_P)
    in_pool_P = candidate_P < pool
    offset_P = row * pool + candidate_P
    scores_P = tl.load(scores_ptr + offset_P, mask=in_pool_P, other=-float("inf"))
    # NaN sorts above everything, as torch.sort has it.
    key_P = tl.where(scores_P == scores_P, order_key(scores_P), 2147483647).to(tl.int64)

    # The largest key that at least num_chosen candidates reach, by bisection.
    least = tl.min(tl.where(in_pool_P, key_P, 2147483647))
    beyond = tl.max(tl.where(in_pool_P, key_P, -2147483648)) + 1
    while beyond - least > 1:
        middle = (beyond + least) >> 1
        if tl.sum((in_pool_P & (key_P >= middle)).to(tl.int32)) >= num_chosen:
            least = middle
        else:
            beyond = middle
    is_above_P = in_pool_P & (key_P > least)
    is_equal_P = in_pool_P & (key_P == least)
    room = num_chosen - tl.sum(is_above_P.to(tl.int32))
    is_chosen_P = is_above_P | (is_equal_P & (tl.cumsum(is_equal_P.to(tl.int32), 0) <= room))
    chosen_P = is_chosen_P.to(tl.int32)
    node_P = tl.cumsum(chosen_P, 0)  # a chosen candidate becomes this node; 0 is the root

    out_P = row * (num_chosen + 1) + node_P
    tl.store(out_tokens_ptr + out_P, tl.load(tokens_ptr + offset_P, mask=in_pool_P, other=0), mask=is_chosen_P)
    tl.store(out_depths_ptr + out_P, tl.load(depths_ptr + candidate_P, mask=in_pool_P, other=0), mask=is_chosen_P)
    tl.store(out_scores_ptr + out_P, scores_P, mask=is_chosen_P)
    above_P = tl.load(parents_ptr + offset_P, mask=in_pool_P, other=-1).to(tl.int32)
    above_P = tl.minimum(above_P, BLOCK_P - 1)
    before_P = tl.gather(node_P - chosen_P, tl.maximum(above_P, 0), 0)
    parent_P = tl.where(above_P < 0, 0, tl.minimum(before_P + 1, node_P - 1))
    tl.store(out_parents_ptr + out_P, parent_P, mask=is_chosen_P)
    root = row * (num_chosen + 1)
    tl.store(out_tokens_ptr + root, tl.load(root_ptr + row))
    tl.store(out_parents_ptr + root, -1)
    tl.store(out_depths_ptr + root, 0)
    tl.store(out_scores_ptr + root, 0.0)
    tl.debug_barrier()  # the parents are read back below, in node order

    # A node's bits are its parent's and its own; the parent's words were stored earlier in this loop.
    word_W = tl.arange(0, BLOCK_W)
    in_words_W = word_W < num_words
    one_W = tl.full([BLOCK_W], 1, tl.int64)
    for node in range(0, num_chosen + 1):
        parent = tl.load(out_parents_ptr + root + node)
        from_W = ancestors_ptr + (root + tl.maximum(parent, 0)) * num_words + word_W
        bits_W = tl.where(parent >= 0, tl.load(from_W, mask=in_words_W, other=0), 0)
        own_W = tl.where(word_W == node // WORD_BITS, one_W << (node % WORD_BITS), 0)
        tl.store(ancestors_ptr + (root + node) * num_words + word_W, bits_W | own_W, mask=in_words_W)
        tl.debug_barrier()


def _warps(block: int) -> int:
    """How many warps a pool of up to `block` candidates takes without spilling registers (eyas.kernels.aot)."""
    return 4 if block <= 256 else 8


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: pools of up to 1024 candidates, one to four words of bits."""
    names = ("root", "tokens", "parents", "depths", "out_tokens", "out_parents", "out_depths", "ancestors")
    pointers = {
        **{f"{name}_ptr": "*i64" for name in names},
        **dict.fromkeys(("scores_ptr", "out_scores_ptr"), "*fp32"),
    }
    return [
        KernelBuild(
            name=f"build_tree pool<={pool} words<={words}",
            kernel=_build_tree_kernel,
            types={**pointers, **dict.fromkeys(("pool", "num_chosen", "num_words"), "i32")},
            aligned=frozenset(pointers),
            constants={"BLOCK_P": pool, "BLOCK_W": words, "WORD_BITS": WORD_BITS},
            options={"num_warps": _warps(pool)},
        )
        for pool, words in ((64, 1), (128, 1), (512, 2), (1024, 1), (1024, 4))
    ]
