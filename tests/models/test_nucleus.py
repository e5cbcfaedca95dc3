"""The nucleus against sorting the whole vocabulary: same tokens, same order, same draws, ties and edges included."""

import pytest
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from eyas.models.draw import draw
from eyas.models.nucleus import FEW, nucleus

LAST_COIN = 1.0 - 2.0**-53


def by_sorting(logits_V: Tensor, top_p: float) -> list[tuple[float, int]]:
    """The nucleus as (mass, id), likeliest first and equals by id, from a sort of everything."""
    masses = logits_V.float().softmax(-1).double().tolist()
    kept, before = [], 0.0
    for mass, token in sorted(((mass, token) for token, mass in enumerate(masses)), key=lambda one: (-one[0], one[1])):
        if before >= top_p and mass < kept[-1][0]:
            break
        kept.append((mass, token))
        before += mass
    return kept


def found(logits_RV: Tensor, top_p: list[float]) -> list[list[tuple[float, int]]]:
    weights, ids = nucleus(logits_RV.float().softmax(-1), torch.tensor(top_p))
    rows = []
    for row, tokens in zip(weights.tolist(), ids.tolist(), strict=True):
        inside = [(weight, token) for weight, token in zip(row, tokens, strict=True) if weight > 0]
        assert row[len(inside) :] == [0.0] * (len(row) - len(inside))
        rows.append(inside)
    return rows


def random_rows(vocab: int, *, spread: float, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(7, vocab, generator=generator) * spread
    return (logits * 2).round() / 2 if ties else logits


@pytest.mark.parametrize("vocab", [1, 2, 63, 1000, 50_257])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
@pytest.mark.parametrize("ties", [False, True])
def test_nucleus_equals_a_sort_of_everything(vocab: int, spread: float, ties: bool) -> None:
    logits = random_rows(vocab, spread=spread, ties=ties)
    top_p = [0.95, 0.5, 1e-9, 0.9, 0.999, 0.3, 0.8]
    assert found(logits, top_p) == [by_sorting(row, p) for row, p in zip(logits, top_p, strict=True)]


@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_a_coin_at_any_edge_draws_what_the_sorted_reference_draws(spread: float) -> None:
    logits = random_rows(301, spread=spread, ties=True)
    kept = [by_sorting(row, 0.9) for row in logits]
    for place in (0.0, 0.25, 0.5, 1.0):
        coins = []
        for row in kept:
            edges = torch.tensor([mass for mass, _ in row]).double().cumsum(0)
            coins.append(min(float(edges[int(place * (len(edges) - 1))] / edges[-1]), LAST_COIN))
        weights, ids = nucleus(logits.softmax(-1), torch.full((7,), 0.9))
        drawn = ids.gather(1, draw(weights, torch.tensor(coins, dtype=torch.float64))[:, None]).squeeze(1).tolist()
        for row, coin, token in zip(kept, coins, drawn, strict=True):
            cumulative = torch.tensor([mass for mass, _ in row], dtype=torch.float64).cumsum(0)
            expected = int((cumulative <= coin * cumulative[-1]).sum())
            assert token == row[min(expected, len(row) - 1)][1]


def test_exact_mass_at_a_boundary_ends_the_nucleus_there() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[None]
    assert [token for _, token in found(logits, [0.5])[0]] == [0]
    assert [token for _, token in found(logits, [0.5000001])[0]] == [0, 1]
    assert [token for _, token in found(logits, [0.75])[0]] == [0, 1]
    assert [token for _, token in found(logits, [0.76])[0]] == [0, 1, 2, 3]  # equals come together


def test_tokens_that_are_ruled_out_stay_out() -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, [7, 31]] = torch.tensor([1.0, 1.0])
    assert [token for _, token in found(logits, [0.999999])[0]] == [7, 31]


def test_flat_row_takes_thousands_and_a_peaked_one_is_cut_to_a_few() -> None:
    flat = random_rows(50_000, spread=0.01)[:1]
    assert len(found(flat, [0.95])[0]) == len(by_sorting(flat[0], 0.95)) > FEW
    peaked = random_rows(50_000, spread=4.0)[:2]
    weights, _ = nucleus(peaked.softmax(-1), torch.tensor([0.9, 0.8]))
    assert weights.shape[1] < 1000


def test_nucleus_is_the_one_of_transformers() -> None:
    logits = random_rows(997, spread=2.5)
    warped = TopPLogitsWarper(0.93)(torch.zeros(7, 1, dtype=torch.int64), logits)
    for row, kept in zip(warped, found(logits, [0.93] * 7), strict=True):
        assert {token for _, token in kept} == set((row > float("-inf")).nonzero().squeeze(1).tolist())
