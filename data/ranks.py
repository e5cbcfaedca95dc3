"""Ranks: the processes that share a piece of work, and how they wait for each other."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eyas.data.backends import Request


def _nobody_to_wait_for() -> None:
    pass


@dataclass(frozen=True)
class Ranks:
    """This process is number `rank` of `count`; `wait` returns when all of them have called it."""

    rank: int = 0
    count: int = 1
    wait: Callable[[], None] = _nobody_to_wait_for

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, requests: Iterable[Request]) -> list[Request]:
        """Return this rank's share: of equal size on all ranks (but for one), a matter of the requests' ids alone."""
        if self.count == 1:
            return list(requests)
        # In the order of a hash, so that no rank gets all requests of one style or all late ones.
        ordered = sorted(requests, key=lambda request: hashlib.sha256(request.id.encode()).digest())
        return ordered[self.rank :: self.count]
