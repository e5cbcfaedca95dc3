"""From draft logits to a loss and its gradient by them at once: what training runs on every chunk of logits.

A loss sees only the four terms of a slot (`draft_loss.py`), so its gradient by the logits is always the same three
vectors, weighted by how strongly the loss pulls on cross, hard and overlap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.draft_loss import ELEMENTS, DraftTerms, launch_gradients, launch_terms
from eyas.kernels.triton_support import available

BLOCK_ELEMENTS = 1 << 19
"""Logits turned into gradients at a time on a CPU: 2 MiB in fp32, what stays in the cache."""


@dataclass(frozen=True)
class Pull:
    """A loss's value per slot, and its derivatives by cross, hard and overlap."""

    loss_N: Tensor
    cross: Tensor | float = 0.0
    hard: Tensor | float = 0.0
    overlap: Tensor | float = 0.0


Pulling = Callable[[DraftTerms], Pull]


def draft_gradients(
    student_NU: Tensor,
    teacher_MU: Tensor,
    teacher_row_N: Tensor,
    pulling: Pulling,
    *,
    needs: frozenset[str],
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss_N, gradient_NU in the student's dtype), slot n taught by row teacher_row_N[n] (int64) of teacher logits.

    `pulling` says what the loss makes of the terms named in `needs`. The gradient is by W x, where the student's logits
    are softcap * tanh(scale * W x / softcap). The student may be overwritten. Softmax and losses are fp32 or better.
    """
    if not (available(student_NU.device) and student_NU.dtype in ELEMENTS and teacher_MU.dtype in ELEMENTS):
        return draft_gradients_reference(student_NU, teacher_MU, teacher_row_N, pulling, needs, scale, softcap)
    student_NU, teacher_MU, teacher_row_N = (x.contiguous() for x in (student_NU, teacher_MU, teacher_row_N))
    terms_4N, kept_N4 = launch_terms(student_NU, teacher_MU, teacher_row_N)
    pull = pulling(DraftTerms(*terms_4N))
    pulls_3N = torch.empty_like(terms_4N[:3])
    for row, value in zip(pulls_3N, (pull.cross, pull.hard, pull.overlap), strict=True):
        row.copy_(value) if isinstance(value, Tensor) else row.fill_(value)
    gradient_NU = launch_gradients(student_NU, teacher_MU, teacher_row_N, kept_N4, pulls_3N)
    if softcap is not None:
        gradient_NU *= 1 - (student_NU / softcap).square()
    if scale != 1.0:
        gradient_NU *= scale
    return pull.loss_N, gradient_NU


def draft_gradients_reference(
    student_NU: Tensor,
    teacher_MU: Tensor,
    teacher_row_N: Tensor,
    pulling: Pulling,
    needs: frozenset[str],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The same as `draft_gradients`, in blocks that stay in a CPU's cache: the CPU path; overwrites the student."""
    U = student_NU.shape[1]
    accurate = torch.promote_types(teacher_MU.dtype, torch.float32)
    nothing = teacher_MU.new_zeros(0, dtype=accurate)
    losses = []
    for slots in _blocks(teacher_row_N, max(1, BLOCK_ELEMENTS // U)):
        # Neighbours share rows of the teacher: their distributions are made here, in the cache, not for all rows.
        row_P, place_N = torch.unique_consecutive(teacher_row_N[slots], return_inverse=True)
        p_PU = teacher_MU.index_select(0, row_P).to(accurate).softmax(-1)
        block_NU = student_NU[slots]
        z = block_NU.to(accurate)
        p = p_PU.index_select(0, place_N)
        q = torch.softmax(z, -1)
        lse_N = z.amax(-1) - q.amax(-1).log()
        below = (q < p).to(accurate) if "overlap" in needs else None
        mass_N = (q * below).sum(-1) if below is not None else nothing
        best_N = p_PU.argmax(-1)[place_N] if "hard" in needs else None
        terms = DraftTerms(
            cross_N=lse_N - torch.linalg.vecdot(p, z) if "cross" in needs else nothing,
            entropy_N=-torch.xlogy(p_PU, p_PU).sum(-1)[place_N] if "entropy" in needs else nothing,
            hard_N=nothing if best_N is None else lse_N - z.gather(-1, best_N[:, None]).squeeze(-1),
            overlap_N=nothing if below is None else mass_N + (p * (1 - below)).sum(-1),
        )
        pull = pulling(terms)
        losses.append(pull.loss_N)
        gradient = _gradient(q, p, best_N, below, mass_N, pull.cross, pull.hard, pull.overlap)
        if softcap is not None:
            gradient *= 1 - (z / softcap).square()
        if scale != 1.0:
            gradient *= scale
        block_NU.copy_(gradient)
    return torch.cat(losses) if losses else nothing, student_NU


def _blocks(teacher_row_N: Tensor, size: int) -> Iterator[slice]:
    """Yield blocks of at most `size` slots, none of which ends between two of one teacher row unless it has to."""
    N = len(teacher_row_N)
    ends = [*((teacher_row_N[1:] != teacher_row_N[:-1]).nonzero().squeeze(-1) + 1).tolist(), N]
    start = 0
    while start < N:
        within = bisect_right(ends, start + size)
        stop = ends[within - 1] if within and ends[within - 1] > start else start + size
        yield slice(start, stop)
        start = stop


def _gradient(
    q: Tensor,
    p: Tensor,
    best_N: Tensor | None,
    below: Tensor | None,
    mass_N: Tensor,
    cross: Tensor | float,
    hard: Tensor | float,
    overlap: Tensor | float,
) -> Tensor:
    """Return dloss/dz of a block from a loss's pulls; overwrites q and p."""

    def column(pull: Tensor | float) -> Tensor | float:
        return pull[:, None] if isinstance(pull, Tensor) else pull

    if best_N is None and below is None:
        return q.sub_(p) if cross == 1.0 else q.sub_(p).mul_(cross)
    along_q: Tensor | float = column(cross) + column(hard)
    if below is not None:
        along_q = along_q + column(overlap) * (below - mass_N[:, None])
    gradient = q.mul_(along_q).sub_(p.mul_(column(cross)))
    if best_N is not None:
        pull_N = hard if isinstance(hard, Tensor) else torch.full_like(mass_N if below is not None else q[:, 0], hard)
        gradient.scatter_add_(-1, best_N[:, None], -pull_N[:, None])
    return gradient
