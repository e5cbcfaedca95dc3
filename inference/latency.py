"""The latency table T(rows, nodes) of a machine: what a round of a target and a draft head costs, in seconds.

Between measured numbers of nodes and rows it is interpolated linearly; what lies beyond them was not measured, so it is
not offered.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from eyas.inference.budget import Floats
from eyas.models.errors import UserError


@dataclass(frozen=True)
class RowsLatency:
    """Costs with so many rows side by side.

    `verify[i]`: one target forward over `nodes[i]` nodes per row, roots included, and its greedy choice. `feed`: the
    head reads the tokens of a round. `first`: the candidates of level 1, which needs no step of the head. `level`:
    every further level.
    """

    rows: int
    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    feed: float
    first: float
    level: float

    def __post_init__(self) -> None:
        times = (*self.verify, self.feed, self.first, self.level)
        ascending = all(a < b for a, b in zip(self.nodes, self.nodes[1:], strict=False))
        if self.nodes[:1] != (1,) or len(self.nodes) != len(self.verify) or not ascending or min(times) < 0:
            raise UserError(f"a latency table needs ascending nodes from 1 on and a time of each, given {self}.")

    def curve(self) -> list[float]:
        """Return the seconds of a forward over 1, 2, ... nodes."""
        return [_between(self.nodes, self.verify, count) for count in range(1, self.nodes[-1] + 1)]


@dataclass(frozen=True)
class LatencyTable:
    """Costs by number of rows, ascending from one row on; measured behind `context` tokens of text."""

    context: int
    by_rows: tuple[RowsLatency, ...]
    _curves: dict[int, Floats] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = [entry.rows for entry in self.by_rows]
        if counts[:1] != [1] or counts != sorted(set(counts)):
            raise UserError(f"a latency table needs ascending numbers of rows from 1 on, given {counts}.")

    def verify_seconds(self, rows: int) -> Floats:
        """Return the seconds of a target forward with 0, 1, ... nodes below every root, as far as measured."""
        if rows not in self._curves:
            low, high, share = self._around(rows)
            pairs = zip(low.curve(), high.curve(), strict=False)
            self._curves[rows] = np.array([a + share * (b - a) for a, b in pairs])
        return self._curves[rows]

    def draft_seconds(self, rows: int, levels: int) -> float:
        """Return the seconds that drafting so many levels takes, with the feed before it."""
        low, high, share = self._around(rows)
        of_low, of_high = (entry.feed + entry.first + (levels - 1) * entry.level for entry in (low, high))
        return of_low + share * (of_high - of_low)

    def as_json(self) -> str:
        return json.dumps({"context": self.context, "by_rows": [asdict(entry) for entry in self.by_rows]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "LatencyTable":
        """Return the table that `as_json` wrote; raises UserError for anything else."""
        try:
            known: dict[str, Any] = json.loads(text)
            names = {one.name for one in fields(RowsLatency)}
            if set(known) != {"context", "by_rows"} or any(set(entry) != names for entry in known["by_rows"]):
                raise UserError("a latency table has other fields than this eyas writes; delete it.")
            entries = [
                RowsLatency(**{**entry, "nodes": tuple(entry["nodes"]), "verify": tuple(entry["verify"])})
                for entry in known["by_rows"]
            ]
            return cls(known["context"], tuple(entries))
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(f"a latency table is damaged ({error}); delete it.") from None

    def _around(self, rows: int) -> tuple[RowsLatency, RowsLatency, float]:
        """Return the entries below and above a number of rows, and how far between them it lies."""
        counts = [entry.rows for entry in self.by_rows]
        if not 1 <= rows <= counts[-1]:
            raise UserError(
                f"the latency table knows 1 to {counts[-1]} rows side by side, not {rows}: measure it anew."
            )
        high = bisect_left(counts, rows)
        low = high if counts[high] == rows else high - 1
        share = 0.0 if low == high else (rows - counts[low]) / (counts[high] - counts[low])
        return self.by_rows[low], self.by_rows[high], share


def _between(places: Sequence[int], values: Sequence[float], wanted: int) -> float:
    high = bisect_left(places, wanted)
    if places[high] == wanted:
        return values[high]
    share = (wanted - places[high - 1]) / (places[high] - places[high - 1])
    return values[high - 1] + share * (values[high] - values[high - 1])
