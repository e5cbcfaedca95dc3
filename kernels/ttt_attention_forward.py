"""The forward kernels of TTT attention: the span of step-0 keys, then one fold per later step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, jit, next_power_of_two, on_device, tl

MAX_HEAD_DIM = 256
# Elements per program of a fold: one key of 64 dims for 32 slots, of 256 for 8.
FOLD_CELLS = 2048
ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def launch_shape(head_dim: int, dtype: torch.dtype, *, backward: bool = False) -> tuple[dict[str, Any], dict[str, int]]:
    """Block sizes and options; `eyas.kernels.aot` measures that they spill no registers."""
    block_d = max(next_power_of_two(head_dim), 16)
    exact = dtype == torch.float32
    cells = 64 * 64 if backward else 64 * 128
    block = min(64, max(16, (cells // 4 if exact else cells) // block_d))
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_T": block,
        "BLOCK_D": block_d,
        "PRECISION": "ieee" if exact else "tf32",
    }
    if exact and backward:
        return constants, {"num_warps": 8 if block_d == MAX_HEAD_DIM else 4, "num_stages": 1}
    if block_d == 128 and head_dim < block_d and not backward:  # masked columns take registers of their own
        return constants, {"num_warps": 8, "num_stages": 1}
    return constants, {"num_warps": 8 if block_d >= (64 if backward else 128) else 4, "num_stages": 2}


def fold_shape(head_dim: int) -> dict[str, int]:
    """Block sizes of the passes over one own key per slot."""
    block_d = max(next_power_of_two(head_dim), 16)
    return {"HEAD_DIM": head_dim, "BLOCK_T": min(64, FOLD_CELLS // block_d), "BLOCK_D": block_d}


def launch_forward(
    q_BHTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], start_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """(out_BHTd, log_sum_BHT) of a step; tensors have stride 1 in their last dimension."""
    B, H, T, head_dim = q_BHTd.shape
    group = H // keys[0].shape[1]
    last = len(keys) == 1
    out = torch.empty((B, H, T, head_dim), dtype=q_BHTd.dtype if last else torch.float32, device=q_BHTd.device)
    log_sum_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BHTd.device)
    scale = head_dim**-0.5
    constants, options = launch_shape(head_dim, q_BHTd.dtype)
    fold = fold_shape(head_dim)
    if out.numel() == 0:
        return out.to(q_BHTd.dtype), log_sum_BHT
    with on_device(q_BHTd.device):
        _ttt_span_kernel[(-(-T // constants["BLOCK_T"]), B * H)](
            q_BHTd,
            keys[0],
            values[0],
            start_BT,
            out,
            log_sum_BHT,
            scale,
            *q_BHTd.stride()[:3],
            *keys[0].stride()[:3],
            *values[0].stride()[:3],
            H,
            group,
            T,
            **constants,
            **options,
        )
        for key, value in zip(keys[1:], values[1:], strict=True):
            _ttt_fold_kernel[(-(-T // fold["BLOCK_T"]), B * H)](
                q_BHTd,
                key,
                value,
                out,
                log_sum_BHT,
                scale,
                *q_BHTd.stride()[:3],
                *key.stride()[:3],
                *value.stride()[:3],
                H,
                group,
                T,
                **fold,
                num_warps=4,
            )
    return out.to(q_BHTd.dtype), log_sum_BHT


@jit
def load_rows(ptr, offset, slot_T, stride_t, in_line_T, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head; zeros outside the line and the head dim. Offsets in int64."""
    dim_D = tl.arange(0, BLOCK_D)
    where_TD = ptr + offset + slot_T.to(tl.int64)[:, None] * stride_t + dim_D[None, :]
    return tl.load(where_TD, mask=in_line_T[:, None] & (dim_D < HEAD_DIM)[None, :], other=0.0)


@jit
def store_rows(ptr, offset, slot_T, in_line_T, rows_TD, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes rows of one head of a contiguous [.., T, HEAD_DIM] tensor."""
    dim_D = tl.arange(0, BLOCK_D)
    where_TD = ptr + offset + slot_T.to(tl.int64)[:, None] * HEAD_DIM + dim_D[None, :]
    mask_TD = in_line_T[:, None] & (dim_D < HEAD_DIM)[None, :]
    tl.store(where_TD, rows_TD.to(ptr.dtype.element_ty), mask=mask_TD)


@jit
def _ttt_span_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, out_ptr, log_sum_ptr, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_g, k_stride_t, v_stride_b, v_stride_g, v_stride_t,
    num_heads, group, length,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Program (block of queries, row and head): online softmax over the blocks of keys that some query sees.
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    lane_T = tl.arange(0, BLOCK_T)
    first_slot = tl.program_id(0) * BLOCK_T
    slot_T = first_slot + lane_T
    in_line_T = slot_T < length
    start_T = tl.load(start_ptr + batch * length + slot_T, mask=in_line_T, other=length)
    q_TD = load_rows(q_ptr, batch * q_stride_b + head * q_stride_h, slot_T, q_stride_t, in_line_T, HEAD_DIM, BLOCK_D)
    k_offset = batch * k_stride_b + (head // group) * k_stride_g
    v_offset = batch * v_stride_b + (head // group) * v_stride_g

    max_T = tl.full([BLOCK_T], -float("inf"), tl.float32)
    sum_T = tl.zeros([BLOCK_T], tl.float32)
    out_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    first_block = tl.min(start_T) // BLOCK_T * BLOCK_T
    for block_start in range(first_block, first_slot + BLOCK_T, BLOCK_T):
        key_L = block_start + lane_T
        in_line_L = key_L < length
        k_LD = load_rows(k_ptr, k_offset, key_L, k_stride_t, in_line_L, HEAD_DIM, BLOCK_D)
        v_LD = load_rows(v_ptr, v_offset, key_L, v_stride_t, in_line_L, HEAD_DIM, BLOCK_D)
        scores_TL = tl.dot(q_TD, tl.trans(k_LD), input_precision=PRECISION) * scale
        sees_TL = (key_L[None, :] >= start_T[:, None]) & (key_L[None, :] <= slot_T[:, None])
        scores_TL = tl.where(sees_TL, scores_TL, -float("inf"))
        new_max_T = tl.maximum(max_T, tl.max(scores_TL, 1))
        shift_T = tl.where(new_max_T == -float("inf"), 0.0, new_max_T)
        weights_TL = tl.exp(scores_TL - shift_T[:, None])
        decay_T = tl.exp(max_T - shift_T)
        sum_T = sum_T * decay_T + tl.sum(weights_TL, 1)
        out_TD = tl.dot(weights_TL.to(v_LD.dtype), v_LD, out_TD * decay_T[:, None], input_precision=PRECISION)
        max_T = new_max_T
    sum_T = tl.where(in_line_T, sum_T, 1.0)
    line = tl.program_id(1).to(tl.int64) * length
    store_rows(out_ptr, line * HEAD_DIM, slot_T, in_line_T, out_TD / sum_T[:, None], HEAD_DIM, BLOCK_D)
    tl.store(log_sum_ptr + line + slot_T, max_T + tl.log(sum_T), mask=in_line_T)


@jit
def _ttt_fold_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_g, k_stride_t, v_stride_b, v_stride_g, v_stride_t,
    num_heads, group, length,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Program (block of slots, row and head): one more key and value per slot, its own, in place.
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    slot_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_line_T = slot_T < length
    line = tl.program_id(1).to(tl.int64) * length
    q_TD = load_rows(q_ptr, batch * q_stride_b + head * q_stride_h, slot_T, q_stride_t, in_line_T, HEAD_DIM, BLOCK_D)
    k_TD = load_rows(
        k_ptr, batch * k_stride_b + (head // group) * k_stride_g, slot_T, k_stride_t, in_line_T, HEAD_DIM, BLOCK_D
    )
    v_TD = load_rows(
        v_ptr, batch * v_stride_b + (head // group) * v_stride_g, slot_T, v_stride_t, in_line_T, HEAD_DIM, BLOCK_D
    )
    out_TD = load_rows(out_ptr, line * HEAD_DIM, slot_T, HEAD_DIM, in_line_T, HEAD_DIM, BLOCK_D)
    log_sum_T = tl.load(log_sum_ptr + line + slot_T, mask=in_line_T, other=0.0)
    score_T = tl.sum(q_TD.to(tl.float32) * k_TD.to(tl.float32), 1) * scale
    top_T = tl.maximum(log_sum_T, score_T)
    new_T = top_T + tl.log(tl.exp(log_sum_T - top_T) + tl.exp(score_T - top_T))
    out_TD = out_TD * tl.exp(log_sum_T - new_T)[:, None] + v_TD.to(tl.float32) * tl.exp(score_T - new_T)[:, None]
    store_rows(out_ptr, line * HEAD_DIM, slot_T, in_line_T, out_TD, HEAD_DIM, BLOCK_D)
    tl.store(log_sum_ptr + line + slot_T, new_T, mask=in_line_T)


def stride_names(*tensors: str) -> list[str]:
    """The stride arguments of q, k and v, in the kernels' order."""
    return [f"{x}_stride_{axis}" for x in tensors for axis in (("b", "h", "t") if x == "q" else ("b", "g", "t"))]


AOT_SHAPES = [
    *((torch.bfloat16, head_dim) for head_dim in (64, 80, 128, 256)),
    (torch.float16, 128),
    *((torch.float32, head_dim) for head_dim in (64, 128, 256)),
]


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: step 0 and the fold of a later step."""
    builds = []
    for dtype, head_dim in AOT_SHAPES:
        element = ELEMENTS[dtype]
        constants, options = launch_shape(head_dim, dtype)
        strides = stride_names("q", "k", "v")
        integers = dict.fromkeys((*strides, "num_heads", "group", "length"), "i32")
        inputs = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{element}")
        span = {**inputs, "start_ptr": "*i32", "out_ptr": f"*{element}", "log_sum_ptr": "*fp32"}
        fold = {**inputs, "out_ptr": "*fp32", "log_sum_ptr": "*fp32"}
        builds.append(
            KernelBuild(
                name=f"ttt_attention span {element} head_dim={head_dim}",
                kernel=_ttt_span_kernel,
                types={**span, "scale": "fp32", **integers},
                aligned=frozenset((*span, *strides)),
                constants=constants,
                options=options,
            )
        )
        builds.append(
            KernelBuild(
                name=f"ttt_attention fold {element} head_dim={head_dim}",
                kernel=_ttt_fold_kernel,
                types={**fold, "scale": "fp32", **integers},
                aligned=frozenset((*fold, *strides)),
                constants=fold_shape(head_dim),
                options={"num_warps": 4},
            )
        )
    return builds
