"""What a training-time-test step may see: step-0 keys up to its slot, and its own later keys (one diagonal per step).

    query (t, s) sees   keys (j, 0) for first_t <= j <= t     and     keys (t, 1) .. (t, s)

first_t is the first slot of t's document. That is exactly what the draft cache shows a node of depth s when decoding;
the step-0 mask never shifts with s. Nobody but the slot itself sees its later keys, so a slot that is not trained needs
no query, no output and no later step: `wanted_N` of a context names the slots that go on after step 0's keys, those of
the head's last layer, as the layers before it make keys of step 0 too.

One softmax runs over both parts: with L0 the log-sum-exp of the step-0 scores and
d_i the score of diagonal i, L = log(exp L0 + sum_i exp d_i), and every weight is exp(score - L).

`blocks` takes the queries block by block and keeps q, k, v, the output and L, so memory is linear in T and in S; its
backward pass recomputes the scores of a block from L. `dense` is the sentence above written down, for tests.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.ttt_attention import first_visible
from eyas.models.layers import take_rows

QUERY_BLOCK = 64

Attention = Callable[[Tensor, list[Tensor], list[Tensor], Tensor, Tensor], Tensor]


def ttt_attention_dense(
    q_BHNd: Tensor, keys: list[Tensor], values: list[Tensor], first_BN: Tensor, slot_BN: Tensor
) -> Tensor:
    """Return the attention output_BHNd of step len(keys) - 1 for the queries of N slots.

    keys[0] are the step-0 keys_BGTd of all T slots, the rest the later keys_BGNd of the queries' own. Query n stands at
    slot_BN and sees step-0 slots from first_BN on.
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


def ttt_attention_blocks(
    q_BHNd: Tensor, keys: list[Tensor], values: list[Tensor], first_BN: Tensor, slot_BN: Tensor
) -> Tensor:
    """Return what `ttt_attention_dense` returns, keeping no scores; slots ascend."""
    arguments = (q_BHNd, first_BN, slot_BN, len(keys), *keys, *values)
    out: Tensor = _BlockAttention.apply(*arguments)  # type: ignore[no-untyped-call]
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


TTT_ATTENTIONS: dict[str, Attention] = {"blocks": ttt_attention_blocks, "dense": ttt_attention_dense}


Layers = tuple[Tensor, ...]  # one tensor per layer of the head


class TTTContext:
    """The attention context of one training batch: the keys of all steps so far, alive for one forward pass."""

    def __init__(
        self,
        document_BT: Tensor,
        *,
        attention: str = "blocks",
        keys: tuple[Layers, ...] = (),
        values: tuple[Layers, ...] = (),
        wanted_N: Tensor | None = None,
        layers: int = 1,
    ) -> None:
        """`document_BT`: document number of every slot, -1 for padding. `keys` and `values`: of the steps before.

        `wanted_N` are the slots that go on, ascending flat indices into B*T; all lines then count as one from the
        attention of step 0's last layer (of `layers`) on, and later steps take [1, N, ...]. Left out, all go on.
        """
        B, T = document_BT.shape
        first_BT, slot_BT = first_visible(document_BT), torch.arange(T, device=document_BT.device).expand(B, T)
        self.lines = self.queries = (first_BT, slot_BT)
        if wanted_N is not None:
            line_B1 = T * torch.arange(B, device=document_BT.device)[:, None]
            self.queries = ((first_BT + line_B1).flatten()[None, wanted_N], wanted_N[None])
        self.wanted_N = wanted_N
        self.last_layer = layers - 1
        self._cuts = False
        self.attention = TTT_ATTENTIONS[attention]
        self.keys, self.values = list(keys), list(values)

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, *, layer: int = 0) -> Tensor:
        """Return the attention output of a layer of the next step, which begins with layer 0; the first is step 0.

        The last layer of step 0 leaves the wanted slots alone; the layers before it make keys that others see.
        """
        if layer == 0:
            self.keys.append(())
            self.values.append(())
        joins = self.wanted_N is not None and len(self.keys) == 1
        self._cuts = joins and layer == self.last_layer
        self.keys[-1] += (_joined(k_BGTd) if joins else k_BGTd,)
        self.values[-1] += (_joined(v_BGTd) if joins else v_BGTd,)
        if joins and not self._cuts:
            return self.attention(q_BHTd, [k_BGTd], [v_BGTd], *self.lines)
        if self._cuts and self.wanted_N is not None:
            H, d = q_BHTd.shape[1], q_BHTd.shape[3]
            q_MA = q_BHTd.transpose(1, 2).reshape(-1, H * d)
            q_BHTd = take_rows(q_MA, self.wanted_N).view(1, -1, H, d).transpose(1, 2)
        keys, values = ([step[layer] for step in steps] for steps in (self.keys, self.values))
        return self.attention(q_BHTd, keys, values, *self.queries)

    def kept(self, x_BTD: Tensor) -> Tensor:
        """Return those rows of the layer's input that `attend` returned outputs for."""
        if self.wanted_N is None or not self._cuts:
            return x_BTD
        return take_rows(x_BTD.flatten(0, 1), self.wanted_N)[None]


def _joined(x_BGTd: Tensor) -> Tensor:
    """Return the keys of all lines as those of one, [1, G, B*T, d]."""
    return x_BGTd.transpose(0, 1).flatten(1, 2)[None]
