"""Drawing by inverse CDF: intervals by hand, no weightless index at any coin, the right frequencies."""

import pytest
import torch
from scipy.stats import chisquare

from eyas.models.draw import draw

LAST_COIN = 1.0 - 2.0**-53


def drawn(weights: list[float], coin: float, *, dtype: torch.dtype = torch.float64) -> int:
    return int(draw(torch.tensor([weights], dtype=dtype), torch.tensor([coin], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("coin", "index"),
    [(0.0, 0), (0.2499, 0), (0.25, 1), (0.5, 1), (0.7499, 1), (0.75, 2), (LAST_COIN, 2)],
)
@pytest.mark.parametrize("mass", [1.0, 3.0, 1e-30])
def test_half_open_intervals_of_known_weights(coin: float, index: int, mass: float) -> None:
    assert drawn([0.25 * mass, 0.5 * mass, 0.25 * mass], coin) == index


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("coin", [0.0, 0.5, LAST_COIN])
@pytest.mark.parametrize(
    ("weights", "allowed"),
    [
        ([0, 0, 1, 0, 0], {2}),
        ([0, 1, 0, 1, 0], {1, 3}),
        ([1, 0, 0], {0}),
        ([0, 0, 1], {2}),
        ([0, 1e-38, 0, 1, 0], {1, 3}),
        ([0, 1, 1e-30, 0], {1, 2}),
    ],
)
def test_weightless_index_is_never_drawn(
    weights: list[float], allowed: set[int], coin: float, dtype: torch.dtype
) -> None:
    assert drawn(weights, coin, dtype=dtype) in allowed


def test_weightless_index_is_never_drawn_at_the_edges_of_any_interval() -> None:
    weights = torch.rand(64, 33, dtype=torch.float64)
    weights[torch.rand(64, 33) < 0.5] = 0.0
    weights[:, 0] = 0.0
    weights[:, 16] += 0.1
    cumulative = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    for column in range(33):
        for nudge in (-1e-16, 0.0, 1e-16):
            coins = (cumulative[:, column] + nudge).clamp(0.0, LAST_COIN)
            chosen = draw(weights, coins)
            assert bool((weights.gather(1, chosen[:, None]) > 0).all())


def test_coin_rounded_up_to_one_takes_the_last_index_with_mass() -> None:
    assert [drawn(weights, 1.0) for weights in ([1, 2, 0, 0], [0, 1], [3, 0])] == [1, 1, 0]


def test_half_precision_weights_keep_all_coins_apart() -> None:
    # A running sum in bf16 would stick at 256 and never reach the second half.
    weights = torch.ones(1, 1024, dtype=torch.bfloat16)
    coins = torch.tensor([0.0, 0.25, 0.75, LAST_COIN], dtype=torch.float64)
    assert draw(weights.expand(4, -1), coins).tolist() == [0, 256, 768, 1023]


def test_frequencies_pass_chi_square() -> None:
    weights = torch.tensor([0.5, 0.0, 3.0, 1.0, 0.05, 2.45])
    count = 40_000
    coins = torch.rand(count, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    seen = draw(weights.expand(count, -1), coins).bincount(minlength=6)
    carried = weights > 0
    assert seen[~carried].sum() == 0
    expected = (weights / weights.sum() * count)[carried].double()
    assert chisquare(seen[carried].numpy(), expected.numpy(), sum_check=False).pvalue > 1e-3
    shifted = torch.tensor([0.55, 0.0, 2.95, 1.0, 0.05, 2.45])[carried].double()
    assert chisquare(seen[carried].numpy(), (shifted / shifted.sum() * count).numpy(), sum_check=False).pvalue < 1e-3


@pytest.mark.parametrize("bad", [[float("nan"), 1.0], [1.0, float("nan")], [float("inf"), 1.0], [0.0, 0.0]])
def test_rows_without_finite_mass_are_refused(bad: list[float]) -> None:
    weights = torch.tensor([[0.5, 0.5], bad])
    with pytest.raises(AssertionError, match="without positive finite mass"):
        draw(weights, torch.zeros(2))
