"""Whether two training states are the same, bit for bit."""

from typing import Any

import torch
from torch import Tensor


def equal(a: Any, b: Any) -> bool:
    """Return whether two nested states are bit-equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
