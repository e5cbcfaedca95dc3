"""Fits of acceptance that is known: curves come back, what was seen too rarely follows the depth above."""

import math

import numpy as np
import pytest
import torch

from eyas.inference.calibration import UNCHANGED, Calibration, Curve, prompt_hash
from eyas.inference.fit_calibration import CalibrationPlan, calibrate, fit_curves, fit_temperature
from eyas.inference.observe import Child, ObservedRequest
from eyas.models.errors import UserError
from eyas.tests.inference.heads import greedy, random_prompt, table_head
from eyas.tests.toys import tiny_head, tiny_target


def drawn(count: int, truth: dict[int, float], *, seed: int = 0) -> list[Child]:
    """Return children with random probabilities q, accepted with probability factor * q, by depth."""
    random = np.random.default_rng(seed)
    children = []
    for depth, factor in truth.items():
        for q in random.uniform(0.001, 1.0, count):
            children.append(Child(depth, math.log(q), 0, bool(random.uniform() < factor * q)))
    return children


def at(curve: Curve, *probabilities: float) -> list[float]:
    return curve.log_accept(torch.tensor(probabilities).log()).exp().tolist()


PLACES = (0.05, 0.2, 0.5, 0.8, 0.95)


def test_known_curves_come_back_depth_by_depth() -> None:
    truth = {1: 0.9, 2: 0.5, 3: 0.3}
    curves = fit_curves(drawn(6000, truth))
    assert len(curves) == 3
    for curve, factor in zip(curves, truth.values(), strict=True):
        assert at(curve, *PLACES) == pytest.approx([factor * q for q in PLACES], abs=0.06)


def test_a_head_that_is_too_sure_is_brought_down() -> None:
    sure = [Child(1, math.log(0.95), 0, number % 10 < 3) for number in range(500)]
    unsure = [Child(1, math.log(0.05), 1, number % 50 == 0) for number in range(500)]
    (curve,) = fit_curves([*sure, *unsure])
    assert at(curve, 0.05, 0.95, 1.0) == pytest.approx([0.02, 0.3, 0.3], abs=0.03)
    assert at(curve, 0.0005)[0] == pytest.approx(at(curve, 0.005)[0] / 10, rel=0.01)  # as the head falls


def test_a_depth_seen_too_rarely_is_the_depth_above_brought_to_its_own_level() -> None:
    deep = [Child(2, math.log(0.5), 0, False) for _ in range(20)]
    above, below = fit_curves([*drawn(3000, {1: 0.9}), *deep])
    ratios = [b / a for a, b in zip(at(above, *PLACES), at(below, *PLACES), strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(PLACES), rel=1e-3)
    assert 0.3 < ratios[0] < 0.7  # (0 + 10) / (20 * 0.45 + 10)


@pytest.mark.parametrize("fate", [True, False])
def test_no_curve_says_never_and_none_leaves_the_probabilities(fate: bool) -> None:
    (curve,) = fit_curves([Child(1, math.log(q), 0, fate) for q in np.linspace(0.01, 0.99, 400)])
    found = at(curve, 0.001, 0.3, 0.99)
    assert 0 < found[0] <= found[1] <= found[2] <= 1
    assert found[2] > 0.9 if fate else found[2] < 0.1


def observed(children: list[Child], size: int) -> list[ObservedRequest]:
    return [ObservedRequest(tuple(children[i : i + size]), rounds=3) for i in range(0, len(children), size)]


def test_a_fit_says_how_much_it_gains_on_rounds_it_did_not_see() -> None:
    fit = fit_temperature(observed(drawn(2000, {1: 0.3, 2: 0.3}), 100), 0.7)
    raw, fitted = fit.loss
    assert fitted < raw - 0.05
    honest = fit_temperature(observed(drawn(2000, {1: 1.0}), 100), 0.7)
    assert honest.loss[1] == pytest.approx(honest.loss[0], abs=0.02)
    assert (honest.curves[0] == UNCHANGED) == (honest.loss[1] >= honest.loss[0])
    noise = fit_temperature(observed(drawn(30, {1: 1.0}), 10), 0.7)
    assert noise.loss[1] >= noise.loss[0], "another seed would be needed"
    assert noise.curves == (UNCHANGED,), "thirty children of an honest head teach nothing"
    assert (fit.temperature, fit.rounds, len(fit.curves), len(fit.hits)) == (0.7, 120, 2, 2)
    with pytest.raises(UserError, match="no rounds to calibrate on"):
        fit_temperature([], 0.7)


def test_hit_rates_are_those_of_the_best_children() -> None:
    children = [Child(1, -0.1, 0, number % 4 == 0) for number in range(400)]
    children += [Child(1, -3.0, 1, True) for _ in range(400)]
    children += [Child(2, -0.1, 0, number % 2 == 0) for number in range(4)]
    first, second = fit_temperature(observed(children, 804), 0.0).hits
    assert first == pytest.approx(0.25, abs=0.005)
    assert second == pytest.approx((2 + 10 * 0.25) / 14, abs=0.01)


TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))


def test_a_head_that_is_wrong_at_every_third_token_is_found_out() -> None:
    prompts = [random_prompt(3 + seed, seed=seed) for seed in range(6)]
    texts = [[*prompt, *greedy(TARGET, prompt, 60)] for prompt in prompts]
    phases: list[str] = []
    plan = CalibrationPlan((0.0, 1.0), 40, frozenset(), batch=4)
    found = calibrate(
        TARGET, table_head(TARGET, texts, flawed=True), prompts, plan, fingerprint="f",
        progress=lambda phase, *_: phases.append(phase),
    )  # fmt: skip
    assert isinstance(found, Calibration)
    assert (found.target, found.prompts) == ("f", tuple(map(prompt_hash, prompts)))
    assert list(dict.fromkeys(phases)) == ["T=0", "T=1"]
    greedily = found.fit_for(0.0)
    first, second, third = (at(curve, 0.999)[0] for curve in greedily.curves[:3])
    assert min(first, second) > 0.8, "a round starts behind a wrong token, so two right ones follow"
    assert third < 0.3, "and then a wrong one of which the head is as sure"
    assert greedily.loss[1] < greedily.loss[0]


def test_the_same_rounds_give_the_same_fit() -> None:
    plan = CalibrationPlan((0.0, 0.8), 12, frozenset())
    prompts = [random_prompt(4, seed=seed) for seed in range(3)]
    one, two = (
        calibrate(TARGET, tiny_head(TARGET), prompts, plan, fingerprint="f", progress=lambda *_: None) for _ in range(2)
    )
    assert one == two
