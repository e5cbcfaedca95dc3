"""The k most likely draft tokens of every frontier node with their log-probabilities, without sorting a vocabulary.

One read of the logits leaves the maximum and the sum of exponentials of each block of 128; the log-sum-exp follows from
those. Then k times: the block with the largest remaining maximum gives its best remaining token, and only that block is
read again. Of equal logits the lower id comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.block_statistics import AOT_ELEMENTS, BLOCK, check_logits, launch_block_statistics
from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl
from eyas.kernels.truncate import order_key

MAX_K = 64


class DraftTopK(NamedTuple):
    """ids_BNK: int64 draft ids, best first. log_probs_BNK: fp32, of the softmax over the whole draft vocabulary."""

    ids_BNK: Tensor
    log_probs_BNK: Tensor


def draft_top_k(logits_BNU: Tensor, k: int) -> DraftTopK:
    """The k best draft ids of every node. NaN logits come last, and make all log-probabilities of their node NaN.

    logits: fp16, bf16 or fp32. Errors: ValueError unless 1 <= k <= min(U, 64).
    """
    check_logits(logits_BNU, "logits_BNU")
    allowed = min(MAX_K, logits_BNU.shape[2])
    if not 1 <= k <= allowed:
        raise ValueError(f"k is {k}: give 1 to {allowed} for {logits_BNU.shape[2]} draft tokens")
    return _launch_draft_top_k(logits_BNU, k) if available(logits_BNU.device) else draft_top_k_reference(logits_BNU, k)


def draft_top_k_reference(logits_BNU: Tensor, k: int) -> DraftTopK:
    """The same as `draft_top_k`, by a stable sort: the definition, and the CPU path."""
    logits = logits_BNU.float()
    ranked = torch.where(logits.isnan(), -torch.inf, logits).sort(dim=-1, descending=True, stable=True)
    log_total = logits.logsumexp(-1, keepdim=True)
    return DraftTopK(ranked.indices[..., :k], ranked.values[..., :k] - log_total)


def _launch_draft_top_k(logits_BNU: Tensor, k: int) -> DraftTopK:
    logits_BNU = logits_BNU.contiguous()
    B, N, U = logits_BNU.shape
    device = logits_BNU.device
    all_B, one_B = torch.full((B,), N, device=device), torch.ones(B, device=device)
    max_BNC, sum_BNC = launch_block_statistics(logits_BNU, all_B, one_B)
    C = max_BNC.shape[2]
    ids_BNK = torch.empty((B, N, k), dtype=torch.int64, device=device)
    log_probs_BNK = torch.empty((B, N, k), dtype=torch.float32, device=device)
    if B * N:
        with on_device(device):
            _draft_top_k_kernel[(B * N,)](
                logits_BNU,
                max_BNC,
                sum_BNC,
                ids_BNK,
                log_probs_BNK,
                C,
                U,
                k,
                BLOCK=BLOCK,
                BLOCK_C=next_power_of_two(C),
                num_warps=4,
            )
    return DraftTopK(ids_BNK, log_probs_BNK)


@jit
def _draft_top_k_kernel(
    logits_ptr,
    max_ptr,
    sum_ptr,
    ids_ptr,
    log_probs_ptr,
    num_blocks,
    width,
    k,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # One program per node. A block's key is that of its best remaining token.
    node = tl.program_id(0).to(tl.int64)
    block_C = tl.arange(0, BLOCK_C)
    in_row_C = block_C < num_blocks
    lane_L = tl.arange(0, BLOCK)
    max_C = tl.load(max_ptr + node * num_blocks + block_C, mask=in_row_C, other=-float("inf"))
    sum_C = tl.load(sum_ptr + node * num_blocks + block_C, mask=in_row_C, other=0.0)
    top = tl.max(max_C)
    shift = tl.where(top == -float("inf"), 0.0, top)
    log_total = shift + tl.log(tl.sum(sum_C * tl.exp(max_C - shift)))
    # Keys in int64, so that "no more" can lie below the key of -inf.
    gone = tl.full([], -4294967296, tl.int64)
    key_C = tl.where(in_row_C, order_key(max_C).to(tl.int64), gone)
    for rank in range(0, k):
        best = tl.max(key_C)
        block = tl.min(tl.where(key_C == best, block_C, BLOCK_C))
        token_L = block * BLOCK + lane_L
        logits_L = tl.load(logits_ptr + node * width + token_L, mask=token_L < width, other=-float("inf"))
        logits_L = logits_L.to(tl.float32)
        logits_L = tl.where(logits_L == logits_L, logits_L, -float("inf"))
        key_L = tl.where(token_L < width, order_key(logits_L).to(tl.int64), gone)
        # Picked before: gone, by id, since equals of the best may remain.
        for earlier in range(0, rank):
            id_before = tl.load(ids_ptr + node * k + earlier)
            key_L = tl.where(token_L == id_before, gone, key_L)
        token = tl.min(tl.where(key_L == best, token_L, width - 1))
        tl.store(ids_ptr + node * k + rank, token.to(tl.int64))
        logit = tl.max(tl.where(token_L == token, logits_L, -float("inf")))
        tl.store(log_probs_ptr + node * k + rank, logit - log_total)
        tl.debug_barrier()  # the id is read back when the next one is picked
        next_best = tl.max(tl.where(token_L == token, gone, key_L))
        key_C = tl.where(block_C == block, next_best, key_C)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: fp32 and bf16 logits, draft vocabularies up to 131072."""
    return [
        KernelBuild(
            name=f"draft_top_k {element} draft vocabulary<={blocks * BLOCK}",
            kernel=_draft_top_k_kernel,
            types={
                "logits_ptr": f"*{element}",
                **dict.fromkeys(("max_ptr", "sum_ptr", "log_probs_ptr"), "*fp32"),
                "ids_ptr": "*i64",
                **dict.fromkeys(("num_blocks", "width", "k"), "i32"),
            },
            aligned=frozenset(("logits_ptr", "max_ptr", "sum_ptr", "ids_ptr", "log_probs_ptr", "width")),
            constants={"BLOCK": BLOCK, "BLOCK_C": blocks},
            options={"num_warps": 4},
        )
        for element in AOT_ELEMENTS
        for blocks in (64, 256, 1024)
    ]
