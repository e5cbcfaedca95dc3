"""Budgets worked out by hand: known probabilities and known seconds give a known number of nodes."""

import numpy as np
import pytest

from eyas.inference.budget import Budget, Floats, best_budget, expected_gains

PLAIN, STEP = 10.0, 1.0  # seconds of a forward over the root alone, and of every node more


def seconds(count: int, *, step: float = STEP) -> Floats:
    return PLAIN + step * np.arange(count + 1)


def gains(*rows: list[float], most: int = 99) -> Floats:
    return expected_gains(np.log([list(row) for row in rows]), most=most)


def test_gains_are_the_sums_of_the_likeliest() -> None:
    assert gains([0.2, 0.9, 0.5]).tolist() == [pytest.approx([0.0, 0.9, 1.4, 1.6])]
    assert gains([0.2, 0.9, 0.5], most=2).tolist() == [pytest.approx([0.0, 0.9, 1.4])]
    assert expected_gains(np.array([[np.log(0.5), -np.inf]]), most=2).tolist() == [pytest.approx([0.0, 0.5, 0.5])]


@pytest.mark.parametrize(
    ("likely", "drafting", "step", "nodes"),
    [
        # (1 + .9)/11 = .1727, (1 + 1.5)/12 = .2083, (1 + 1.7)/13 = .2077
        ([0.9, 0.6, 0.2], 0.0, 1.0, 2),
        # with 10 s of drafting: 1.9/21, 2.5/22 = .1136, 2.7/23 = .1174
        ([0.9, 0.6, 0.2], 10.0, 1.0, 3),
        # 1/10 = .1; 1.05/11 = .0954
        ([0.05, 0.04], 0.0, 1.0, 0),
        # nodes cost nothing: all of them
        ([0.9, 0.5, 0.01, 0.001], 0.0, 0.0, 4),
        # nodes cost more than they bring: (1 + .9)/22 < 1/10
        ([0.9, 0.9], 0.0, 12.0, 0),
    ],
)
def test_known_probabilities_give_a_known_budget(likely: list[float], drafting: float, step: float, nodes: int) -> None:
    found = best_budget(gains(likely), seconds(4, step=step), drafting)
    assert found.nodes == nodes
    assert found.tokens == pytest.approx(1 + sum(likely[:nodes]))
    assert found.seconds == pytest.approx(drafting + PLAIN + step * nodes)


def test_rows_share_one_width_and_are_judged_together() -> None:
    sure, lost = [0.9, 0.8, 0.7], [0.01, 0.01, 0.01]
    assert best_budget(gains(sure), seconds(3, step=6.0), 0.0).nodes == 2  # 1.9/16 = .119, 2.7/22 = .123, 3.4/28 = .121
    assert best_budget(gains(lost), seconds(3, step=6.0), 0.0).nodes == 0
    # 2/10 = .2; (2 + .91)/16 = .182: with the lost row beside it the sure one's nodes are too dear
    assert best_budget(gains(sure, lost), seconds(3, step=6.0), 0.0) == Budget(0, 2.0, 10.0)


def test_of_equal_rates_the_smallest_budget_is_taken_and_nothing_beyond_what_was_measured() -> None:
    assert best_budget(gains([0.1, 0.1]), seconds(2), 0.0).nodes == 0
    assert best_budget(gains([1.0] * 9), seconds(3), 0.0).nodes == 3
