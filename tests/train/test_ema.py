"""The average of weights: its values by hand, and that applying it leaves the trained weights alone."""

import contextlib

import pytest
import torch
from torch import nn

from eyas.train.ema import WeightAverage


def module(value: float) -> nn.Linear:
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, value)
    layer.bias.requires_grad_(False)
    return layer


def test_the_average_follows_the_warmed_up_decay_by_hand() -> None:
    layer = module(0.0)
    average = WeightAverage(layer, decay=0.25)
    nn.init.constant_(layer.weight, 1.0)
    average.update(layer)  # decay min(.25, 2/11)
    first = 1 - 2 / 11
    assert float(average.average["weight"]) == pytest.approx(first)
    average.update(layer)  # decay min(.25, 3/12)
    assert float(average.average["weight"]) == pytest.approx(0.25 * first + 0.75)
    average.update(layer)  # decay .25 from here on, 4/13 is more
    assert float(average.average["weight"]) == pytest.approx(0.25 * (0.25 * first + 0.75) + 0.75)
    assert average.average.keys() == {"weight"}  # frozen weights are not averaged


def test_the_trained_weights_come_back_after_the_average_was_applied() -> None:
    layer = module(0.0)
    average = WeightAverage(layer, decay=0.9)
    nn.init.constant_(layer.weight, 4.0)
    with average.applied(layer):
        assert layer.weight.item() == 0.0
    assert layer.weight.item() == 4.0


def test_the_trained_weights_come_back_after_an_error_too() -> None:
    layer = module(4.0)
    average = WeightAverage(module(0.0), decay=0.9)
    with contextlib.suppress(ZeroDivisionError), average.applied(layer):
        raise ZeroDivisionError
    assert layer.weight.item() == 4.0


def test_a_restored_average_goes_on_where_it_was() -> None:
    layer = module(0.0)
    average = WeightAverage(layer, decay=0.9)
    nn.init.constant_(layer.weight, 1.0)
    for _ in range(3):
        average.update(layer)
    restored = WeightAverage(module(7.0), decay=0.9)
    restored.load_state_dict(average.state_dict())
    average.update(layer)
    restored.update(layer)
    assert torch.equal(restored.average["weight"], average.average["weight"])
