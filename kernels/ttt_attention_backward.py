"""The backward kernels of TTT attention: step-0 keys, queries over the span, then each later step's own key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, jit, on_device, tl
from eyas.kernels.ttt_attention_forward import (
    AOT_SHAPES,
    ELEMENTS,
    fold_shape,
    launch_shape,
    load_rows,
    store_rows,
    stride_names,
)


def launch_backward(
    dout_BHTd: Tensor,
    out_BHTd: Tensor,
    log_sum_BHT: Tensor,
    q_BHTd: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    start_BT: Tensor,
    stop_BT: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(dq, dkeys, dvalues), each in its tensor's dtype, from the output and the log-sum-exp of the forward pass."""
    B, H, T, head_dim = q_BHTd.shape
    G = keys[0].shape[1]
    delta_BHT = (dout_BHTd.float() * out_BHTd.float()).sum(-1)
    dq = torch.empty((B, H, T, head_dim), dtype=torch.float32, device=q_BHTd.device)
    dkeys = [torch.empty((B, G, T, head_dim), dtype=x.dtype, device=x.device) for x in keys]
    dvalues = [torch.empty_like(x) for x in dkeys]
    constants, options = launch_shape(head_dim, q_BHTd.dtype, backward=True)
    fold = fold_shape(head_dim)
    blocks = -(-T // constants["BLOCK_T"])
    if dq.numel() == 0:
        return dq.to(q_BHTd.dtype), dkeys, dvalues
    sizes = (H, H // G, T)
    with on_device(q_BHTd.device):
        for step, (key, value) in enumerate(zip(keys, values, strict=True)):
            inputs = (q_BHTd, key, value, dout_BHTd, log_sum_BHT, delta_BHT)
            strides = [stride for x in (q_BHTd, key, value, dout_BHTd) for stride in x.stride()[:3]]
            scalars = (head_dim**-0.5, *strides, *sizes)
            if step == 0:
                _ttt_span_key_grad_kernel[(blocks, B * G)](
                    *inputs, start_BT, stop_BT, dkeys[0], dvalues[0], *scalars, **constants, **options
                )
                _ttt_span_query_grad_kernel[(blocks, B * H)](*inputs, start_BT, dq, *scalars, **constants, **options)
            else:
                _ttt_own_key_grad_kernel[(-(-T // fold["BLOCK_T"]), B * G)](
                    *inputs,
                    dkeys[step],
                    dvalues[step],
                    dq,
                    *scalars,
                    **fold,
                    num_warps=4,
                )
    return dq.to(q_BHTd.dtype), dkeys, dvalues


@jit
def _ttt_span_key_grad_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, log_sum_ptr, delta_ptr, start_ptr, stop_ptr, dk_ptr, dv_ptr, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_g, k_stride_t, v_stride_b, v_stride_g, v_stride_t,
    dout_stride_b, dout_stride_h, dout_stride_t,
    num_heads, group, length,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Program (block of keys, row and kv head): all query heads of the group, all blocks of queries that see a key.
    num_kv = num_heads // group
    batch = (tl.program_id(1) // num_kv).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv).to(tl.int64)
    lane_T = tl.arange(0, BLOCK_T)
    first_key = tl.program_id(0) * BLOCK_T
    key_L = first_key + lane_T
    in_line_L = key_L < length
    k_offset = batch * k_stride_b + kv_head * k_stride_g
    v_offset = batch * v_stride_b + kv_head * v_stride_g
    k_LD = load_rows(k_ptr, k_offset, key_L, k_stride_t, in_line_L, HEAD_DIM, BLOCK_D)
    v_LD = load_rows(v_ptr, v_offset, key_L, v_stride_t, in_line_L, HEAD_DIM, BLOCK_D)
    last = tl.max(tl.load(stop_ptr + batch * length + key_L, mask=in_line_L, other=0))
    dk_LD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    dv_LD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        line = (batch * num_heads + head) * length
        for block_start in range(first_key, last, BLOCK_T):
            slot_T = block_start + lane_T
            in_line_T = slot_T < length
            start_T = tl.load(start_ptr + batch * length + slot_T, mask=in_line_T, other=length)
            q_TD = load_rows(
                q_ptr, batch * q_stride_b + head * q_stride_h, slot_T, q_stride_t, in_line_T, HEAD_DIM, BLOCK_D
            )
            dout_TD = load_rows(
                dout_ptr, batch * dout_stride_b + head * dout_stride_h, slot_T, dout_stride_t, in_line_T, HEAD_DIM,
                BLOCK_D,
            )  # fmt: skip
            log_sum_T = tl.load(log_sum_ptr + line + slot_T, mask=in_line_T, other=0.0)
            delta_T = tl.load(delta_ptr + line + slot_T, mask=in_line_T, other=0.0)
            scores_LT = tl.dot(k_LD, tl.trans(q_TD), input_precision=PRECISION) * scale
            sees_LT = (key_L[:, None] >= start_T[None, :]) & (key_L[:, None] <= slot_T[None, :]) & in_line_T[None, :]
            p_LT = tl.where(sees_LT, tl.exp(scores_LT - log_sum_T[None, :]), 0.0)
            dv_LD = tl.dot(p_LT.to(dout_TD.dtype), dout_TD, dv_LD, input_precision=PRECISION)
            dp_LT = tl.dot(v_LD, tl.trans(dout_TD), input_precision=PRECISION)
            ds_LT = p_LT * (dp_LT - delta_T[None, :]) * scale
            dk_LD = tl.dot(ds_LT.to(q_TD.dtype), q_TD, dk_LD, input_precision=PRECISION)
    offset = tl.program_id(1).to(tl.int64) * length * HEAD_DIM
    store_rows(dk_ptr, offset, key_L, in_line_L, dk_LD, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, offset, key_L, in_line_L, dv_LD, HEAD_DIM, BLOCK_D)


@jit
def _ttt_span_query_grad_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, log_sum_ptr, delta_ptr, start_ptr, dq_ptr, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_g, k_stride_t, v_stride_b, v_stride_g, v_stride_t,
    dout_stride_b, dout_stride_h, dout_stride_t,
    num_heads, group, length,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Program (block of queries, row and head): all blocks of keys that some query sees.
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    lane_T = tl.arange(0, BLOCK_T)
    first_slot = tl.program_id(0) * BLOCK_T
    slot_T = first_slot + lane_T
    in_line_T = slot_T < length
    line = tl.program_id(1).to(tl.int64) * length
    start_T = tl.load(start_ptr + batch * length + slot_T, mask=in_line_T, other=length)
    log_sum_T = tl.load(log_sum_ptr + line + slot_T, mask=in_line_T, other=0.0)
    delta_T = tl.load(delta_ptr + line + slot_T, mask=in_line_T, other=0.0)
    q_TD = load_rows(q_ptr, batch * q_stride_b + head * q_stride_h, slot_T, q_stride_t, in_line_T, HEAD_DIM, BLOCK_D)
    dout_TD = load_rows(
        dout_ptr, batch * dout_stride_b + head * dout_stride_h, slot_T, dout_stride_t, in_line_T, HEAD_DIM, BLOCK_D
    )
    k_offset = batch * k_stride_b + (head // group) * k_stride_g
    v_offset = batch * v_stride_b + (head // group) * v_stride_g
    dq_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for block_start in range(tl.min(start_T) // BLOCK_T * BLOCK_T, first_slot + BLOCK_T, BLOCK_T):
        key_L = block_start + lane_T
        in_line_L = key_L < length
        k_LD = load_rows(k_ptr, k_offset, key_L, k_stride_t, in_line_L, HEAD_DIM, BLOCK_D)
        v_LD = load_rows(v_ptr, v_offset, key_L, v_stride_t, in_line_L, HEAD_DIM, BLOCK_D)
        scores_TL = tl.dot(q_TD, tl.trans(k_LD), input_precision=PRECISION) * scale
        sees_TL = (key_L[None, :] >= start_T[:, None]) & (key_L[None, :] <= slot_T[:, None]) & in_line_T[:, None]
        p_TL = tl.where(sees_TL, tl.exp(scores_TL - log_sum_T[:, None]), 0.0)
        dp_TL = tl.dot(dout_TD, tl.trans(v_LD), input_precision=PRECISION)
        ds_TL = p_TL * (dp_TL - delta_T[:, None]) * scale
        dq_TD = tl.dot(ds_TL.to(k_LD.dtype), k_LD, dq_TD, input_precision=PRECISION)
    store_rows(dq_ptr, line * HEAD_DIM, slot_T, in_line_T, dq_TD, HEAD_DIM, BLOCK_D)


@jit
def _ttt_own_key_grad_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, log_sum_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_g, k_stride_t, v_stride_b, v_stride_g, v_stride_t,
    dout_stride_b, dout_stride_h, dout_stride_t,
    num_heads, group, length,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Program (block of slots, row and kv head): a slot's own key of a later step; dq is added to in place.
    num_kv = num_heads // group
    batch = (tl.program_id(1) // num_kv).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv).to(tl.int64)
    slot_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_line_T = slot_T < length
    k_offset = batch * k_stride_b + kv_head * k_stride_g
    v_offset = batch * v_stride_b + kv_head * v_stride_g
    k_TD = load_rows(k_ptr, k_offset, slot_T, k_stride_t, in_line_T, HEAD_DIM, BLOCK_D).to(tl.float32)
    v_TD = load_rows(v_ptr, v_offset, slot_T, v_stride_t, in_line_T, HEAD_DIM, BLOCK_D).to(tl.float32)
    dk_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    dv_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        line = (batch * num_heads + head) * length
        q_TD = load_rows(
            q_ptr, batch * q_stride_b + head * q_stride_h, slot_T, q_stride_t, in_line_T, HEAD_DIM, BLOCK_D
        ).to(tl.float32)
        dout_TD = load_rows(
            dout_ptr, batch * dout_stride_b + head * dout_stride_h, slot_T, dout_stride_t, in_line_T, HEAD_DIM, BLOCK_D
        ).to(tl.float32)
        dq_TD = load_rows(dq_ptr, line * HEAD_DIM, slot_T, HEAD_DIM, in_line_T, HEAD_DIM, BLOCK_D)
        log_sum_T = tl.load(log_sum_ptr + line + slot_T, mask=in_line_T, other=0.0)
        delta_T = tl.load(delta_ptr + line + slot_T, mask=in_line_T, other=0.0)
        p_T = tl.exp(tl.sum(q_TD * k_TD, 1) * scale - log_sum_T)
        ds_T = p_T * (tl.sum(dout_TD * v_TD, 1) - delta_T) * scale
        dv_TD += p_T[:, None] * dout_TD
        dk_TD += ds_T[:, None] * q_TD
        store_rows(dq_ptr, line * HEAD_DIM, slot_T, in_line_T, dq_TD + ds_T[:, None] * k_TD, HEAD_DIM, BLOCK_D)
    offset = tl.program_id(1).to(tl.int64) * length * HEAD_DIM
    store_rows(dk_ptr, offset, slot_T, in_line_T, dk_TD, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, offset, slot_T, in_line_T, dv_TD, HEAD_DIM, BLOCK_D)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: keys, queries and a later step's own key."""
    builds = []
    for dtype, head_dim in AOT_SHAPES:
        element = ELEMENTS[dtype]
        constants, options = launch_shape(head_dim, dtype, backward=True)
        strides = [*stride_names("q", "k", "v"), *(f"dout_stride_{axis}" for axis in "bht")]
        integers = dict.fromkeys((*strides, "num_heads", "group", "length"), "i32")
        shared = {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "dout_ptr"), f"*{element}"),
            **dict.fromkeys(("log_sum_ptr", "delta_ptr"), "*fp32"),
        }
        spans = {"start_ptr": "*i32", "stop_ptr": "*i32"}
        key_grads = dict.fromkeys(("dk_ptr", "dv_ptr"), f"*{element}")
        own = fold_shape(head_dim)
        for name, kernel, pointers, sizes, how in (
            ("keys", _ttt_span_key_grad_kernel, shared | spans | key_grads, constants, options),
            (
                "queries",
                _ttt_span_query_grad_kernel,
                shared | {"start_ptr": "*i32", "dq_ptr": "*fp32"},
                constants,
                options,
            ),
            ("own key", _ttt_own_key_grad_kernel, shared | key_grads | {"dq_ptr": "*fp32"}, own, {"num_warps": 4}),
        ):
            builds.append(
                KernelBuild(
                    name=f"ttt_attention backward {name} {element} head_dim={head_dim}",
                    kernel=kernel,
                    types={**pointers, "scale": "fp32", **integers},
                    aligned=frozenset((*pointers, *strides)),
                    constants=sizes,
                    options=how,
                )
            )
    return builds
