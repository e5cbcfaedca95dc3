"""A request's distribution against the library's own temperature, top-k and top-p, in that order."""

import math

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eyas.inference.sampling import Coins, Sampling, draw_tokens, probabilities
from eyas.kernels.truncate import BatchSampling, launch_truncate
from eyas.models.draw import draw
from eyas.models.errors import UserError
from eyas.models.nucleus import nucleus


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


def test_rows_of_different_settings_equal_each_row_alone() -> None:
    samplings = [
        Sampling(temperature, top_k, top_p)
        for temperature in (0.3, 1.0, 2.5)
        for top_k in (0, 1, 5, 700)
        for top_p in (1.0, 0.9, 0.4, 1e-6)
    ]
    for size in (7, 63, 97, 700):
        logits = 2 * torch.randn(len(samplings), size)
        found = probabilities(logits, samplings)
        for row, vector, sampling in zip(found, logits, samplings, strict=True):
            expected = sampling.probabilities(vector)
            torch.testing.assert_close(row, expected)
            assert torch.equal(row > 0, expected > 0)


MIXED = [Sampling(0.7, 0, 0.8), Sampling(1.0), Sampling(1.3, 3, 0.9), Sampling(0.9, 3), Sampling(2.0, 0, 0.95)]


def test_drawn_tokens_are_those_of_the_whole_distribution_in_the_order_of_ids() -> None:
    coins = torch.rand(400, len(MIXED), dtype=torch.float64)
    for coins_R in coins:
        logits = (2 * torch.randn(len(MIXED), 97)).bfloat16()  # with equals
        expected = draw(probabilities(logits, MIXED), coins_R)
        assert torch.equal(draw_tokens(logits, MIXED, coins_R), expected)
        alone = [draw_tokens(logits[r : r + 1], [one], coins_R[r : r + 1]) for r, one in enumerate(MIXED)]
        assert torch.equal(torch.cat(alone), expected)


@pytest.mark.parametrize("coin", [0.0, 0.5, 1 - 2**-53])
def test_no_coin_draws_a_token_outside_the_distribution(coin: float) -> None:
    logits = torch.tensor([[float("-inf"), 3.0, -9.0, 3.0, float("-inf")]]).expand(len(MIXED), 5)
    tokens = draw_tokens(logits, MIXED, torch.full((len(MIXED),), coin, dtype=torch.float64)).tolist()
    assert tokens[0] == (1 if coin < 0.5 else 3)
    assert all(probabilities(logits[:1], [one])[0, token] > 0 for one, token in zip(MIXED, tokens, strict=True))


def test_a_flat_distribution_needs_more_than_the_first_tokens() -> None:
    logits = torch.linspace(0, 1e-3, 1000)[torch.randperm(1000)]
    found = probabilities(logits[None], [Sampling(1.0, top_p=0.75)])
    assert int((found > 0).sum()) == 750


@pytest.mark.parametrize("size", [7, 63, 700])
@pytest.mark.parametrize("top_k", [0, 5])
def test_equal_logits_are_kept_or_cut_together_by_every_implementation(size: int, top_k: int) -> None:
    """The one rule of ties; it keeps what the library keeps, and the equals of its last one."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(1, size, generator=generator) * 3).round() / 2
        top_p = float(torch.rand((), generator=generator)) * 0.98 + 0.01
        kept = Sampling(1.0, top_k, top_p).probabilities(logits[0]) > 0
        warpers = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else [])
        cut = warpers(None, logits.double())
        theirs = TopPLogitsWarper(top_p)(None, cut)[0] > -math.inf
        assert torch.equal(kept, logits[0] >= logits[0][theirs].min())
        assert torch.equal(probabilities(logits, [Sampling(1.0, top_k, top_p)])[0] > 0, kept)
        weights, ids = nucleus(cut.float().softmax(-1), torch.tensor([top_p]))
        assert sorted(ids[weights > 0].tolist()) == kept.nonzero().squeeze(1).tolist()
        if seed > 1:  # the interpreter takes half a second for a row
            continue
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the kernel, or triton's interpreter
        settings = (torch.tensor([value], device=device) for value in (1.0, top_k, top_p))
        truncated = launch_truncate(logits[None].to(device), torch.ones(1).long().to(device), BatchSampling(*settings))
        assert torch.equal(truncated.probabilities()[0, 0].cpu() > 0, kept)


def test_a_greedy_row_has_no_distribution() -> None:
    with pytest.raises(AssertionError, match="greedy requests have no distribution"):
        probabilities(torch.zeros(2, 3), [Sampling(1.0), Sampling()])


def test_coins_are_numbered_and_do_not_depend_on_how_they_are_taken() -> None:
    coins = Coins(7)
    first = [*coins.take(0, 1), *coins.take(1, 40), *coins.take(41, 2)]
    assert Coins(7).take(0, 43) == first
    assert coins.take(5, 3) == first[5:8]
    assert Coins(8).take(0, 3) != first[:3]
    assert all(0 <= coin < 1 for coin in first)
    generator = torch.Generator().manual_seed(7)
    assert first == [float(torch.rand(1, generator=generator, dtype=torch.float64)) for _ in range(43)]
    assert len(set(Coins(-1).take(0, 5)) | set(Coins(2**70).take(0, 5))) == 10


@pytest.mark.parametrize("temperature", [math.inf, math.nan])
def test_a_temperature_that_is_no_number_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match="temperature"):
        Sampling(temperature)
