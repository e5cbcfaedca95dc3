"""TTT attention: spans by hand, the reference against the training context, the kernels against the reference."""

import contextlib

import pytest
import torch
from torch import Tensor

from eyas.kernels.triton_support import interpreted
from eyas.kernels.ttt_attention import (
    _stops,
    _TTTAttention,
    first_visible,
    ttt_attention,
    ttt_attention_reference,
)
from eyas.models.ttt_attention import TTTContext

# (dtype, atol, rtol) of outputs and of gradients.
TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.bfloat16: (3e-2, 3e-2), torch.float16: (4e-3, 4e-3)}


def documents(T: int) -> Tensor:
    """Two lines of T slots: packed documents of odd lengths with padding behind, and one whole document."""
    first = torch.repeat_interleave(torch.tensor([0, 1, 2]), torch.tensor([3, 1, T]))[:T].clone()
    first[T - T // 4 :] = -1
    return torch.stack((first, torch.zeros(T, dtype=torch.int64)))


def draw(T: int, heads: int, kv_heads: int, head_dim: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """q, then the keys, then the values, as leaves."""
    shapes = [(2, heads, T, head_dim)] + [(2, kv_heads, T, head_dim)] * (2 * steps)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def all_slots(T: int) -> Tensor:
    return torch.arange(T).expand(2, T)


def test_spans_by_hand() -> None:
    first = first_visible(torch.tensor([[0, 0, 1, 1, 1, 2, -1, -1], [5, 5, 5, 5, 5, 5, 5, 5]]))
    assert first.tolist() == [[0, 0, 2, 2, 2, 5, 6, 7], [0] * 8]
    assert _stops(first).tolist() == [[2, 2, 5, 5, 5, 6, 7, 8], [8] * 8]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_reference_is_the_training_context(steps: int) -> None:
    q, *rest = draw(9, 4, 2, 8, steps, torch.float64)
    keys, values = rest[:steps], rest[steps:]
    context = TTTContext(documents(9))
    for key, value in zip(keys, values, strict=True):
        theirs = context.attend(q, key, value)
    ours = ttt_attention_reference(q, keys, values, first_visible(documents(9)), all_slots(9))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_gradcheck_of_the_reference() -> None:
    leaves = draw(5, 3, 1, 2, 3, torch.float64)
    first = first_visible(documents(5))
    assert torch.autograd.gradcheck(
        lambda q, *rest: ttt_attention_reference(q, rest[:3], rest[3:], first, all_slots(5)), leaves, fast_mode=True
    )


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "head_dim", "steps", "dtype"),
    [
        (1, 1, 1, 32, 1, torch.float32),
        (5, 3, 1, 80, 3, torch.float32),
        (7, 9, 3, 33, 1, torch.float32),
        (60, 3, 3, 64, 2, torch.float16),
        (63, 2, 1, 128, 2, torch.bfloat16),
        (70, 2, 2, 48, 3, torch.float32),
        (63, 1, 1, 256, 2, torch.float32),
    ],
)
@pytest.mark.usefixtures("poisoned_empty", "interpreter_multiplies_bf16")
def test_kernel_equals_reference(
    T: int, heads: int, kv_heads: int, head_dim: int, steps: int, dtype: torch.dtype, device: torch.device
) -> None:
    truth = draw(T, heads, kv_heads, head_dim, steps, dtype)
    ours = [x.detach().to(device).requires_grad_() for x in truth]
    first = first_visible(documents(T))
    out = _TTTAttention.apply(ours[0], first.to(device), *ours[1:])
    expected = ttt_attention_reference(truth[0], truth[1 : steps + 1], truth[steps + 1 :], first, all_slots(T))
    atol, rtol = TOLERANCES[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu(), expected, atol=atol, rtol=rtol)
    weight = torch.randn(out.shape).to(dtype)
    out.backward(weight.to(device))
    expected.backward(weight)
    for got, want in zip(ours, truth, strict=True):
        assert got.grad.dtype == dtype
        torch.testing.assert_close(got.grad.cpu(), want.grad, atol=4 * atol, rtol=4 * rtol)


@pytest.mark.parametrize("slots", [[[0, 2, 3, 7], [1, 5, 6, 8]], [[4], [0]], [[], []], [[*range(9)]] * 2], ids=str)
def test_queries_at_some_slots_are_those_they_are_among_all(slots: list[list[int]], device: torch.device) -> None:
    pytest.importorskip("triton")
    T, steps, slot = 9, 3, torch.tensor(slots, dtype=torch.int64)
    leaves = draw(T, 4, 2, 16, steps, torch.float32)
    first = first_visible(documents(T))

    def outputs(where: torch.device) -> tuple[Tensor, list[Tensor]]:
        q, *rest = [x.detach().to(where).requires_grad_() for x in leaves]
        at = slot.to(where)[:, None, :, None]
        some = [x.gather(2, at.expand(-1, x.shape[1], -1, 16)) for x in (q, *rest)]
        keys, values = [rest[0], *some[2 : steps + 1]], [rest[steps], *some[steps + 2 :]]
        out = ttt_attention(some[0], keys, values, first.to(where).gather(1, slot.to(where)), slot.to(where))
        weight = torch.linspace(-1, 1, out.numel(), device=where).view_as(out)
        return out, list(torch.autograd.grad((out * weight).sum(), (q, *rest)))

    expected, expected_grads = outputs(torch.device("cpu"))
    with contextlib.nullcontext() if device.type == "cuda" else interpreted():
        out, grads = outputs(device)
    torch.testing.assert_close(out.cpu(), expected, atol=5e-6, rtol=1e-5)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=2e-5, rtol=1e-4)


def test_strided_inputs(device: torch.device) -> None:
    """Heads beside each other in memory, as projections leave them; a gradient that is not contiguous either."""
    leaves = draw(7, 4, 2, 16, 2, torch.float32)
    first = first_visible(documents(7))
    plain = [x.detach().clone().requires_grad_() for x in leaves]
    strided = [x.detach().transpose(1, 2).contiguous().to(device).requires_grad_() for x in leaves]
    views = [x.transpose(1, 2) for x in strided]
    out = _TTTAttention.apply(views[0], first.to(device), *views[1:])
    expected = ttt_attention_reference(plain[0], plain[1:3], plain[3:], first, all_slots(7))
    torch.testing.assert_close(out.cpu(), expected, atol=5e-6, rtol=1e-5)
    weight = torch.randn(2, 7, 4, 16)
    (out.transpose(1, 2) * weight.to(device)).sum().backward()
    (expected.transpose(1, 2) * weight).sum().backward()
    for got, want in zip(strided, plain, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad.transpose(1, 2), atol=2e-5, rtol=1e-4)


def test_memory_kept_for_backward_is_linear(device: torch.device) -> None:
    """Per step: the output, one number per query, and references to inputs; nothing of T x T, no copies of keys."""
    T, steps = 20, 3
    leaves = [x.detach().to(device).requires_grad_() for x in draw(T, 2, 1, 16, steps, torch.float32)]
    first = first_visible(documents(T)).to(device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = _TTTAttention.apply(leaves[0], first, *leaves[1:])
    known = {x.data_ptr() for x in (*leaves, first)}
    assert sum(x.numel() for x in kept if x.data_ptr() not in known) == out.numel() + 2 * 2 * T


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k, v[:1]), "with 2 keys and 1 values"),
        (lambda q, k, v: (q, [], []), "with 0 keys"),
        (lambda q, k, v: (q[:, :3], k, v), "q has 3 heads"),
        (lambda q, k, v: (q, [k[0], k[1].double()], v), r"keys\[1\] is torch.float64"),
        (lambda q, k, v: (q, k, [v[0][:, :, :4], v[1]]), r"values\[0\] is torch.float32 \(2, 2, 4, 8\)"),
        (lambda q, k, v: (q[:, :, :3], k[:1], v[:1]), r"first_BN is torch.int64 \(2, 5\): give torch.int64 \(2, 3\)"),
    ],
)
def test_the_op_says_what_is_wrong(change: object, message: str) -> None:
    q, *rest = draw(5, 4, 2, 8, 2, torch.float32)
    first = first_visible(documents(5))
    assert ttt_attention(q, rest[:2], rest[2:], first, all_slots(5)).shape == q.shape
    with pytest.raises(ValueError, match=message):
        ttt_attention(*change(q, rest[:2], rest[2:]), first, all_slots(5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_op_runs_the_kernels_on_a_gpu(head_dim: int, dtype: torch.dtype) -> None:
    T, steps = 500, 4
    truth = draw(T, 8, 2, head_dim, steps, dtype)
    ours = [x.detach().cuda().requires_grad_() for x in truth]
    first = first_visible(documents(T))
    out = ttt_attention(ours[0], ours[1 : steps + 1], ours[steps + 1 :], first.cuda(), all_slots(T).cuda())
    expected = ttt_attention_reference(truth[0], truth[1 : steps + 1], truth[steps + 1 :], first, all_slots(T))
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu(), expected, atol=atol, rtol=rtol)
    weight = torch.randn(out.shape).to(dtype)
    out.backward(weight.cuda())
    expected.backward(weight)
    for got, want in zip(ours, truth, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, atol=8 * atol, rtol=8 * rtol)
