"""Which prompts are read side by side: those of like lengths, so that little of a forward is padding."""

from collections.abc import Callable
from typing import TypeVar

Row = TypeVar("Row")

SPARE = 64  # padding tokens that cost less than a forward of their own
SHARE = 0.125  # padding tokens beside real ones that do


def alike(rows: list[Row], *, key: Callable[[Row], int]) -> list[list[Row]]:
    """Return the rows in parts of like lengths (`key`), the longest first; equal ones keep their order.

    A part is padded to its longest row by at most SPARE tokens or SHARE of its own, whichever is more.
    """
    parts: list[list[Row]] = []
    longest, real = 0, 0
    for row in sorted(rows, key=key, reverse=True):
        length = key(row)
        if parts and longest * (len(parts[-1]) + 1) - (real + length) <= max(SPARE, SHARE * (real + length)):
            parts[-1].append(row)
            real += length
        else:
            parts.append([row])
            longest = real = length
    return parts
