"""The losses over the draft vocabulary: values by hand on four tokens, gradients against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from eyas.models.errors import UserError
from eyas.models.target_head import TargetHead
from eyas.train.draft_loss import Lesson, draft_loss, draft_loss_reference
from eyas.train.losses import LK_ETA, OBJECTIVES, LossMix

Q = [1 / 2, 1 / 4, 1 / 8, 1 / 8]
UNIFORM = [1 / 4, 1 / 4, 1 / 4, 1 / 4]
PEAKED = [0.1, 0.2, 0.6, 0.1]
LN2 = math.log(2)
# With p uniform: -sum p log q = (1 + 2 + 3 + 3) / 4 ln 2, the entropy of p is 2 ln 2, sum min(p, q) = 3/4.
BLEND = math.exp(-3 * 0.75)
BY_HAND = {
    "kl": (UNIFORM, 2.25 * LN2),
    "ce": (PEAKED, 3 * LN2),
    "tv": (UNIFORM, 0.25),
    "lk": (UNIFORM, BLEND * 0.25 * LN2 + (1 - BLEND) * 0.25),
}
LOGITS = [0.3, -1.2, 0.9, 0.1]
MIXES = {name: ((name, 1.0),) for name in OBJECTIVES} | {
    "kl and lk": (("kl", 0.5), ("lk", 0.5)),
    "all": (("kl", 0.3), ("ce", 0.7), ("tv", 2.0), ("lk", 0.11)),
}


def plain_loss(name: str, logits: list[float], p: list[float], *, blend: float) -> float:
    """Return a loss in plain Python; `blend` is lk's lambda, which carries no gradient."""
    total = sum(math.exp(z) for z in logits)
    q = [math.exp(z) / total for z in logits]
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    alpha = sum(map(min, p, q))
    return {
        "kl": divergence - sum(a * math.log(a) for a in p),
        "ce": -math.log(q[p.index(max(p))]),
        "tv": 1 - alpha,
        "lk": blend * divergence + (1 - blend) * (1 - alpha),
    }[name]


def chunked(logits_NU: Tensor, p_NU: Tensor, mix: LossMix) -> Tensor:
    """Return the summed loss of the chunked op on given logits and distributions: identity as output head."""
    U = logits_NU.shape[1]
    output = TargetHead(torch.eye(U, dtype=logits_NU.dtype), None, 1.0, None)
    lesson = Lesson(p_NU.log(), output, torch.arange(len(p_NU)))
    return draft_loss(logits_NU, output, lesson, torch.ones(len(p_NU)), mix)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_value_by_hand(name: str) -> None:
    p, expected = BY_HAND[name]
    logits_NU = torch.tensor([Q, Q], dtype=torch.float64).log()
    p_NU = torch.tensor([p, p], dtype=torch.float64)
    losses_N = draft_loss_reference(logits_NU, p_NU, LossMix(((name, 1.0),)))
    assert losses_N.shape == (2,)
    assert losses_N.tolist() == pytest.approx([expected, expected], rel=1e-12)
    assert float(chunked(logits_NU, p_NU, LossMix(((name, 1.0),)))) == pytest.approx(2 * expected, rel=1e-12)


def test_a_mix_by_hand() -> None:
    p = torch.tensor([UNIFORM], dtype=torch.float64)
    logits = torch.tensor([Q], dtype=torch.float64).log()
    mix = LossMix((("kl", 0.5), ("tv", 2.0)))
    assert float(draft_loss_reference(logits, p, mix)) == pytest.approx(0.5 * 2.25 * LN2 + 2.0 * 0.25, rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("op", ["reference", "chunked"])
def test_the_gradient_equals_finite_differences(name: str, op: str) -> None:
    logits = torch.tensor([LOGITS], dtype=torch.float64, requires_grad=True)
    p_NU, mix = torch.tensor([PEAKED], dtype=torch.float64), LossMix(((name, 1.0),))
    (chunked if op == "chunked" else draft_loss_reference)(logits, p_NU, mix).sum().backward()
    q = torch.tensor(LOGITS).double().softmax(-1)
    blend = math.exp(-LK_ETA * float(torch.minimum(torch.tensor(PEAKED).double(), q).sum()))
    step = 1e-6
    assert logits.grad is not None
    for i in range(4):
        up, down = ([z + sign * step * (i == j) for j, z in enumerate(LOGITS)] for sign in (1, -1))
        slope = (plain_loss(name, up, PEAKED, blend=blend) - plain_loss(name, down, PEAKED, blend=blend)) / (2 * step)
        assert float(logits.grad[0, i]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("parts", MIXES.values(), ids=MIXES)
def test_the_chunked_gradient_equals_that_of_autograd(parts: tuple[tuple[str, float], ...]) -> None:
    torch.manual_seed(1)
    mix, p_NU = LossMix(parts), torch.randn(7, 13, dtype=torch.float64).mul(2).softmax(-1)
    values, grads = [], []
    for op in (chunked, draft_loss_reference):
        logits = torch.randn(7, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        value = op(logits, p_NU, mix).sum()
        grads.append(torch.autograd.grad(value, logits)[0])
        values.append(value.detach())
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_kl_teaches_nothing_to_a_head_that_equals_the_target() -> None:
    p = torch.tensor([PEAKED], dtype=torch.float64)
    logits = p.log().requires_grad_()
    (gradient,) = torch.autograd.grad(chunked(logits, p, LossMix((("kl", 1.0),))), logits)
    assert float(gradient.abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["tv", "lk"])
def test_acceptance_losses_are_zero_where_every_draft_would_be_accepted(name: str) -> None:
    p = torch.tensor([PEAKED], dtype=torch.float64)
    assert float(draft_loss_reference(p.log(), p, LossMix(((name, 1.0),)))) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_target_that_gives_a_token_no_mass_gives_finite_losses_and_gradients(name: str) -> None:
    logits = torch.tensor([LOGITS], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    mix = LossMix(((name, 1.0),))
    for op in (draft_loss_reference, lambda z, p, m: chunked(z, p.clamp(min=1e-300), m)):
        loss = op(logits, p, mix).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(gradient).all())


def test_a_mix_with_an_unknown_name_or_no_weight_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown loss 'kll'; there are kl, ce, tv, lk\. Did you mean 'kl'\?"):
        LossMix((("kll", 1.0),))
    with pytest.raises(UserError, match=r"the weight of loss kl must be positive, given 0"):
        LossMix((("kl", 0.0),))
