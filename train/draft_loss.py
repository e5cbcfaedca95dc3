"""The loss over the draft vocabulary, in chunks: no logits are kept, the gradient is made where the logits are.

A *pair* is a slot at a step. Pairs are sorted by the position whose distribution teaches them, so a chunk of positions
needs each teacher distribution once, for all steps together. In a chunk the logits z are one matrix product;
`kernels/draft_gradients.py` turns them into dloss/dz, and two more products make the gradients by states and weight at
once. Autograd later only scales them. Memory is one chunk, whatever the number of slots and steps, and nothing is
computed twice.

`draft_loss_reference` is the same loss in plain PyTorch, for one block of logits.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.draft_gradients import BLOCK_ELEMENTS, draft_gradients
from eyas.kernels.draft_loss import terms_of
from eyas.models.target_head import TargetHead
from eyas.train.losses import LossMix

CHUNK_ROWS = 2048
"""Pairs of one chunk: enough that the gradient by a large output weight is added up a few times only."""
CHUNK_ELEMENTS = 1 << 26
"""The most logits of one chunk: 128 MiB in bf16."""


@dataclass(frozen=True)
class Lesson:
    """What M pairs are taught: pair i by position position_M[i] of P (ascending), with weight weight_M[i].

    `final_PD` are the target's final states at the positions, `teacher` its output head over the draft vocabulary.
    """

    final_PD: Tensor
    teacher: TargetHead
    position_M: Tensor

    def chunks(self, rows: int) -> list[tuple[slice, slice]]:
        """Return (positions, pairs) of as few chunks as have `rows` pairs, of the same size but for whole positions."""
        M = len(self.position_M)
        ends = torch.bincount(self.position_M, minlength=len(self.final_PD)).cumsum(0).tolist()
        number = -(-M // rows)
        found, position, pair = [], 0, 0
        for k in range(1, number + 1):
            stop = bisect_left(ends, k * M / number) + 1
            if stop > position:
                found.append((slice(position, stop), slice(pair, ends[stop - 1])))
                position, pair = stop, ends[stop - 1]
        return found

    def to(self, dtype: torch.dtype) -> "Lesson":
        """Return the lesson of a teacher whose products run in a dtype."""
        return replace(self, teacher=self.teacher.to(dtype=dtype, device=self.final_PD.device))

    def logits(self, positions: slice) -> Tensor:
        """Return the teacher's logits at some positions, [n, U]."""
        return self.teacher.logits(self.final_PD[positions])

    def distribution(self, positions: slice) -> Tensor:
        """Return the teacher's distribution at some positions, [n, U], in fp32 or better."""
        logits = self.logits(positions)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)


def chunk_rows(vocabulary: int) -> int:
    """Return how many pairs a chunk has with so many draft ids."""
    return max(1, min(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary))


def draft_loss_reference(logits_NU: Tensor, p_NU: Tensor, mix: LossMix) -> Tensor:
    """Return the loss per slot, [N], with its gradient left to autograd."""
    return mix.pull(terms_of(logits_NU, p_NU)).loss_N


def draft_loss(states_MD: Tensor, output: TargetHead, lesson: Lesson, weight_M: Tensor, mix: LossMix) -> Tensor:
    """Return sum over pairs of weight * loss, with gradients by states and (where it wants one) the output weight.

    `output` maps states to draft logits. Products, the teacher's too, run in autocast's dtype, or else in that of the
    states; softmax and losses in fp32 or better.
    """
    kind = states_MD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states_MD.dtype
    arguments = (states_MD, output.weight_VD, weight_M, output, lesson, mix, dtype)
    loss: Tensor = _DraftLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_MD: Tensor,
        weight_UD: Tensor,
        weight_M: Tensor,
        output: TargetHead,
        lesson: Lesson,
        mix: LossMix,
        dtype: torch.dtype,
    ) -> Tensor:
        accurate = torch.promote_types(states_MD.dtype, torch.float32)
        wants_states, wants_weight = ctx.needs_input_grad[:2]
        x_MD, head = states_MD.to(dtype), output.to(dtype=dtype, device=states_MD.device)
        lesson = lesson.to(dtype)
        g_states = torch.empty_like(states_MD) if wants_states else None
        # Made before the logits: behind the first chunk's it would take their place, and the next need more memory.
        g_weight = torch.empty_like(weight_UD) if wants_weight else None
        total = torch.zeros((), dtype=accurate, device=states_MD.device)
        with torch.autocast(device_type=states_MD.device.type, enabled=False):
            for positions, pairs in lesson.chunks(chunk_rows(len(weight_UD))):
                losses_N, g_NU = draft_gradients(
                    head.logits(x_MD[pairs]),
                    lesson.logits(positions),
                    lesson.position_M[pairs] - positions.start,
                    mix.pull,
                    needs=mix.needs,
                    scale=head.scale,
                    softcap=head.softcap,
                )
                weights_N = weight_M[pairs].to(accurate)
                total += torch.dot(losses_N, weights_N)
                if g_states is not None:
                    g_states[pairs] = (g_NU @ head.weight_VD).to(accurate).mul_(weights_N[:, None]).to(states_MD.dtype)
                # Nothing of a chunk may live on while the next one is made.
                if g_weight is None:
                    del g_NU
                    continue
                g_chunk = g_NU.t() @ (x_MD[pairs].to(accurate) * weights_N[:, None]).to(dtype)
                del g_NU
                g_weight.add_(g_chunk) if pairs.start else g_weight.copy_(g_chunk)
                del g_chunk
        if g_weight is not None and not len(states_MD):
            g_weight.zero_()
        ctx.g_states, ctx.g_weight = g_states, g_weight
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g.mul_(grads[0].to(g.dtype)) for g in (ctx.g_states, ctx.g_weight)]
        ctx.g_states = ctx.g_weight = None
        return *scaled, None, None, None, None, None


@torch.no_grad()
def draft_outlook(states_MD: Tensor, output: TargetHead, lesson: Lesson, draft_id_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return (overlap_M, rank_M): how likely each pair's draft is accepted, and how many tokens it prefers to its own.

    `draft_id_M` is the draft id of the text's own token, -1 when it cannot be drafted: then the rank is U.
    """
    kind = states_MD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states_MD.dtype
    U = len(output.weight_VD)
    overlaps, ranks = [], []
    with torch.autocast(device_type=kind, enabled=False):
        x_MD, head = states_MD.to(dtype), output.to(dtype=dtype, device=states_MD.device)
        lesson = lesson.to(dtype)
        for positions, pairs in lesson.chunks(chunk_rows(U)):
            p_PU = lesson.distribution(positions)
            z_NU = head.logits(x_MD[pairs])
            rows_N, ids_N = lesson.position_M[pairs] - positions.start, draft_id_M[pairs]
            size = max(1, BLOCK_ELEMENTS // U)
            for start in range(0, len(z_NU), size):
                z = z_NU[start : start + size].to(p_PU.dtype)
                ids = ids_N[start : start + size]
                overlaps.append(torch.minimum(p_PU[rows_N[start : start + size]], z.softmax(-1)).sum(-1))
                own = z.gather(-1, ids.clamp(min=0)[:, None])
                ranks.append(torch.where(ids < 0, U, (z > own).sum(-1)))
    if not overlaps:
        return states_MD.new_zeros(0), draft_id_M.new_zeros(0)
    return torch.cat(overlaps), torch.cat(ranks)
