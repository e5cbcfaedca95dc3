"""GPUs by their data sheets, so that a run can be planned for a card that is not in this machine.

Speeds are those without sparsity; a small operation is a launch from Python, about the same on all of them.
"""

from dataclasses import dataclass

from eyas.models.errors import UserError, nearest
from eyas.train.machine import Speed

LAUNCH = 6e-6  # seconds


@dataclass(frozen=True)
class Card:
    """One GPU: its name, its memory in bytes, its speed."""

    title: str
    memory: int
    speed: Speed


CARDS = {
    "rtx-4090": Card("RTX 4090, 24 GB", 24_000_000_000, Speed(82.6e12, 165e12, 1.01e12, LAUNCH)),
    "l40s": Card("L40S, 48 GB", 48_000_000_000, Speed(91.6e12, 362e12, 0.86e12, LAUNCH)),
    "a100": Card("A100 SXM, 80 GB", 80_000_000_000, Speed(19.5e12, 312e12, 2.04e12, LAUNCH)),
    "h100": Card("H100 SXM, 80 GB", 80_000_000_000, Speed(67e12, 989e12, 3.35e12, LAUNCH)),
    "h200": Card("H200 SXM, 141 GB", 141_000_000_000, Speed(67e12, 989e12, 4.8e12, LAUNCH)),
    "b200": Card("B200 SXM, 180 GB", 180_000_000_000, Speed(75e12, 2250e12, 7.7e12, LAUNCH)),
}


def find_card(name: str) -> Card:
    """Return a card by its short name; raises UserError naming the known ones."""
    if name not in CARDS:
        raise UserError(f"--card {name!r} is not known; the cards are {', '.join(CARDS)}.{nearest(name, CARDS)}")
    return CARDS[name]
