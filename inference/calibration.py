"""Calibration: from the draft head's own probability of a token to the probability that the target accepts it.

A node is accepted when all of its path is, so P(node) = product over its path of P(child accepted | parent accepted).
Each factor is a monotone curve of the head's log-probability of the child, one per depth (deeper features are the
head's own and less reliable) and one set per temperature (at T = 0 only the target's first choice is accepted, above it
whatever is drawn). Products of such factors keep a tree whole: no child is likelier than its parent, and siblings keep
the head's order.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eyas.models.errors import UserError

VERSION = 1
ORDER = 1e-4  # slope added everywhere (in logs), so that a flat stretch of a curve still ranks as the head does


@dataclass(frozen=True)
class Curve:
    """P(accepted | parent accepted) at some log-probabilities of the head, linear in logs between them.

    `scores` ascend to 0, `accepted` never falls. Below the first score the curve falls as the head's probability does.
    """

    scores: tuple[float, ...]
    accepted: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.scores, self.scores[1:], strict=False))
        monotone = all(a <= b for a, b in zip(self.accepted, self.accepted[1:], strict=False))
        sized = len(self.scores) == len(self.accepted) >= 2
        if not (
            sized and rising and monotone and self.scores[-1] == 0 and self.accepted[0] > 0 and self.accepted[-1] <= 1
        ):
            raise UserError(
                "a calibration curve needs scores that ascend to 0 and as many probabilities above 0, up to 1, that "
                f"never fall; given {self.scores} and {self.accepted}."
            )

    def log_accept(self, log_q: Tensor) -> Tensor:
        """Return log P(accepted | parent accepted) for log-probabilities of the head (at most 0), in fp32."""
        ends_M, lines_M3 = (part.to(log_q.device) for part in self._lines)
        x = log_q.float().clamp(max=0.0)
        x0, y0, slope = lines_M3[torch.searchsorted(ends_M, x.contiguous())].unbind(-1)
        return torch.addcmul(y0, slope, x - x0)

    @cached_property
    def _lines(self) -> tuple[Tensor, Tensor]:
        """Return where each line of the curve ends but the last, and (x, y, slope) of all: below the first score, then
        between one and the next. ORDER is in them.
        """
        x_M = torch.tensor(self.scores, dtype=torch.float64)
        y_M = torch.tensor(self.accepted, dtype=torch.float64).log()
        slope_M = torch.cat((torch.ones(1, dtype=torch.float64), y_M.diff() / x_M.diff())) + ORDER
        begin_M = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(len(x_M) - 1)))
        lines_M3 = torch.stack((x_M[begin_M], (y_M + ORDER * x_M)[begin_M], slope_M), dim=1)
        return x_M[:-1].float(), lines_M3.float()


UNCHANGED = Curve((-10.0, 0.0), (math.exp(-10.0), 1.0))  # accepted as often as the head says


@dataclass(frozen=True)
class TemperatureFit:
    """The curves of depth 1, 2, ... at one temperature; deeper levels use the last.

    `hits[d-1]`: how often the head's best child at depth d was accepted below an accepted parent. `loss`: mean log loss
    of children on rounds they were not fitted on, by the head's own probabilities and by the curves.
    """

    temperature: float
    curves: tuple[Curve, ...]
    hits: tuple[float, ...]
    rounds: int
    loss: tuple[float, float]

    def __post_init__(self) -> None:
        right = all(0 < hit <= 1 for hit in self.hits) and 0 <= self.temperature < math.inf
        if not self.curves or len(self.hits) != len(self.curves) or len(self.loss) != 2 or not right:
            raise UserError(f"a calibration needs a curve and a hit rate per depth, given {self}.")

    def curve(self, depth: int) -> Curve:
        return self.curves[min(depth, len(self.curves)) - 1]

    def hit_rate(self, depth: int) -> float:
        return self.hits[min(depth, len(self.hits)) - 1]


@dataclass(frozen=True)
class Calibration:
    """Fits at temperature 0 and at least one above; `target` is the fingerprint of the target whose rounds they saw.

    `prompts` are hashes of the prompts they were fitted on, which no number may be measured on. A request uses the
    fit at the nearest temperature of its kind (0, or above).
    """

    target: str
    prompts: tuple[str, ...]
    fits: tuple[TemperatureFit, ...]

    def __post_init__(self) -> None:
        temperatures = [fit.temperature for fit in self.fits]
        if len(set(temperatures)) != len(temperatures) or 0 not in temperatures or len(temperatures) < 2:
            raise UserError(
                f"a calibration needs one fit at temperature 0 and at least one above it, given {temperatures}."
            )

    def fit_for(self, temperature: float) -> TemperatureFit:
        """Return the fit that a request at a temperature uses."""
        kind = [fit for fit in self.fits if (fit.temperature == 0) == (temperature == 0)]
        return min(kind, key=lambda fit: (abs(fit.temperature - temperature), fit.temperature))

    def log_accept(self, log_q: Tensor, *, depth: int, temperatures: Sequence[float]) -> Tensor:
        """Return log P(accepted | parent accepted) of children at a depth, [R, ...], each row at its temperature."""
        curves = [self.fit_for(temperature).curve(depth) for temperature in temperatures]
        if len(set(temperatures)) == 1:
            return curves[0].log_accept(log_q)
        return torch.stack([curve.log_accept(row) for curve, row in zip(curves, log_q, strict=True)])

    def hit_rates(self, depth: int, temperatures: Sequence[float]) -> list[float]:
        """Return each row's rate at which the best child at a depth is accepted below an accepted parent."""
        return [self.fit_for(temperature).hit_rate(depth) for temperature in temperatures]

    def check_apart(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raise UserError when a prompt to be measured is one that the calibration was fitted on."""
        known = set(self.prompts)
        shared = sum(prompt_hash(prompt) in known for prompt in prompts)
        if shared:
            raise UserError(
                f"{shared} of these prompts are among those the head's calibration was fitted on; measure on others, "
                "or calibrate on others (eyas calibrate HEAD --prompts FILE)."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return what eyas.json keeps under "calibration"."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_card(cls, card: dict[str, Any], *, where: str) -> "Calibration | None":
        """Return the calibration in eyas.json's content, None where it has none; raises UserError for a damaged one."""
        if (given := card.get("calibration")) is None:
            return None
        try:
            if given["version"] != VERSION:
                raise UserError(f"{where} has a calibration of another version; calibrate it again.")
            fits = [
                TemperatureFit(**{**_tuples(fit), "curves": tuple(Curve(**_tuples(curve)) for curve in fit["curves"])})
                for fit in given["fits"]
            ]
            return cls(**{**_tuples({k: v for k, v in given.items() if k != "version"}), "fits": tuple(fits)})
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"the calibration in {where} is damaged ({error!r}); calibrate it again.") from None


def prompt_hash(prompt_ids: Sequence[int]) -> str:
    """Return a short hash of a prompt's tokens."""
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()[:16]


def _tuples(given: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
