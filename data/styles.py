"""Answer styles: how replies are sampled, and which conversation is answered in which style."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerStyle:
    """Temperature, then top-k, then top-p. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything.

    Without shares (None) a training conversation is answered once in every style; with shares, once in one of them.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    share: float | None = None


GREEDY = AnswerStyle(0.0)


def seed_of(seed: int, name: str) -> int:
    """Return a seed of its own for every request, the same whenever it is asked again."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def styles_for(name: str, styles: tuple[AnswerStyle, ...], *, seed: int) -> list[tuple[int, AnswerStyle]]:
    """Return the styles (with their number) to answer a training conversation in.

    With shares the one style is drawn by the conversation's name, so it stays when other conversations come or go.
    """
    if styles[0].share is None:
        return list(enumerate(styles))
    coin = seed_of(seed, f"style/{name}") / 2**56
    below = 0.0
    for number, style in enumerate(styles):
        below += style.share or 0.0
        if coin < below:
            return [(number, style)]
    return [(len(styles) - 1, styles[-1])]
