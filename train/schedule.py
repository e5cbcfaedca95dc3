"""Learning-rate schedules: a linear warm-up, then what the schedule's name says, down to a floor.

cosine  half a cosine from the warm-up to the last step
wsd     warm-up, stable, decay: flat until the last `decay_share` of the steps, then linear (arXiv 2404.06395)
"""

import math
from collections.abc import Callable


def cosine(done: float, *, decay_share: float) -> float:
    """Return the factor in [0, 1] at a share `done` of the steps after the warm-up."""
    return 0.5 * (1 + math.cos(math.pi * done))


def wsd(done: float, *, decay_share: float) -> float:
    """Return the factor in [0, 1] at a share `done` of the steps after the warm-up."""
    return min(1.0, (1.0 - done) / decay_share)


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "wsd": wsd}


def learning_rate_factor(
    step: int, *, steps: int, warmup: int, floor: float, schedule: str = "cosine", decay_share: float = 0.2
) -> float:
    """Return the factor on the base rate at optimizer step `step` (0-based) of `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(1, steps - warmup), 1.0)
    return floor + (1 - floor) * SCHEDULES[schedule](done, decay_share=decay_share)
