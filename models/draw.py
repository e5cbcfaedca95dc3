"""One way to draw a token from probabilities: inverse CDF with a coin in [0, 1). Nothing is sorted."""

import torch
from torch import Tensor


def draw(weights_RV: Tensor, coins_R: Tensor) -> Tensor:
    """Return one index per row, drawn in proportion to non-negative weights; int64 [R].

    Half-open intervals: an index of weight zero is never drawn, whatever the coin. Raises AssertionError when a row
    has no positive finite mass (the caller must refuse NaN logits before).
    """
    cumulative = weights_RV.to(torch.float64).cumsum(-1)
    total = cumulative[:, -1:]
    assert bool((torch.isfinite(total) & (total > 0)).all()), "weights without positive finite mass"
    drawn = torch.searchsorted(cumulative, coins_R.to(torch.float64)[:, None] * total, right=True)
    # A coin close to 1 can round up to the whole mass: the last index that carries mass is the answer then.
    last = weights_RV.shape[-1] - 1 - (weights_RV.flip(-1) > 0).to(torch.int8).argmax(-1, keepdim=True)
    return torch.minimum(drawn, last).squeeze(-1)
