"""A request's distribution against the library's own temperature, top-k and top-p, in that order."""

import math

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
def test_probabilities_equal_the_librarys(temperature: float, top_k: int, top_p: float) -> None:
    for _ in range(5):
        logits = 2 * torch.randn(97)
        steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            steps.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            steps.append(TopPLogitsWarper(top_p))
        expected = steps(None, logits.double()[None])[0].softmax(-1)
        found = Sampling(temperature, top_k, top_p).probabilities(logits)
        torch.testing.assert_close(found, expected)
        assert torch.equal(found > 0, expected > 0)


def test_top_p_counts_what_top_k_has_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two kept by top-k the first has 0.4 / 0.7 = 0.571 of the mass: enough for 0.55, not for 0.6.
    assert Sampling(1.0, 2, 0.55).probabilities(logits).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(
        Sampling(1.0, 2, 0.6).probabilities(logits), torch.tensor([4 / 7, 3 / 7, 0, 0], dtype=torch.float64)
    )
    assert Sampling(1.0, 0, 0.55).probabilities(logits).count_nonzero() == 2


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    logits = torch.tensor([1.0, 0.0])
    for temperature in (0.1, 1.0, 10.0):
        expected = 1 / (1 + math.exp(-1 / temperature))
        assert float(Sampling(temperature).probabilities(logits)[0]) == pytest.approx(expected)


@pytest.mark.parametrize("fields", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}])
def test_settings_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"temperature .* must be 0 or more, top_k .* 0 or more, top_p .* in \(0, 1\]"):
        Sampling(**fields)


def test_a_greedy_request_has_no_distribution() -> None:
    with pytest.raises(AssertionError, match="greedy requests have no distribution"):
        Sampling().probabilities(torch.zeros(3))
