"""The draft-vocabulary losses: values by hand, exact gradients, and the kernels against the reference."""

import contextlib
import math

import pytest
import torch
from torch import Tensor

from eyas.kernels.draft_gradients import draft_gradients, draft_gradients_reference
from eyas.kernels.draft_loss import DraftTerms, _DraftTerms, draft_terms, draft_terms_reference
from eyas.kernels.triton_support import interpreted
from eyas.train.losses import OBJECTIVES, LossMix

# (dtype, atol, rtol) of gradients.
TOLERANCES = [(torch.float32, 2e-6, 2e-5), (torch.bfloat16, 1e-4, 1e-2), (torch.float16, 2e-5, 2e-3)]
SMOOTH = ("kl", "ce", "tv")  # lk holds its weight constant, which finite differences do not


def reference_loss(student: Tensor, teacher: Tensor, row: Tensor, kind: str) -> Tensor:
    return OBJECTIVES[kind].pull(draft_terms_reference(student, teacher, row)).loss_N


def kernel_loss(student: Tensor, teacher: Tensor, row: Tensor, kind: str) -> Tensor:
    return OBJECTIVES[kind].pull(DraftTerms(*_DraftTerms.apply(student, teacher, row))).loss_N


def test_values_by_hand() -> None:
    """q = 1/2, 1/4, 1/8, 1/8 against p uniform, in bits; then against the peaked p of row 1."""
    student = torch.tensor([[1 / 2, 1 / 4, 1 / 8, 1 / 8]] * 2, dtype=torch.float64).log()
    teacher = torch.tensor([[1 / 4] * 4, [0.1, 0.2, 0.6, 0.1]], dtype=torch.float64).log()
    row = torch.tensor([0, 1])
    ln2, blend = math.log(2), math.exp(-3 * 0.75)
    expected = {
        "kl": [2.25 * ln2, (0.1 + 0.4 + 1.8 + 0.3) * ln2],
        "ce": [ln2, 3 * ln2],
        "tv": [0.25, 1 - (0.1 + 0.2 + 0.125 + 0.1)],
        "lk": [blend * 0.25 * ln2 + (1 - blend) * 0.25],
    }
    for kind, values in expected.items():
        assert reference_loss(student, teacher, row, kind)[: len(values)].tolist() == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("kind", SMOOTH)
def test_gradcheck_of_the_reference(kind: str) -> None:
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    teacher, row = torch.randn(2, 7, dtype=torch.float64), torch.tensor([1, 0, 1])
    assert torch.autograd.gradcheck(lambda x: reference_loss(x, teacher, row, kind), student)


def test_lk_blends_kl_and_tv_with_a_weight_that_carries_no_gradient() -> None:
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    teacher, row = torch.randn(3, 7, dtype=torch.float64), torch.arange(3)
    losses = {kind: reference_loss(student, teacher, row, kind) for kind in OBJECTIVES}
    weight = torch.exp(-3 * (1 - losses["tv"].detach()))
    p = teacher.softmax(-1)
    blend = weight * (losses["kl"] + (p * p.log()).sum(-1)) + (1 - weight) * losses["tv"]
    torch.testing.assert_close(losses["lk"], blend)
    grads = [torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (losses["lk"], blend)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize(("slots", "vocabulary"), [(1, 8), (5, 60), (3, 2049)])
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(
    slots: int, vocabulary: int, kind: str, dtype: torch.dtype, atol: float, rtol: float, device: torch.device
) -> None:
    teacher = (2 * torch.randn(4, vocabulary)).to(dtype)
    row = torch.randint(0, 4, (slots,))
    student = (teacher[row].float() + torch.randn(slots, vocabulary)).to(dtype)
    weight = torch.randn(slots)
    ours, truth = student.to(device, copy=True).requires_grad_(), student.clone().requires_grad_()
    loss = kernel_loss(ours, teacher.to(device), row.to(device), kind)
    expected = reference_loss(truth, teacher, row, kind)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.cpu(), expected, atol=2e-5, rtol=2e-5)
    (loss * weight.to(device)).sum().backward()
    (expected * weight).sum().backward()
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad.cpu(), truth.grad, atol=atol, rtol=rtol)
    assert truth.grad.abs().max() > 1e-3


def test_all_terms_at_once_over_32000_draft_tokens(device: torch.device) -> None:
    """A mix of losses is one backward pass with three pulls; teachers in fp32, the student in bf16."""
    teacher, row = 2 * torch.randn(2, 32000), torch.tensor([1, 0])
    student = (teacher[row] + torch.randn(2, 32000)).bfloat16()
    ours, truth = student.to(device, copy=True).requires_grad_(), student.clone().requires_grad_()
    terms = _DraftTerms.apply(ours, teacher.to(device), row.to(device))
    expected = draft_terms_reference(truth, teacher, row)
    for got, want in zip(terms, expected, strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-4)
    (terms[0] + 0.5 * terms[2] - 2 * terms[3]).sum().backward()
    (expected.cross_N + 0.5 * expected.hard_N - 2 * expected.overlap_N).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), truth.grad, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_tokens_the_teacher_excludes_and_empty_batches(kind: str, device: torch.device) -> None:
    student = torch.randn(2, 300)
    teacher = torch.full((1, 300), -torch.inf)
    teacher[0, [3, 270]] = torch.tensor([1.0, 2.0])
    row = torch.zeros(2, dtype=torch.int64)
    ours, truth = student.to(device, copy=True).requires_grad_(), student.clone().requires_grad_()
    loss = kernel_loss(ours, teacher.to(device), row.to(device), kind)
    expected = reference_loss(truth, teacher, row, kind)
    torch.testing.assert_close(loss.cpu(), expected, atol=1e-5, rtol=1e-5)
    loss.sum().backward()
    expected.sum().backward()
    assert truth.grad.isfinite().all()
    torch.testing.assert_close(ours.grad.cpu(), truth.grad, atol=1e-6, rtol=1e-4)
    empty = student[:0].to(device).requires_grad_()
    kernel_loss(empty, teacher.to(device), row[:0].to(device), kind).sum().backward()
    assert empty.grad.shape == (0, 300)


def test_ce_teaches_the_first_of_the_teacher_s_best(device: torch.device) -> None:
    """The argmax crosses from forward to backward in a float's bits; of equals, in other chunks, the first counts."""
    student = torch.zeros(1, 5000, device=device, requires_grad=True)
    teacher = torch.zeros(1, 5000, device=device)
    teacher[0, [2321, 4321]] = 1.0
    kernel_loss(student, teacher, torch.zeros(1, dtype=torch.int64, device=device), "ce").sum().backward()
    assert student.grad.argmin().item() == 2321
    assert student.grad.lt(0).sum() == 1


def test_a_row_outside_the_teacher_is_not_read(device: torch.device) -> None:
    student = torch.randn(3, 40, device=device, requires_grad=True)
    loss = kernel_loss(student, torch.randn(2, 40, device=device), torch.tensor([0, 2, -1], device=device), "kl")
    assert loss.isnan().tolist() == [False, True, True]


def test_what_is_kept_for_backward(device: torch.device) -> None:
    """The logits that exist anyway, the rows' numbers and four numbers per slot; no probabilities."""
    student, teacher = torch.randn(7, 600, device=device, requires_grad=True), torch.randn(2, 600, device=device)
    row = torch.zeros(7, dtype=torch.int64, device=device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _DraftTerms.apply(student, teacher, row)
    known = {x.data_ptr() for x in (student, teacher, row)}
    assert sum(x.numel() for x in kept if x.data_ptr() not in known) == 7 * 4


def test_the_op_says_what_is_wrong() -> None:
    student, teacher, row = torch.randn(3, 5), torch.randn(2, 5), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match=r"teacher \(2, 4\)"):
        draft_terms(student, teacher[:, :4], row)
    with pytest.raises(ValueError, match=r"teacher_row_N torch.int32 \(3,\)"):
        draft_terms(student, teacher, row.int())


@pytest.mark.parametrize("parts", [(("kl", 1.0),), (("kl", 0.5), ("ce", 0.2), ("lk", 0.7), ("tv", 0.3))], ids=str)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, 2.0)])
@pytest.mark.usefixtures("poisoned_empty")
def test_gradients_made_with_the_loss_equal_those_of_autograd(
    parts: tuple[tuple[str, float], ...], scale: float, softcap: float | None, device: torch.device
) -> None:
    pytest.importorskip("triton")
    mix, row = LossMix(parts), torch.tensor([1, 0, 1, 1, 0])
    product, teacher = (torch.randn(n, 77) for n in (5, 2))
    leaf = product.clone().requires_grad_()
    logits = scale * leaf if softcap is None else softcap * torch.tanh(scale * leaf / softcap)
    expected = mix.pull(draft_terms_reference(logits, teacher, row)).loss_N
    expected.sum().backward()
    ours = [x.to(device) for x in (logits.detach(), teacher, row)]
    in_blocks = draft_gradients_reference(ours[0].clone(), *ours[1:], mix.pull, mix.needs, scale, softcap)
    with contextlib.nullcontext() if device.type == "cuda" else interpreted():
        by_kernel = draft_gradients(*ours, mix.pull, needs=mix.needs, scale=scale, softcap=softcap)
    for loss, gradient in (in_blocks, by_kernel):
        torch.testing.assert_close(loss.cpu(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient.cpu(), leaf.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_op_runs_the_kernels_on_a_gpu(kind: str) -> None:
    teacher, row = (2 * torch.randn(300, 32000)).bfloat16(), torch.randint(0, 300, (500,))
    student = (teacher[row].float() + torch.randn(500, 32000)).bfloat16()
    truth, mix = student.clone().requires_grad_(), LossMix(((kind, 1.0),))
    loss, gradient = draft_gradients(student.cuda(), teacher.cuda(), row.cuda(), mix.pull, needs=mix.needs)
    expected = reference_loss(truth, teacher, row, kind)
    torch.testing.assert_close(loss.cpu(), expected, atol=1e-4, rtol=1e-4)
    expected.sum().backward()
    torch.testing.assert_close(gradient.cpu(), truth.grad, atol=1e-4, rtol=1e-2)
