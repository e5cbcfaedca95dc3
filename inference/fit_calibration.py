"""Fitting a calibration: isotonic regression of acceptance on the head's log-probability, depth by depth.

Every depth starts from the depth above it, scaled to how often its own children are accepted: where a depth was seen
too rarely for a curve of its own, that is what remains. What is regressed are blocks of children, each pulled towards
that start by a few expected acceptances, so that no curve says never or always: isotonic regression of single children
does, at both ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from eyas.inference.calibration import UNCHANGED, Calibration, Curve, TemperatureFit, prompt_hash
from eyas.inference.draft import DynamicTree
from eyas.inference.observe import Child, ObservedRequest, observe
from eyas.inference.request import GenerationRequest
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.target import Target

PSEUDO = 10.0  # acceptances, as many as expected, that every estimate begins with
MOST_BLOCKS = 8
FLOOR = 1e-6  # no probability is fitted below
OBSERVED_TREE = DynamicTree(8, 8, 16)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationPlan:
    """At which temperatures, how many tokens per prompt, how many prompts side by side."""

    temperatures: tuple[float, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int = 0
    batch: int = 8


def calibrate(
    target: Target,
    head: DraftHead,
    prompts: list[tuple[int, ...]],
    plan: CalibrationPlan,
    *,
    fingerprint: str,
    progress: Callable[[str, int, int, int], None],
) -> Calibration:
    """Return the calibration of a head from rounds of decoding these prompts; `fingerprint` is the target's.

    `progress` hears which temperature, prompts done, prompts in all, and tokens just emitted.
    """
    fits = []
    for temperature in plan.temperatures:
        requests = [
            GenerationRequest(prompt, plan.max_new_tokens, plan.stop_ids, Sampling(temperature, seed=plan.seed + place))
            for place, prompt in enumerate(prompts)
        ]
        heard = partial(progress, f"T={temperature:g}")
        observed = observe(target, head, OBSERVED_TREE, requests, batch=plan.batch, progress=heard)
        fits.append(fit_temperature(observed, temperature))
    return Calibration(fingerprint, tuple(prompt_hash(prompt) for prompt in prompts), tuple(fits))


def fit_temperature(requests: Sequence[ObservedRequest], temperature: float) -> TemperatureFit:
    """Return the fit of some requests' rounds at one temperature; raises UserError without any.

    Where the curves lose against the head's own probabilities on rounds they have not seen, its own are kept.
    """
    if sum(request.rounds for request in requests) == 0:
        raise UserError("there are no rounds to calibrate on: give prompts whose replies have more than one token.")
    children = [child for request in requests for child in request.children]
    curves, loss = fit_curves(children), _held_out_loss(requests)
    return TemperatureFit(
        temperature=temperature,
        curves=curves if loss[1] < loss[0] else (UNCHANGED,) * len(curves),
        hits=_hit_rates(children, len(curves)),
        rounds=sum(request.rounds for request in requests),
        loss=loss,
    )


def fit_curves(children: Sequence[Child]) -> tuple[Curve, ...]:
    """Return a curve per depth that occurs, from depth 1 on."""
    curves: list[Curve] = []
    for depth in range(1, max((child.depth for child in children), default=1) + 1):
        seen = [child for child in children if child.depth == depth]
        above = curves[-1] if curves else UNCHANGED
        curves.append(_fit_depth(_scores(seen), _fates(seen), above))
    return tuple(curves)


def _fit_depth(x_M: Array, accepted_M: Array, above: Curve) -> Curve:
    """Return the curve of children with these log-probabilities and fates (0 or 1)."""
    expected = _apply(above, x_M)
    scale = (accepted_M.sum() + PSEUDO) / (expected.sum() + PSEUDO)
    start = Curve(above.scores, tuple(float(min(1.0, max(FLOOR, scale * p))) for p in above.accepted))
    order = np.argsort(x_M, kind="stable")
    x_M, accepted_M, base_M = x_M[order], accepted_M[order], _apply(start, x_M[order])
    count = min(MOST_BLOCKS, int(base_M.sum() / PSEUDO))
    if count < 2:
        return start
    # Blocks of equal expected acceptances: wide where little is accepted, fine where much is.
    before_M = base_M.cumsum() - base_M
    block_M = np.minimum((before_M / base_M.sum() * count).astype(np.int64), count - 1)
    sizes_K, base_K, hits_K, score_K = (
        np.bincount(block_M, weights=weights, minlength=count)
        for weights in (np.ones_like(x_M), base_M, accepted_M, base_M * x_M)
    )
    pulled_K = base_K / sizes_K * (hits_K + PSEUDO) / (base_K + PSEUDO)
    y_K = isotonic_regression(pulled_K.clip(FLOOR, 1.0), weights=sizes_K).x
    knots: dict[float, float] = {}
    for x, y in zip((score_K / base_K).round(5).tolist(), y_K.round(6).tolist(), strict=True):
        knots[min(x, 0.0)] = y  # of equal scores the last, which is the highest
    last, top = max(knots), max(knots.values())
    rise = float(np.divide(*_apply(start, np.array([0.0, last]))))  # on to certainty as the start does
    knots[0.0] = round(min(1.0, top * rise), 6)
    return Curve(tuple(knots), tuple(knots.values())) if len(knots) > 1 else start


def _hit_rates(children: Sequence[Child], depths: int) -> tuple[float, ...]:
    """Return how often the best child of an accepted parent was accepted, per depth, pulled towards the depth above."""
    best = [child for child in children if child.rank == 0]
    rate = (sum(child.accepted for child in best) + 1) / (len(best) + 2)
    rates = []
    for depth in range(1, depths + 1):
        seen = [child.accepted for child in best if child.depth == depth]
        rate = (sum(seen) + PSEUDO * rate) / (len(seen) + PSEUDO)
        rates.append(round(rate, 6))
    return tuple(rates)


def _held_out_loss(requests: Sequence[ObservedRequest]) -> tuple[float, float]:
    """Return the mean log loss per child of the head's own probabilities and of curves fitted on the other half."""
    halves = (requests[::2], requests[1::2])
    raw, fitted, count = 0.0, 0.0, 0
    for seen, unseen in (halves, halves[::-1]):
        curves = fit_curves([child for request in seen for child in request.children])
        for depth in sorted({child.depth for request in unseen for child in request.children}):
            tested = [child for request in unseen for child in request.children if child.depth == depth]
            x_M, accepted_M = _scores(tested), _fates(tested)
            raw += _log_loss(np.exp(x_M), accepted_M)
            fitted += _log_loss(_apply(curves[min(depth, len(curves)) - 1], x_M), accepted_M)
            count += len(tested)
    return (round(raw / max(count, 1), 5), round(fitted / max(count, 1), 5))


def _log_loss(p_M: Array, accepted_M: Array) -> float:
    p_M = p_M.clip(1e-9, 1 - 1e-9)
    return -float(np.where(accepted_M > 0, np.log(p_M), np.log1p(-p_M)).sum())


def _apply(curve: Curve, x_M: Array) -> Array:
    return curve.log_accept(torch.from_numpy(x_M)).double().exp().numpy()


def _scores(children: Sequence[Child]) -> Array:
    return np.array([min(child.log_q, 0.0) for child in children], dtype=np.float64)


def _fates(children: Sequence[Child]) -> Array:
    return np.array([float(child.accepted) for child in children], dtype=np.float64)
