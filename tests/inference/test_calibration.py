"""Calibration curves by hand, which fit a request uses, and eyas.json both ways."""

import copy
import json
import math

import pytest
import torch

from eyas.inference.calibration import ORDER, UNCHANGED, Calibration, Curve, TemperatureFit, prompt_hash
from eyas.models.errors import UserError

HALF = Curve((-2.0, -1.0, 0.0), (0.1, 0.4, 0.4))
LOW = Curve((-1.0, 0.0), (0.01, 0.02))


def fit(temperature: float, *curves: Curve) -> TemperatureFit:
    return TemperatureFit(temperature, curves, (0.5,) * len(curves), rounds=9, loss=(0.4, 0.3))


KNOWN = Calibration("target", (prompt_hash((1, 2, 3)),), (fit(0.0, HALF, LOW), fit(0.7, LOW), fit(1.0, UNCHANGED)))


def test_a_curve_is_linear_in_logs_and_falls_below_its_first_score_as_the_head_does() -> None:
    x = torch.tensor([0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -9.0])
    middle = (math.log(0.1) + math.log(0.4)) / 2
    logs = [math.log(0.4), math.log(0.4), math.log(0.4), middle, math.log(0.1), math.log(0.1) - 1, math.log(0.1) - 7]
    torch.testing.assert_close(HALF.log_accept(x) - ORDER * x, torch.tensor(logs))


def test_the_order_of_the_head_is_kept_everywhere_also_where_a_curve_is_flat() -> None:
    x = torch.linspace(-20, 0, 801)
    for curve in (HALF, LOW, UNCHANGED):
        y = curve.log_accept(x)
        assert bool((y[1:] > y[:-1]).all())
        assert float(y.max()) <= 0
    torch.testing.assert_close(UNCHANGED.log_accept(x), x * (1 + ORDER))
    assert float(HALF.log_accept(torch.tensor(1e-6))) == pytest.approx(math.log(0.4))  # a sum of rounding


@pytest.mark.parametrize(
    ("scores", "accepted"),
    [
        ((-1.0, -2.0, 0.0), (0.1, 0.2, 0.3)),
        ((-1.0, -0.5), (0.1, 0.2)),
        ((-1.0, 0.0), (0.3, 0.2)),
        ((-1.0, 0.0), (0.0, 0.2)),
        ((-1.0, 0.0), (0.5, 1.2)),
        ((-1.0, 0.0), (0.5,)),
        ((0.0,), (0.5,)),
        ((), ()),
    ],
)
def test_curves_that_are_none_are_refused(scores: tuple[float, ...], accepted: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="scores that ascend to 0"):
        Curve(scores, accepted)


def test_a_request_uses_the_fit_at_the_nearest_temperature_of_its_kind() -> None:
    assert [KNOWN.fit_for(t).temperature for t in (0.0, 0.01, 0.8, 0.85, 0.9, 5.0)] == [0.0, 0.7, 0.7, 0.7, 1.0, 1.0]


def test_rows_of_different_temperatures_each_use_their_own_curve_and_depths_beyond_the_last_the_last() -> None:
    x = torch.tensor([[-1.0, -0.2], [-1.0, -0.2], [-3.0, -0.1]])
    found = KNOWN.log_accept(x, depth=1, temperatures=[0.0, 0.7, 1.0])
    torch.testing.assert_close(
        found, torch.stack([HALF.log_accept(x[0]), LOW.log_accept(x[1]), UNCHANGED.log_accept(x[2])])
    )
    for depth in (2, 3, 9):
        assert torch.equal(KNOWN.log_accept(x, depth=depth, temperatures=[0.0] * 3), LOW.log_accept(x))
    assert KNOWN.hit_rates(4, [0.0, 1.0]) == [0.5, 0.5]


def test_a_calibration_needs_both_kinds_of_fit() -> None:
    for fits in ((), (fit(0.0, HALF),), (fit(0.5, HALF), fit(1.0, HALF)), (fit(0.0, HALF), fit(0.0, LOW))):
        with pytest.raises(UserError, match="one fit at temperature 0 and at least one above it"):
            Calibration("target", (), fits)
    with pytest.raises(UserError, match="a curve and a hit rate per depth"):
        TemperatureFit(0.0, (HALF, LOW), (0.5,), 9, (0.4, 0.3))


def test_prompts_that_were_fitted_on_are_not_measured() -> None:
    KNOWN.check_apart([(1, 2), (3, 2, 1)])
    with pytest.raises(UserError, match="1 of these prompts are among those"):
        KNOWN.check_apart([(1, 2), (1, 2, 3)])


def test_eyas_json_holds_all_of_it() -> None:
    card = {"target": "x", "calibration": json.loads(json.dumps(KNOWN.as_dict()))}
    before = copy.deepcopy(card)
    assert Calibration.from_card(card, where="here") == KNOWN
    assert card == before
    assert Calibration.from_card({}, where="here") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "another version"),
        ({"more": 1}, "damaged"),
        ({"fits": []}, "one fit at temperature 0"),
        ({"fits": [{"temperature": 0.0}]}, "damaged"),
        ({"fits": 3}, "damaged"),
    ],
)
def test_a_damaged_calibration_is_refused(change: dict[str, object], message: str) -> None:
    card = {"calibration": {**json.loads(json.dumps(KNOWN.as_dict())), **change}}
    with pytest.raises(UserError, match=message):
        Calibration.from_card(card, where="here")
    with pytest.raises(UserError, match="damaged"):
        Calibration.from_card({"calibration": [1]}, where="here")
