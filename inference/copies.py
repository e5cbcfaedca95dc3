"""Copies: what the text itself proposes for a row, and how likely each token of it is right.

A copy is what followed the latest earlier occurrence of the text's last tokens (`prompt_lookup.py`). How often it is
right depends on how many tokens matched, and on whether a draft head that was asked for the same place agrees. The
rates below are those of `eyas bench copies` on held-out replies of a 135M chat target (docs/log.md); what becomes of a
row's own copies corrects them.
"""

from dataclasses import dataclass

NGRAM = 5  # tokens that are matched at most: of longer matches nearly all are right

# By the number of tokens that matched, 1 to NGRAM.
ALONE = (0.20, 0.50, 0.61, 0.76, 0.90)  # the first token, where no head was asked
FOLLOWING = (0.67, 0.75, 0.81, 0.82, 0.94)  # every further one, where no head was asked, by the first match
OPPOSED = (0.09, 0.26, 0.41, 0.59, 0.81)  # where the head's best child is another token
AGREED = (0.23, 0.52, 0.59, 0.81, 0.88)  # what agreement takes off the head's doubt: 1 - p becomes (1 - p)(1 - this)


@dataclass(frozen=True)
class Copy:
    """Proposed tokens, the length of the match they follow, and how far this row's copies are trusted (at most 1)."""

    tokens: tuple[int, ...]
    matched: int
    trust: float = 1.0

    def unasked(self, step: int) -> float:
        """Return the rate of token `step` (0, 1, ...) below an accepted one, where no head was asked."""
        return self.trust * (ALONE if step == 0 else FOLLOWING)[self.matched - 1]

    def beside(self, step: int, *, best: bool, p: float) -> float:
        """Return the rate of token `step` below an accepted one that a head gives p, as its best child or not."""
        known = min(self.matched + step, NGRAM) - 1
        if best:
            return 1.0 - (1.0 - p) * (1.0 - self.trust * AGREED[known])
        return max(p, self.trust * OPPOSED[known])

    def hits(self, emitted: list[int]) -> tuple[float, int]:
        """Return (how many of the tokens that were put to the test should have been right, how many were)."""
        promised, right = 0.0, 0
        for step, (guess, token) in enumerate(zip(self.tokens, emitted, strict=False)):
            promised += (ALONE if step == 0 else FOLLOWING)[self.matched - 1]
            if guess != token:
                break
            right += 1
        return promised, right
