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
from eyas.kernels.ttt_attention_blocks import ttt_attention_blocks
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


def ttt_attention(
    q_BHNd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first_BN: Tensor, slot_BN: Tensor
) -> Tensor:
    """out_BHNd in q's dtype, for step s = len(keys) - 1 at N of the T slots.

    keys[0] and values[0] are those of step 0, [B, G, T, d]; later ones belong to the queries, [B, G, N, d]. Query n
    stands at slot_BN (int64, ascending) and sees step-0 slots from first_BN on (`first_visible`). H is a multiple of G
    (head h reads kv head h // (H / G)); the scale is d ** -0.5. Differentiable to q and to all keys and values. dtypes:
    fp16, bf16, fp32, accumulated in fp32; without kernels, and for fp64 or head dims above 256, the same in blocks of
    queries. Errors: ValueError.
    """
    _check(q_BHNd, keys, values, first_BN, slot_BN)
    if not (available(q_BHNd.device) and q_BHNd.dtype in DTYPES and q_BHNd.shape[-1] <= MAX_HEAD_DIM):
        return ttt_attention_blocks(q_BHNd, keys, values, first_BN, slot_BN)
    T = keys[0].shape[2]
    if q_BHNd.shape[2] == T:
        return _TTTAttention.apply(q_BHNd, first_BN, *keys, *values)
    # The kernels walk all slots: those without a query get one of zeros, which sees no more than it must.
    at_B1N1 = slot_BN[:, None, :, None]

    def spread(x_BHNd: Tensor) -> Tensor:
        whole = x_BHNd.new_zeros(*x_BHNd.shape[:2], T, x_BHNd.shape[3])
        return whole.scatter(2, at_B1N1.expand_as(x_BHNd), x_BHNd)

    first_BT = _spread_first(first_BN, slot_BN, T)
    later_keys, later_values = ([spread(x) for x in xs[1:]] for xs in (keys, values))
    out_BHTd = _TTTAttention.apply(spread(q_BHNd), first_BT, keys[0], *later_keys, values[0], *later_values)
    return out_BHTd.gather(2, at_B1N1.expand_as(q_BHNd))


def _spread_first(first_BN: Tensor, slot_BN: Tensor, T: int) -> Tensor:
    """The first visible slot of all T slots, where that of N is known: the next known one's, or the slot itself.

    So spans still lie one after the other, and none ends before the last query that sees it.
    """
    known_BT = first_BN.new_full((len(first_BN), T), T).scatter(1, slot_BN, first_BN)
    next_BT = known_BT.flip(1).cummin(1).values.flip(1)
    return torch.minimum(next_BT, torch.arange(T, device=first_BN.device))


def _check(q_BHNd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first_BN: Tensor, slot_BN: Tensor) -> None:
    """None if the arguments of `ttt_attention` fit together; ValueError otherwise. Reads no values."""
    if not keys or len(keys) != len(values) or q_BHNd.shape[1] % keys[0].shape[1]:
        raise ValueError(
            f"q has {q_BHNd.shape[1]} heads, with {len(keys)} keys and {len(values)} values: give as many keys as "
            "values, at least one, with kv heads that divide the heads"
        )
    B, _, N, d = q_BHNd.shape
    G, T = keys[0].shape[1:3]
    for name, tensors in (("keys", keys), ("values", values)):
        for step, tensor in enumerate(tensors):
            shape = (B, G, N if step else T, d)
            if tensor.shape != shape or tensor.dtype != q_BHNd.dtype or tensor.device != q_BHNd.device:
                raise ValueError(
                    f"{name}[{step}] is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {q_BHNd.dtype} "
                    f"{shape} on {q_BHNd.device}, to match q {tuple(q_BHNd.shape)}"
                )
    for name, tensor in (("first_BN", first_BN), ("slot_BN", slot_BN)):
        if tensor.shape != (B, N) or tensor.dtype != torch.int64 or N > T:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: give torch.int64 {(B, N)}, one per query, with at "
                f"most the {T} slots of keys[0]"
            )


def ttt_attention_reference(
    q_BHNd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first_BN: Tensor, slot_BN: Tensor
) -> Tensor:
    """The same as `ttt_attention`, with a dense N x T mask: the definition.

    Products run in q's dtype, the softmax in fp32 or better.
    """
    H, T, d = q_BHNd.shape[1], keys[0].shape[2], q_BHNd.shape[3]
    groups = H // keys[0].shape[1]
    keys, values = ([x.repeat_interleave(groups, dim=1) for x in xs] for xs in (keys, values))
    key_T = torch.arange(T, device=q_BHNd.device)
    hidden_BNT = (key_T > slot_BN[:, :, None]) | (key_T < first_BN[:, :, None])
    accurate = torch.promote_types(q_BHNd.dtype, torch.float32)
    scores = (q_BHNd @ keys[0].transpose(-1, -2)).to(accurate).masked_fill(hidden_BNT[:, None], float("-inf"))
    own = [(q_BHNd * key).sum(-1, keepdim=True).to(accurate) for key in keys[1:]]
    weights = (torch.cat((scores, *own), dim=-1) * d**-0.5).softmax(-1).to(q_BHNd.dtype)
    out = weights[..., :T] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., T + i, None] * value
    return out


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
