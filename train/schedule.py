"""The learning-rate schedule: linear warm-up, then a cosine down to a floor."""

import math


def learning_rate_factor(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """Return the factor on the base rate at optimizer step `step` (0-based) of `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
