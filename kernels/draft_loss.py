"""The loss of draft logits against the target's over the draft vocabulary, forward and backward without probabilities.

Per slot, p the target's distribution and q the head's, both over the draft vocabulary, alpha = sum min(p, q):

    kl   -sum p log q                        gradient to logit j   q_j - p_j
    ce   -log q[argmax p]                                          q_j - [j = argmax p]
    tv   1 - alpha                                                 q_j (sum q g - g_j),  g = [q < p]
    lk   w (kl - entropy p) + (1 - w) tv,  w = exp(-3 alpha) held constant   (arXiv 2602.23881)

(g is 1/2 where q = p, as torch has it.) The kernels read the logits in chunks: one pass for both log-sum-exps, one for the sums above, and backward one more that
writes the gradient, which has to exist anyway. Kept between forward and backward: five numbers per slot. The teacher's
rows are named by index, since the steps of training-time test share them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl

KINDS = ("kl", "ce", "tv", "lk")
LK_ETA = 3.0
ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_CHUNK = 2048


def draft_loss(student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor, *, kind: str) -> Tensor:
    """loss_N, fp32: slot n against row teacher_row_N[n] (int64) of the teacher's logits; differentiable to the student.

    Logits: fp32, bf16 or fp16 (the reference also fp64, then so is the loss). A row outside the teacher gives NaN on a
    GPU. Errors: ValueError.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: give one of {', '.join(KINDS)}")
    shapes_fit = student_NU.ndim == teacher_MU.ndim == 2 and student_NU.shape[1] == teacher_MU.shape[1]
    if not shapes_fit or teacher_row_N.shape != student_NU.shape[:1] or teacher_row_N.dtype != torch.int64:
        raise ValueError(
            f"student {tuple(student_NU.shape)}, teacher {tuple(teacher_MU.shape)}, teacher_row_N "
            f"{teacher_row_N.dtype} {tuple(teacher_row_N.shape)}: give [slots, draft vocabulary], [rows, the same] and "
            "int64 [slots]"
        )
    dtypes_fit = student_NU.dtype in ELEMENTS and teacher_MU.dtype in ELEMENTS
    if available(student_NU.device) and dtypes_fit:
        return _DraftLoss.apply(student_NU, teacher_MU, teacher_row_N, kind)
    return draft_loss_reference(student_NU, teacher_MU, teacher_row_N, kind)


def draft_loss_reference(student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor, kind: str) -> Tensor:
    """The same as `draft_loss`, from dense probabilities: the definition, and the CPU path."""
    student_NU, teacher_MU = (x if x.dtype == torch.float64 else x.float() for x in (student_NU, teacher_MU))
    log_q_NU = student_NU.log_softmax(-1)
    log_p_NU = teacher_MU[teacher_row_N].log_softmax(-1)
    p_NU = log_p_NU.exp()
    if kind == "ce":
        return -log_q_NU.gather(-1, p_NU.argmax(-1, keepdim=True)).squeeze(-1)
    cross_N = -(p_NU * log_q_NU).sum(-1)
    if kind == "kl":
        return cross_N
    alpha_N = torch.minimum(p_NU, log_q_NU.exp()).sum(-1)
    if kind == "tv":
        return 1 - alpha_N
    weight_N = torch.exp(-LK_ETA * alpha_N.detach())
    entropy_N = -(p_NU * log_p_NU.clamp(min=-1e30)).sum(-1)
    return weight_N * (cross_N - entropy_N) + (1 - weight_N) * (1 - alpha_N)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor, kind: str) -> Tensor:
        student_NU, teacher_MU = student_NU.contiguous(), teacher_MU.contiguous()
        teacher_row_N = teacher_row_N.contiguous()
        loss_N, sums_N5 = _launch_forward(student_NU, teacher_MU, teacher_row_N, kind)
        ctx.save_for_backward(student_NU, teacher_MU, teacher_row_N, sums_N5)
        ctx.kind = kind
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _launch_backward(*ctx.saved_tensors, grads[0], ctx.kind), None, None, None


def _launch_forward(student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    slots, width = student_NU.shape
    loss_N = torch.empty(slots, dtype=torch.float32, device=student_NU.device)
    sums_N5 = torch.empty((slots, 5), dtype=torch.float32, device=student_NU.device)
    if slots:
        with on_device(student_NU.device):
            _draft_loss_forward_kernel[(slots,)](
                student_NU,
                teacher_MU,
                teacher_row_N,
                loss_N,
                sums_N5,
                teacher_MU.shape[0],
                width,
                **_constants(width, kind),
                num_warps=8,
            )
    return loss_N, sums_N5


def _launch_backward(
    student_NU: Tensor, teacher_MU: Tensor, teacher_row_N: Tensor, sums_N5: Tensor, grad_N: Tensor, kind: str
) -> Tensor:
    slots, width = student_NU.shape
    grad_NU = torch.empty_like(student_NU)
    constants = _constants(width, kind)
    if slots:
        with on_device(student_NU.device):
            _draft_loss_backward_kernel[(slots, -(-width // constants["CHUNK"]))](
                student_NU,
                teacher_MU,
                teacher_row_N,
                sums_N5,
                grad_N.float().contiguous(),
                grad_NU,
                teacher_MU.shape[0],
                width,
                **constants,
                num_warps=8,
            )
    return grad_NU


def _constants(width: int, kind: str) -> dict[str, Any]:
    return {"CHUNK": min(next_power_of_two(width), MAX_CHUNK), "KIND": kind, "ETA": LK_ETA}


@jit
def _draft_loss_forward_kernel(
    student_ptr,
    teacher_ptr,
    teacher_row_ptr,
    loss_ptr,
    sums_ptr,
    teacher_rows,
    width,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    ETA: tl.constexpr,
):
    # One program per slot. `sums`: log-sum-exp of student and teacher, sum q g, weight of kl, argmax of the teacher.
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
    argmax = tl.min(tl.where(max_p == top_p, first_p, width))

    weight = 0.0
    toward = 0.0  # sum q g
    if KIND == "ce":
        x_q = tl.load(student_ptr + tl.minimum(argmax, width - 1)).to(tl.float32)
        loss = log_q - x_q
    else:
        cross = tl.zeros([CHUNK], tl.float32)
        alpha = tl.zeros([CHUNK], tl.float32)
        entropy = tl.zeros([CHUNK], tl.float32)
        gain = tl.zeros([CHUNK], tl.float32)
        for start in range(0, width, CHUNK):
            inside = start + lane < width
            x_q = tl.load(student_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) - log_q
            x_p = tl.load(teacher_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) - log_p
            q = tl.exp(x_q)
            p = tl.exp(x_p)
            has_p = inside & (p != 0.0)
            cross += tl.where(has_p, -p * x_q, 0.0)
            if KIND != "kl":
                alpha += tl.where(p < q, p, q)
                entropy += tl.where(has_p, -p * x_p, 0.0)
                gain += tl.where(inside, q * tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0)), 0.0)
        loss = tl.sum(cross)
        if KIND != "kl":
            accepted = tl.sum(alpha)
            toward = tl.sum(gain)
            if KIND == "tv":
                loss = 1.0 - accepted
            else:
                weight = tl.exp(-ETA * accepted)
                loss = weight * (loss - tl.sum(entropy)) + (1.0 - weight) * (1.0 - accepted)
    tl.store(loss_ptr + slot, tl.where(known, loss, float("nan")))
    tl.store(sums_ptr + slot * 5, log_q)
    tl.store(sums_ptr + slot * 5 + 1, log_p)
    tl.store(sums_ptr + slot * 5 + 2, toward)
    tl.store(sums_ptr + slot * 5 + 3, weight)
    # The bits of an integer in a float: draft ids above 2**24 would not survive a conversion.
    tl.store(sums_ptr + slot * 5 + 4, argmax.to(tl.float32, bitcast=True))


@jit
def _draft_loss_backward_kernel(
    student_ptr,
    teacher_ptr,
    teacher_row_ptr,
    sums_ptr,
    grad_loss_ptr,
    grad_ptr,
    teacher_rows,
    width,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    ETA: tl.constexpr,
):
    # Program (slot, chunk of the draft vocabulary).
    slot = tl.program_id(0).to(tl.int64)
    teacher_row = tl.load(teacher_row_ptr + slot)
    known = (teacher_row >= 0) & (teacher_row < teacher_rows)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    grad_loss = tl.where(known, tl.load(grad_loss_ptr + slot), float("nan"))
    x_q = tl.load(student_ptr + slot * width + token, mask=inside, other=-float("inf")).to(tl.float32)
    q = tl.exp(x_q - tl.load(sums_ptr + slot * 5))
    if KIND == "ce":
        argmax = tl.load(sums_ptr + slot * 5 + 4).to(tl.int32, bitcast=True)
        grad = q - tl.where(token == argmax, 1.0, 0.0)
    else:
        teacher = teacher_ptr + tl.where(known, teacher_row, 0) * width + token
        p = tl.exp(tl.load(teacher, mask=inside, other=-float("inf")).to(tl.float32) - tl.load(sums_ptr + slot * 5 + 1))
        grad = q - p
        if KIND != "kl":
            toward = tl.load(sums_ptr + slot * 5 + 2)
            accept = q * (toward - tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0)))
            if KIND == "tv":
                grad = accept
            else:
                weight = tl.load(sums_ptr + slot * 5 + 3)
                grad = weight * grad + (1.0 - weight) * accept
    tl.store(grad_ptr + slot * width + token, (grad * grad_loss).to(grad_ptr.dtype.element_ty), mask=inside)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: every kind, bf16 and fp32 logits."""
    builds = []
    for student, teacher in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "fp16")):
        for kind in KINDS:
            shared = {
                "student_ptr": f"*{student}",
                "teacher_ptr": f"*{teacher}",
                "teacher_row_ptr": "*i64",
                "sums_ptr": "*fp32",
            }
            sides = {
                "forward": (_draft_loss_forward_kernel, {"loss_ptr": "*fp32"}),
                "backward": (
                    _draft_loss_backward_kernel,
                    {"grad_loss_ptr": "*fp32", "grad_ptr": f"*{student}"},
                ),
            }
            for name, (kernel, more) in sides.items():
                pointers = {**shared, **more}
                builds.append(
                    KernelBuild(
                        name=f"draft_loss {name} {kind} {student} teacher {teacher}",
                        kernel=kernel,
                        types={**pointers, "teacher_rows": "i32", "width": "i32"},
                        aligned=frozenset((*pointers, "width")),
                        constants=_constants(32000, kind),
                        options={"num_warps": 8},
                    )
                )
    return builds
