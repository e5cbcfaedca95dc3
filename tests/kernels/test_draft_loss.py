"""The draft-vocabulary losses: the objective's own definitions, exact gradients, and the kernels against them."""

import pytest
import torch

from eyas.kernels.draft_loss import KINDS, _DraftLoss, draft_loss, draft_loss_reference
from eyas.train.objective import OBJECTIVES

# (dtype, atol, rtol) of values and of gradients.
TOLERANCES = [(torch.float32, 2e-6, 2e-5), (torch.bfloat16, 1e-4, 1e-2), (torch.float16, 2e-5, 2e-3)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_objective(kind: str) -> None:
    if kind not in OBJECTIVES:
        pytest.skip(f"the objective has no {kind}")
    student, teacher, row = torch.randn(7, 60), 2 * torch.randn(5, 60), torch.tensor([0, 1, 4, 4, 2, 3, 0])
    ours = draft_loss_reference(student, teacher, row, kind)
    theirs = OBJECTIVES[kind](student.log_softmax(-1), teacher.softmax(-1)[row])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
def test_gradcheck_of_the_reference(kind: str) -> None:
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    teacher, row = torch.randn(2, 7, dtype=torch.float64), torch.tensor([1, 0, 1])
    assert torch.autograd.gradcheck(lambda x: draft_loss_reference(x, teacher, row, kind), student)


def test_lk_blends_kl_and_tv_with_a_weight_that_carries_no_gradient() -> None:
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    teacher, row = torch.randn(3, 7, dtype=torch.float64), torch.arange(3)
    losses = {kind: draft_loss_reference(student, teacher, row, kind) for kind in KINDS}
    weight = torch.exp(-3 * (1 - losses["tv"].detach()))
    p = teacher.softmax(-1)
    divergence = losses["kl"] + (p * p.log()).sum(-1)
    blend = weight * divergence + (1 - weight) * losses["tv"]
    torch.testing.assert_close(losses["lk"], blend)
    grads = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (losses["lk"], blend))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "vocabulary"), [(1, 8), (5, 60), (7, 2049), (3, 8192)])
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(
    slots: int, vocabulary: int, kind: str, dtype: torch.dtype, atol: float, rtol: float, device: torch.device
) -> None:
    teacher = (2 * torch.randn(4, vocabulary)).to(dtype)
    row = torch.randint(0, 4, (slots,))
    student = (teacher[row].float() + torch.randn(slots, vocabulary)).to(dtype)
    weight = torch.randn(slots)
    ours, truth = student.to(device).requires_grad_(), student.clone().requires_grad_()
    loss = _DraftLoss.apply(ours, teacher.to(device), row.to(device), kind)
    expected = draft_loss_reference(truth, teacher, row, kind)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.cpu(), expected, atol=2e-5, rtol=2e-5)
    (loss * weight.to(device)).sum().backward()
    (expected * weight).sum().backward()
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad.cpu(), truth.grad, atol=atol, rtol=rtol)
    assert truth.grad.abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_the_teacher_excludes_and_empty_batches(kind: str, device: torch.device) -> None:
    student = torch.randn(2, 300)
    teacher = torch.full((1, 300), -torch.inf)
    teacher[0, [3, 270]] = torch.tensor([1.0, 2.0])
    row = torch.zeros(2, dtype=torch.int64)
    ours, truth = student.to(device).requires_grad_(), student.clone().requires_grad_()
    loss, expected = _DraftLoss.apply(ours, teacher.to(device), row.to(device), kind), None
    # Tokens of probability 0 drop out of the sums: the same losses with a mass too small to count.
    expected = draft_loss_reference(truth, teacher.clamp(min=-1e4), row, kind)
    torch.testing.assert_close(loss.cpu(), expected, atol=1e-5, rtol=1e-5)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), truth.grad, atol=1e-6, rtol=1e-4)
    empty = student[:0].to(device).requires_grad_()
    _DraftLoss.apply(empty, teacher.to(device), row[:0].to(device), kind).sum().backward()
    assert empty.grad.shape == (0, 300)


def test_ce_learns_ids_beyond_24_bits_of_a_float(device: torch.device) -> None:
    """The argmax crosses from forward to backward in a float's bits."""
    student = torch.zeros(1, 5000, device=device, requires_grad=True)
    teacher = torch.zeros(1, 5000, device=device)
    teacher[0, 4321] = 1.0
    _DraftLoss.apply(student, teacher, torch.zeros(1, dtype=torch.int64, device=device), "ce").sum().backward()
    assert student.grad.argmin().item() == 4321


def test_what_is_kept_for_backward(device: torch.device) -> None:
    """The logits that exist anyway, and five numbers per slot; no probabilities."""
    student = torch.randn(7, 600, device=device, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        teacher = torch.randn(2, 600, device=device)
        _DraftLoss.apply(student, teacher, torch.zeros(7, dtype=torch.int64, device=device), "lk")
    own = [x for x in kept if x.data_ptr() not in (student.data_ptr(), teacher.data_ptr())]
    assert sum(x.numel() for x in own) == 7 * 5 + 7


def test_the_op_says_what_is_wrong() -> None:
    student, teacher, row = torch.randn(3, 5), torch.randn(2, 5), torch.tensor([0, 1, 1])
    assert torch.equal(draft_loss(student, teacher, row, kind="kl"), draft_loss_reference(student, teacher, row, "kl"))
    with pytest.raises(ValueError, match="kind is 'mse': give one of kl, ce, tv, lk"):
        draft_loss(student, teacher, row, kind="mse")
    with pytest.raises(ValueError, match=r"teacher \(2, 4\)"):
        draft_loss(student, teacher[:, :4], row, kind="kl")
    with pytest.raises(ValueError, match=r"teacher_row_N torch.int32 \(3,\)"):
        draft_loss(student, teacher, row.int(), kind="kl")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_op_runs_the_kernels_on_a_gpu(kind: str) -> None:
    teacher, row = (2 * torch.randn(300, 32000)).bfloat16(), torch.randint(0, 300, (500,))
    student = (teacher[row].float() + torch.randn(500, 32000)).bfloat16()
    ours, truth = student.cuda().requires_grad_(), student.clone().requires_grad_()
    loss, expected = (
        draft_loss(ours, teacher.cuda(), row.cuda(), kind=kind),
        draft_loss_reference(truth, teacher, row, kind),
    )
    torch.testing.assert_close(loss.cpu(), expected, atol=1e-4, rtol=1e-4)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), truth.grad, atol=1e-4, rtol=1e-2)
