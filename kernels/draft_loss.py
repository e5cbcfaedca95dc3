"""What every loss of draft logits against the target's is made of, without probabilities in memory.

Per slot, p the target's distribution and q the head's, both over the draft vocabulary, z the head's logits:

    cross    -sum p log q         its gradient to z   q - p
    entropy  -sum p log p                             (constant)
    hard     -log q[argmax p]                         q - onehot(argmax p)
    overlap  sum min(p, q)                            q (g - sum q g),  g = [q < p], 1/2 where equal as torch has it

The kernels read the logits in chunks: one pass for both log-sum-exps, one for the sums above, one backward that
writes the gradient, which has to exist anyway. Kept between forward and backward: four numbers per slot. The teacher's
rows are named by index: the steps of training-time test share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_CHUNK = 1024  # twice as much spills where the teacher is fp32 (triton 3.7, sm_80)


class DraftTerms(NamedTuple):
    """The numbers of N slots that every loss is made of, fp32 (fp64 from fp64 logits); empty where none asks for it."""

    cross_N: Tensor
    entropy_N: Tensor
    hard_N: Tensor
    overlap_N: Tensor


def draft_terms(student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor) -> DraftTerms:
    """The terms of slot n against row teacher_row_N[n] (int64) of the teacher's logits; differentiable to the student.

    Logits: fp32, bf16 or fp16 (the reference also fp64). A row outside the teacher gives NaN on a GPU. Errors:
    ValueError.
    """
    shapes_fit = student_NU.ndim == teacher_MU.ndim == 2 and student_NU.shape[1] == teacher_MU.shape[1]
    if not shapes_fit or teacher_row_N.shape != student_NU.shape[:1] or teacher_row_N.dtype != torch.int64:
        raise ValueError(
            f"student {tuple(student_NU.shape)}, teacher {tuple(teacher_MU.shape)}, teacher_row_N "
            f"{teacher_row_N.dtype} {tuple(teacher_row_N.shape)}: give [slots, draft vocabulary], [rows, the same] and "
            "int64 [slots]"
        )
    if available(student_NU.device) and student_NU.dtype in ELEMENTS and teacher_MU.dtype in ELEMENTS:
        return DraftTerms(*_DraftTerms.apply(student_NU, teacher_MU, teacher_row_N))
    return draft_terms_reference(student_NU, teacher_MU, teacher_row_N)


def draft_terms_reference(student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor) -> DraftTerms:
    """The same as `draft_terms`, from dense probabilities: the definition, and the CPU path."""
    student_NU, teacher_MU = (x if x.dtype == torch.float64 else x.float() for x in (student_NU, teacher_MU))
    return terms_of(student_NU, teacher_MU.softmax(-1)[teacher_row_N])


def terms_of(logits_NU: Tensor, p_NU: Tensor) -> DraftTerms:
    """The terms of finite logits against distributions, by autograd's own rules."""
    log_q_NU = torch.log_softmax(logits_NU, -1)
    return DraftTerms(
        cross_N=-(p_NU * log_q_NU).sum(-1),
        entropy_N=-torch.xlogy(p_NU, p_NU).sum(-1),
        hard_N=-log_q_NU.gather(-1, p_NU.argmax(-1, keepdim=True)).squeeze(-1),
        overlap_N=torch.minimum(p_NU, log_q_NU.exp()).sum(-1),
    )


class _DraftTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor) -> tuple[Tensor, ...]:
        student_NU, teacher_MU = student_NU.contiguous(), teacher_MU.contiguous()
        teacher_row_N = teacher_row_N.contiguous()
        terms_4N, kept_N4 = launch_terms(student_NU, teacher_MU, teacher_row_N)
        ctx.save_for_backward(student_NU, teacher_MU, teacher_row_N, kept_N4)
        ctx.mark_non_differentiable(terms_4N[1])
        return tuple(terms_4N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pulls_3N = torch.stack((grads[0], grads[2], grads[3])).float()
        student_NU, teacher_MU, teacher_row_N, kept_N4 = ctx.saved_tensors
        return launch_gradients(student_NU, teacher_MU, teacher_row_N, kept_N4, pulls_3N), None, None


def launch_terms(student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor) -> tuple[Tensor, Tensor]:
    slots, width = student_NU.shape
    terms_4N = torch.empty((4, slots), dtype=torch.float32, device=student_NU.device)
    kept_N4 = torch.empty((slots, 4), dtype=torch.float32, device=student_NU.device)
    if slots:
        with on_device(student_NU.device):
            _draft_terms_forward_kernel[(slots,)](
                student_NU,
                teacher_MU,
                teacher_row_N,
                terms_4N,
                kept_N4,
                slots,
                teacher_MU.shape[0],
                width,
                CHUNK=_chunk(width),
                num_warps=8,
            )
    return terms_4N, kept_N4


def launch_gradients(
    student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor, kept_N4: Tensor, pulls_3N: Tensor
) -> Tensor:
    slots, width = student_NU.shape
    grad_NU = torch.empty_like(student_NU)
    if slots:
        with on_device(student_NU.device):
            _draft_terms_backward_kernel[(slots, -(-width // _chunk(width)))](
                student_NU,
                teacher_MU,
                teacher_row_N,
                kept_N4,
                pulls_3N,
                grad_NU,
                slots,
                teacher_MU.shape[0],
                width,
                CHUNK=_chunk(width),
                num_warps=8,
            )
    return grad_NU


def _chunk(width: int) -> int:
    return min(next_power_of_two(width), MAX_CHUNK)


@jit
def _draft_terms_forward_kernel(
    student_ptr,
    teacher_ptr,
    teacher_row_ptr,
    terms_ptr,
    kept_ptr,
    slots,
    teacher_rows,
    width,
    CHUNK: tl.constexpr,
):
    # One program per slot. Kept: log-sum-exp of student and teacher, sum q g, argmax of the teacher.
    slot = tl.program_id(0).to(tl.int64)
    teacher_row = tl.load(teacher_row_ptr + slot)
    known = (teacher_row >= 0) & (teacher_row < teacher_rows)
    student_ptr += slot * width
    teacher_ptr += tl.where(known, teacher_row, 0) * width
    lane = tl.arange(0, CHUNK)

    # Running maxima and sums per lane, merged once at the end: no reduction inside the loop.
    max_q = tl.full([CHUNK], -float("inf"), tl.float32)
    max_p = tl.full([CHUNK], -float("inf"), tl.float32)
    sum_q = tl.zeros([CHUNK], tl.float32)
    sum_p = tl.zeros([CHUNK], tl.float32)
    first_p = tl.zeros([CHUNK], tl.int32)
    for start in range(0, width, CHUNK):
        inside = start + lane < width
        x_q = tl.load(student_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        x_p = tl.load(teacher_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        new_q = tl.maximum(max_q, x_q)
        new_p = tl.maximum(max_p, x_p)
        shift_q = tl.where(new_q == -float("inf"), 0.0, new_q)
        shift_p = tl.where(new_p == -float("inf"), 0.0, new_p)
        sum_q = sum_q * tl.exp(max_q - shift_q) + tl.exp(x_q - shift_q)
        sum_p = sum_p * tl.exp(max_p - shift_p) + tl.exp(x_p - shift_p)
        first_p = tl.where(x_p > max_p, start + lane, first_p)
        max_q = new_q
        max_p = new_p
    top_q = tl.max(max_q)
    top_p = tl.max(max_p)
    log_q = top_q + tl.log(tl.sum(sum_q * tl.exp(max_q - top_q)))
    log_p = top_p + tl.log(tl.sum(sum_p * tl.exp(max_p - top_p)))
    argmax = tl.min(tl.where(max_p == top_p, first_p, width - 1))

    cross = tl.zeros([CHUNK], tl.float32)
    entropy = tl.zeros([CHUNK], tl.float32)
    overlap = tl.zeros([CHUNK], tl.float32)
    gain = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        inside = start + lane < width
        x_q = tl.load(student_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) - log_q
        x_p = tl.load(teacher_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) - log_p
        q = tl.exp(x_q)
        p = tl.exp(x_p)
        has_p = inside & (p != 0.0)
        cross += tl.where(has_p, -p * x_q, 0.0)
        entropy += tl.where(has_p, -p * x_p, 0.0)
        overlap += tl.where(p < q, p, q)
        gain += tl.where(inside, q * tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0)), 0.0)
    bad = tl.where(known, 0.0, float("nan"))
    hard = log_q - tl.load(student_ptr + argmax).to(tl.float32)
    tl.store(terms_ptr + slot, tl.sum(cross) + bad)
    tl.store(terms_ptr + slots + slot, tl.sum(entropy) + bad)
    tl.store(terms_ptr + 2 * slots + slot, hard + bad)
    tl.store(terms_ptr + 3 * slots + slot, tl.sum(overlap) + bad)
    tl.store(kept_ptr + slot * 4, log_q)
    tl.store(kept_ptr + slot * 4 + 1, log_p)
    tl.store(kept_ptr + slot * 4 + 2, tl.sum(gain))
    # The bits of an integer in a float: draft ids above 2**24 would not survive a conversion.
    tl.store(kept_ptr + slot * 4 + 3, argmax.to(tl.float32, bitcast=True))


@jit
def _draft_terms_backward_kernel(
    student_ptr,
    teacher_ptr,
    teacher_row_ptr,
    kept_ptr,
    pulls_ptr,
    grad_ptr,
    slots,
    teacher_rows,
    width,
    CHUNK: tl.constexpr,
):
    # Program (slot, chunk of the draft vocabulary); `pulls` are the gradients of cross, hard and overlap.
    slot = tl.program_id(0).to(tl.int64)
    teacher_row = tl.load(teacher_row_ptr + slot)
    known = (teacher_row >= 0) & (teacher_row < teacher_rows)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    x_q = tl.load(student_ptr + slot * width + token, mask=inside, other=-float("inf")).to(tl.float32)
    teacher = teacher_ptr + tl.where(known, teacher_row, 0) * width + token
    x_p = tl.load(teacher, mask=inside, other=-float("inf")).to(tl.float32)
    q = tl.exp(x_q - tl.load(kept_ptr + slot * 4))
    p = tl.exp(x_p - tl.load(kept_ptr + slot * 4 + 1))
    gain = tl.load(kept_ptr + slot * 4 + 2)
    argmax = tl.load(kept_ptr + slot * 4 + 3).to(tl.int32, bitcast=True)
    grad = tl.load(pulls_ptr + slot) * (q - p)
    grad += tl.load(pulls_ptr + slots + slot) * (q - tl.where(token == argmax, 1.0, 0.0))
    grad += tl.load(pulls_ptr + 2 * slots + slot) * q * (tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0)) - gain)
    grad = tl.where(known, grad, float("nan"))
    tl.store(grad_ptr + slot * width + token, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: every pair of element types that training meets."""
    builds = []
    for student, teacher in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32")):
        shared = {"student_ptr": f"*{student}", "teacher_ptr": f"*{teacher}", "teacher_row_ptr": "*i64"}
        sides = {
            "forward": (_draft_terms_forward_kernel, {"terms_ptr": "*fp32", "kept_ptr": "*fp32"}),
            "backward": (
                _draft_terms_backward_kernel,
                {"kept_ptr": "*fp32", "pulls_ptr": "*fp32", "grad_ptr": f"*{student}"},
            ),
        }
        for name, (kernel, more) in sides.items():
            pointers = {**shared, **more}
            builds.append(
                KernelBuild(
                    name=f"draft_loss {name} {student} teacher {teacher}",
                    kernel=kernel,
                    types={**pointers, **dict.fromkeys(("slots", "teacher_rows", "width"), "i32")},
                    aligned=frozenset((*pointers, "width")),
                    constants={"CHUNK": MAX_CHUNK},
                    options={"num_warps": 8},
                )
            )
    return builds
