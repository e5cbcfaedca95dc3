"""What the engine asks of anything that drafts: an EAGLE head, a small language model, a look-up in the text.

A `Drafter` is a description that many sessions may share; `open` gives the drafting state of one session. Row r of a
state drafts for row r of the session: rows are added at the end, and a row that leaves is replaced by the last one.
"""

from typing import Protocol

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.models.target import Target, TargetOutput


class Drafting(Protocol):
    """The drafting state of the rows of one session."""

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        """Add rows with these prompts; no row of the session will hold more than `capacity` tokens."""
        ...

    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        """Append committed tokens to rows first, first+1, ...: states_RT are the target's at the token before each.

        Rows may get different numbers of tokens; their states are padded behind. The first call for a row carries its
        prompt from the second token on, and the target's first token.
        """
        ...

    def draft(self, roots: list[int]) -> list[DraftTree]:
        """Return a tree below the last committed token of every row; leaves the committed text as it was."""
        ...

    def leave(self, row: int) -> None:
        """Drop a row: the last row takes its place."""
        ...


class Drafter(Protocol):
    """A way to draft, for any number of sessions."""

    @property
    def depth(self) -> int:
        """The most levels a tree has below its root."""
        ...

    @property
    def max_nodes(self) -> int:
        """The most nodes a tree has, root included."""
        ...

    def check(self, target: Target) -> None:
        """Raise UserError when this drafter cannot draft for a target."""
        ...

    def open(self) -> Drafting:
        """Return the state of a new session without rows."""
        ...
