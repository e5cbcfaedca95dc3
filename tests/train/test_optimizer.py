"""Optimizers: who trains what at which rate."""

import pytest
import torch
from torch import nn

from eyas.train.optimizer import OPTIMIZERS, freeze_output_rows, set_learning_rate


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.lm_head = nn.Linear(4, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.fc(x)))


def loss_of(head: Head) -> torch.Tensor:
    inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([9.0, 1, 1, 1, 1, 1])
    return head(inputs).square().sum()


def moved(name: str, *, lm_head_rate: float, learning_rate: float = 1e-2) -> dict[str, torch.Tensor]:
    """Return how far one step moved every weight."""
    head = Head()
    freeze_output_rows(head, lm_head_rate=lm_head_rate)
    optimizers = OPTIMIZERS[name](
        head, learning_rate=learning_rate, lm_head_rate=lm_head_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    set_learning_rate(optimizers, learning_rate)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    loss_of(head).backward()
    for optimizer in optimizers:
        optimizer.step()
    return {key: value - before[key] for key, value in head.state_dict().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_output_rows_learn_at_their_own_rate(name: str, rate: float) -> None:
    steps = moved(name, lm_head_rate=rate)
    assert float(steps["lm_head.weight"].abs().max()) == pytest.approx(1e-2 * rate, rel=1e-2)  # Adam's first step
    assert float(steps["norm.weight"].abs().max()) == pytest.approx(1e-2, rel=1e-2)


def test_muon_moves_inner_matrices_by_an_orthogonal_step_of_adamws_size() -> None:
    head = Head()
    loss_of(head).backward()
    gradient = torch.linalg.svdvals(head.fc.weight.grad)
    step = torch.linalg.svdvals(moved("muon", lm_head_rate=1.0)["fc.weight"])
    # The layer norm behind fc takes one of its four directions away; the other three move alike under Muon.
    assert float(step[0] / step[2]) < 2.0 < float(gradient[0] / gradient[2])
    assert float(step.square().sum() / 24) ** 0.5 == pytest.approx(0.2 * 1e-2, rel=0.4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_output_rows_have_no_optimizer_state(name: str) -> None:
    head = Head()
    freeze_output_rows(head, lm_head_rate=0.0)
    optimizers = OPTIMIZERS[name](head, learning_rate=1e-2, lm_head_rate=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(head.fc.weight), id(head.norm.weight)}
