"""Attention of one training-time-test step: step-0 keys of the slot's document, and one own key per later step.

    query (t, s) sees   keys (j, 0) for first_t <= j <= t     and     keys (t, 1) .. (t, s)

Documents lie one after the other in a line, so what a slot sees of step 0 is a span: no mask is ever built, and whole
blocks of keys outside the span are skipped. The span part is flash attention that also leaves the log-sum-exp; each
later step's key is one number per query, folded into output and log-sum-exp by a pass over the slots. Backward goes the
same way with the final log-sum-exp. Kept for backward: the output and one number per query and step, linear in T and S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.triton_support import available
from eyas.kernels.ttt_attention_backward import launch_backward
from eyas.kernels.ttt_attention_forward import MAX_HEAD_DIM, launch_forward

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def first_visible(document_BT: Tensor) -> Tensor:
    """The first step-0 slot that each slot sees, int64 [B, T]: its document's first.

    Documents are contiguous; padding (a document below 0) sees itself only. Reads nothing back.
    """
    slot_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
    begins_BT[:, 1:] = (document_BT[:, 1:] != document_BT[:, :-1]) | (document_BT[:, 1:] < 0)
    return torch.where(begins_BT, slot_T, 0).cummax(1).values


def _stops(first_BT: Tensor) -> Tensor:
    """Behind the last slot that sees each step-0 slot: where the next span begins."""
    T = first_BT.shape[1]
    slot_T = torch.arange(T, device=first_BT.device)
    next_BT = torch.full_like(first_BT, T)
    next_BT[:, :-1] = torch.where(first_BT[:, 1:] == slot_T[1:], slot_T[1:], T)
    return next_BT.flip(1).cummin(1).values.flip(1)


def ttt_attention(q_BHTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first_BT: Tensor) -> Tensor:
    """out_BHTd in q's dtype, for step s = len(keys) - 1; keys and values are [B, G, T, d], that of step 0 first.

    first_BT comes from `first_visible`. H is a multiple of G (head h reads kv head h // (H / G)); the scale is
    d ** -0.5. Differentiable to q and to all keys and values. dtypes: fp16, bf16, fp32, accumulated in fp32; else
    (fp64, head dims above 256) the reference runs. Errors: ValueError.
    """
    shape = (q_BHTd.shape[0], keys[0].shape[1], *q_BHTd.shape[2:]) if keys else ()
    if not keys or len(keys) != len(values) or q_BHTd.shape[1] % keys[0].shape[1]:
        raise ValueError(
            f"q has {q_BHTd.shape[1]} heads, with {len(keys)} keys and {len(values)} values: give as many keys as "
            "values, at least one, with kv heads that divide the heads"
        )
    for name, tensors in (("keys", keys), ("values", values)):
        for step, tensor in enumerate(tensors):
            if tensor.shape != shape or tensor.dtype != q_BHTd.dtype or tensor.device != q_BHTd.device:
                raise ValueError(
                    f"{name}[{step}] is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {q_BHTd.dtype} "
                    f"{shape} on {q_BHTd.device}, to match q {tuple(q_BHTd.shape)}"
                )
    if available(q_BHTd.device) and q_BHTd.dtype in DTYPES and q_BHTd.shape[-1] <= MAX_HEAD_DIM:
        return _TTTAttention.apply(q_BHTd, first_BT, *keys, *values)
    return ttt_attention_reference(q_BHTd, keys, values, first_BT)


def ttt_attention_reference(
    q_BHTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first_BT: Tensor
) -> Tensor:
    """The same as `ttt_attention`, with a dense T x T mask: the definition, and the CPU path."""
    wide = torch.float64 if q_BHTd.dtype == torch.float64 else torch.float32
    group = q_BHTd.shape[1] // keys[0].shape[1]
    T, head_dim = q_BHTd.shape[2:]
    slot_T = torch.arange(T, device=q_BHTd.device)
    visible_BTT = (slot_T >= first_BT[..., None]) & (slot_T <= slot_T[:, None])
    q = q_BHTd.to(wide) * head_dim**-0.5
    wide_keys, wide_values = ([x.to(wide).repeat_interleave(group, dim=1) for x in xs] for xs in (keys, values))
    scores = (q @ wide_keys[0].mT).masked_fill(~visible_BTT[:, None], -torch.inf)
    own = [(q * key).sum(-1, keepdim=True) for key in wide_keys[1:]]
    weights = torch.cat((scores, *own), dim=-1).softmax(-1)
    out = weights[..., :T] @ wide_values[0]
    for step, value in enumerate(wide_values[1:]):
        out = out + weights[..., T + step, None] * value
    return out.to(q_BHTd.dtype)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, first_BT: Tensor, *keys_then_values: Tensor) -> Tensor:
        half = len(keys_then_values) // 2
        q = _readable(q)
        tensors = tuple(_readable(x) for x in keys_then_values)
        out, log_sum_BHT = launch_forward(q, tensors[:half], tensors[half:], first_BT.int().contiguous())
        ctx.save_for_backward(q, first_BT, out, log_sum_BHT, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, first_BT, out, log_sum_BHT, *tensors = ctx.saved_tensors
        half = len(tensors) // 2
        dq, dkeys, dvalues = launch_backward(
            _readable(grads[0]),
            out,
            log_sum_BHT,
            q,
            tensors[:half],
            tensors[half:],
            first_BT.int().contiguous(),
            _stops(first_BT).int().contiguous(),
        )
        return dq, None, *dkeys, *dvalues


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
