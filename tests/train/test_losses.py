"""The losses over the draft vocabulary: values by hand on four tokens, gradients against finite differences."""

import math

import pytest
import torch

from eyas.train.objective import LK_ETA, OBJECTIVES

Q = [1 / 2, 1 / 4, 1 / 8, 1 / 8]
UNIFORM = [1 / 4, 1 / 4, 1 / 4, 1 / 4]
PEAKED = [0.1, 0.2, 0.6, 0.1]
LN2 = math.log(2)
# With p uniform: -sum p log q = (1 + 2 + 3 + 3) / 4 ln 2, the entropy of p is 2 ln 2, sum min(p, q) = 3/4.
BLEND = math.exp(-3 * 0.75)
BY_HAND = {
    "kl": (UNIFORM, 2.25 * LN2),
    "ce": (PEAKED, 3 * LN2),
    "lk": (UNIFORM, BLEND * 0.25 * LN2 + (1 - BLEND) * 0.25),
}
LOGITS = [0.3, -1.2, 0.9, 0.1]


def plain_loss(name: str, logits: list[float], p: list[float], *, blend: float) -> float:
    """Return a loss in plain Python; `blend` is lk's lambda, which carries no gradient."""
    total = sum(math.exp(z) for z in logits)
    q = [math.exp(z) / total for z in logits]
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    alpha = sum(map(min, p, q))
    return {
        "kl": divergence - sum(a * math.log(a) for a in p),
        "ce": -math.log(q[p.index(max(p))]),
        "lk": blend * divergence + (1 - blend) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_value_by_hand(name: str) -> None:
    p, expected = BY_HAND[name]
    log_q_NU = torch.tensor([Q, Q], dtype=torch.float64).log()
    losses_N = OBJECTIVES[name](log_q_NU, torch.tensor([p, p], dtype=torch.float64))
    assert losses_N.shape == (2,)
    assert losses_N.tolist() == pytest.approx([expected, expected], rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_equals_finite_differences(name: str) -> None:
    logits = torch.tensor([LOGITS], dtype=torch.float64, requires_grad=True)
    OBJECTIVES[name](torch.log_softmax(logits, -1), torch.tensor([PEAKED], dtype=torch.float64)).sum().backward()
    q = torch.tensor(LOGITS).double().softmax(-1)
    blend = math.exp(-LK_ETA * float(torch.minimum(torch.tensor(PEAKED).double(), q).sum()))
    step = 1e-6
    for i in range(4):
        up, down = ([z + sign * step * (i == j) for j, z in enumerate(LOGITS)] for sign in (1, -1))
        slope = (plain_loss(name, up, PEAKED, blend=blend) - plain_loss(name, down, PEAKED, blend=blend)) / (2 * step)
        assert float(logits.grad[0, i]) == pytest.approx(slope, abs=1e-8)


def test_kl_teaches_nothing_to_a_head_that_equals_the_target() -> None:
    p = torch.tensor([PEAKED], dtype=torch.float64)
    logits = p.log().requires_grad_()
    OBJECTIVES["kl"](torch.log_softmax(logits, -1), p).sum().backward()
    assert float(logits.grad.abs().max()) < 1e-12


def test_lk_is_zero_where_every_draft_would_be_accepted() -> None:
    p = torch.tensor([PEAKED], dtype=torch.float64)
    assert float(OBJECTIVES["lk"](p.log(), p)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_target_that_gives_a_token_no_mass_gives_finite_losses_and_gradients(name: str) -> None:
    logits = torch.tensor([LOGITS], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    loss = OBJECTIVES[name](torch.log_softmax(logits, -1), p).sum()
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(logits.grad).all())
