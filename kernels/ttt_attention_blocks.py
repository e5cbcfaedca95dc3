"""TTT attention without kernels: queries block by block, keeping q, k, v, the output and one number per query.

One softmax runs over both parts of what a query sees: with L0 the log-sum-exp of the step-0 scores and d_i the score of
diagonal i, L = log(exp L0 + sum_i exp d_i), and every weight is exp(score - L). Memory is linear in T and in S; the
backward pass recomputes the scores of a block from L.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 64


def ttt_attention_blocks(
    q_BHNd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first_BN: Tensor, slot_BN: Tensor
) -> Tensor:
    """The same as `ttt_attention_reference`, keeping no scores: the CPU path of `ttt_attention`."""
    out: Tensor = _BlockAttention.apply(q_BHNd, first_BN, slot_BN, len(keys), *keys, *values)
    return out


class _BlockAttention(torch.autograd.Function):
    """Queries in blocks of QUERY_BLOCK against the step-0 keys their documents begin with, diagonals folded in."""

    @staticmethod
    def forward(
        ctx: Any, q_BHNd: Tensor, first_BN: Tensor, slot_BN: Tensor, steps: int, *keys_and_values: Tensor
    ) -> Tensor:
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        B, H, N, d = q_BHNd.shape
        G = keys[0].shape[1]
        q = q_BHNd.reshape(B, G, H // G, N, d)
        accurate = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        total = torch.empty(q.shape[:-1], dtype=accurate, device=q.device)
        with torch.autocast(device_type=q.device.type, enabled=False):
            own = _diagonal_scores(q, keys[1:], accurate)
            for rows, columns, hidden in _blocks(first_BN, slot_BN):
                q_block = q[:, :, :, rows]
                scores = _products(q_block, keys[0][:, :, columns]).to(accurate).mul_(d**-0.5)
                scores.masked_fill_(hidden, float("-inf"))
                top = scores.amax(-1)
                for score in own:
                    top = torch.maximum(top, score[..., rows])
                scores.sub_(top[..., None]).exp_()
                mass = scores.sum(-1)
                block = _values(scores.to(q.dtype), values[0][:, :, columns]).to(accurate)
                for score, value in zip(own, values[1:], strict=True):
                    weight = (score[..., rows] - top).exp_()
                    mass = mass + weight
                    block = block.addcmul_(weight[..., None], value[:, :, None, rows].to(accurate))
                out[:, :, :, rows] = block.div_(mass[..., None]).to(q.dtype)
                total[..., rows] = top + mass.log()
        ctx.save_for_backward(q, first_BN, slot_BN, out, total, *keys, *values)
        ctx.steps = steps
        return out.view(B, H, N, d)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, first_BN, slot_BN, out, total, *rest = ctx.saved_tensors
        keys, values = rest[: ctx.steps], rest[ctx.steps :]
        B, G, R, N, d = q.shape
        scale, accurate = d**-0.5, total.dtype
        g = grads[0].reshape(q.shape)
        delta = (g.to(accurate) * out.to(accurate)).sum(-1)
        own = _diagonal_scores(q, keys[1:], accurate)
        g_q = torch.empty(q.shape, dtype=accurate, device=q.device)
        g_k, g_v = (torch.zeros(keys[0].shape, dtype=accurate, device=q.device) for _ in range(2))
        for rows, columns, hidden in _blocks(first_BN, slot_BN):
            q_block, g_block, k, v = (
                q[:, :, :, rows],
                g[:, :, :, rows],
                keys[0][:, :, columns],
                values[0][:, :, columns],
            )
            weights = _products(q_block, k).to(accurate).mul_(scale).sub_(total[..., rows, None]).exp_()
            weights.masked_fill_(hidden, 0.0)
            g_v[:, :, columns] += _transposed(weights.to(q.dtype), g_block)
            g_scores = _products(g_block, v).to(accurate).sub_(delta[..., rows, None]).mul_(weights).mul_(scale)
            g_scores = g_scores.to(q.dtype)
            g_q[:, :, :, rows] = _values(g_scores, k).to(accurate)
            g_k[:, :, columns] += _transposed(g_scores, q_block)
        later_k, later_v = [], []
        for score, key, value in zip(own, keys[1:], values[1:], strict=True):
            weight = (score - total).exp_()
            g_score = (_dots(g, value, accurate) - delta) * weight * scale
            g_q.addcmul_(g_score[..., None], key[:, :, None].to(accurate))
            later_k.append((g_score[..., None] * q).sum(2).to(key.dtype))
            later_v.append((weight[..., None] * g).sum(2).to(value.dtype))
        g_keys = [g_k.to(q.dtype), *later_k]
        g_values = [g_v.to(q.dtype), *later_v]
        return g_q.to(q.dtype).view(B, G * R, N, d), None, None, None, *g_keys, *g_values


def _blocks(first_BN: Tensor, slot_BN: Tensor) -> list[tuple[slice, slice, Tensor]]:
    """Return (queries, key slots, what is hidden as [B, 1, 1, queries, keys]) of every block of queries."""
    blocks = []
    N = slot_BN.shape[1]
    lows = first_BN[:, ::QUERY_BLOCK].amin(0).tolist()
    lasts = slot_BN[:, [*range(QUERY_BLOCK - 1, N - 1, QUERY_BLOCK), N - 1]].amax(0).tolist() if N else []
    for number, (low, last) in enumerate(zip(lows, lasts, strict=True)):
        rows = slice(number * QUERY_BLOCK, min(N, (number + 1) * QUERY_BLOCK))
        columns = slice(low, last + 1)
        key_L = torch.arange(low, last + 1, device=first_BN.device)
        hidden_BNL = (key_L > slot_BN[:, rows, None]) | (key_L < first_BN[:, rows, None])
        blocks.append((rows, columns, hidden_BNL[:, None, None]))
    return blocks


def _products(x_BGRTd: Tensor, k_BGLd: Tensor) -> Tensor:
    """Return x @ k^T as [B, G, R, T, L]; the R heads of a group share its keys."""
    B, G, R, T, d = x_BGRTd.shape
    return (x_BGRTd.reshape(B, G, R * T, d) @ k_BGLd.transpose(-1, -2)).view(B, G, R, T, -1)


def _values(weights_BGRTL: Tensor, v_BGLd: Tensor) -> Tensor:
    """Return weights @ v as [B, G, R, T, d]."""
    B, G, R, T, L = weights_BGRTL.shape
    return (weights_BGRTL.view(B, G, R * T, L) @ v_BGLd).view(B, G, R, T, -1)


def _transposed(weights_BGRTL: Tensor, x_BGRTd: Tensor) -> Tensor:
    """Return weights^T @ x summed over the heads of a group, [B, G, L, d]."""
    B, G, R, T, L = weights_BGRTL.shape
    return weights_BGRTL.view(B, G, R * T, L).transpose(-1, -2) @ x_BGRTd.reshape(B, G, R * T, -1)


def _dots(x_BGRTd: Tensor, y_BGTd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot product of every head's vector with its group's, [B, G, R, T]."""
    return (x_BGRTd.to(dtype) * y_BGTd[:, :, None].to(dtype)).sum(-1)


def _diagonal_scores(q_BGRTd: Tensor, keys: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return the score of every later key of each slot, each [B, G, R, T]."""
    return [_dots(q_BGRTd, key, dtype) * q_BGRTd.shape[-1] ** -0.5 for key in keys]
