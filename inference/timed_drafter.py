"""A drafter with a clock: the same drafts, and the seconds they took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eyas.inference.drafter import Drafter, Drafting
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.models.target import Target, TargetOutput


@dataclass
class DraftClock:
    """Seconds of drafting in rounds, and of reading prompts."""

    seconds: float = 0.0
    prompt_seconds: float = 0.0


@dataclass(frozen=True)
class TimedDrafter:
    """A drafter whose sessions run a clock."""

    drafter: Drafter
    clock: DraftClock

    @property
    def depth(self) -> int:
        return self.drafter.depth

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    def check(self, target: Target) -> None:
        self.drafter.check(target)

    def open(self) -> "TimedDrafting":
        return TimedDrafting(self.drafter.open(), self.clock)


class TimedDrafting:
    """A drafting state that runs a clock. Drafts end up on the host, so that they are done when they are returned."""

    def __init__(self, drafting: Drafting, clock: DraftClock) -> None:
        self.drafting = drafting
        self.clock = clock
        self.has_joined = False

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        self.has_joined = True  # what is fed next is prompts
        with self._running(is_prompt=True):
            self.drafting.join(prompts, samplings, capacity=capacity)

    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        with self._running(is_prompt=self.has_joined):
            self.drafting.extend(first, next_tokens, states)
        self.has_joined = False

    def draft(self, roots: list[int]) -> list[DraftTree]:
        with self._running(is_prompt=False):
            return self.drafting.draft(roots)

    def leave(self, row: int) -> None:
        with self._running(is_prompt=False):
            self.drafting.leave(row)

    @contextmanager
    def _running(self, *, is_prompt: bool) -> Iterator[None]:
        started = time.perf_counter()
        yield
        took = time.perf_counter() - started
        if is_prompt:
            self.clock.prompt_seconds += took
        else:
            self.clock.seconds += took
