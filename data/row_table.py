"""The table of rows: what became of every row of every source, and why. Each row is counted exactly once."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eyas.data.row_checks import REASONS

SEVERAL = " + "


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source: how they were read, and how many ended as what; the counts add up to `read`."""

    source: str
    schema: str
    read: int
    kept: int
    repaired: dict[str, int]
    dropped: dict[str, int]
    unused: dict[str, int]

    def __post_init__(self) -> None:
        parts = (self.repaired, self.dropped, self.unused)
        assert self.read == self.kept + sum(sum(part.values()) for part in parts)

    @property
    def used(self) -> int:
        """Rows that became conversations."""
        return self.kept + sum(self.repaired.values())

    @property
    def drop_share(self) -> float:
        """The share of rows dropped for a fault of theirs; blank lines, duplicates and overlaps are none."""
        holding = self.read - self.dropped.get("blank line", 0)
        return sum(n for reason, n in self.dropped.items() if REASONS[reason].bad) / max(1, holding)


@dataclass(frozen=True)
class RowTable:
    """The rows of all sources."""

    sources: tuple[SourceRows, ...]

    def lines(self) -> list[tuple[str, str, str, int]]:
        """Return (source, outcome, reason, rows), the largest count of each outcome first."""
        lines = []
        for rows in self.sources:
            lines += [(rows.source, "read", f"schema {rows.schema}", rows.read), (rows.source, "kept", "", rows.kept)]
            for outcome in ("repaired", "dropped", "unused"):
                counts: dict[str, int] = getattr(rows, outcome)
                ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
                lines += [(rows.source, outcome, reason, count) for reason, count in ordered]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values, with the sums over all sources."""
        rows = [
            {
                "source": s.source, "schema": s.schema, "read": s.read, "kept": s.kept, "repaired": s.repaired,
                "dropped": s.dropped, "unused": s.unused, "used": s.used, "drop_share": round(s.drop_share, 6),
            }
            for s in self.sources
        ]  # fmt: skip
        return {
            "read": sum(s.read for s in self.sources),
            "kept": sum(s.kept for s in self.sources),
            **{name: sum(sum(getattr(s, name).values()) for s in self.sources) for name in OUTCOMES},
            "used": sum(s.used for s in self.sources),
            "sources": rows,
        }


OUTCOMES = ("repaired", "dropped", "unused")


@dataclass
class RowTally:
    """Collects the outcome of every row of one source; a later check may change what an earlier one said."""

    source: str
    schema: str = ""
    outcomes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, outcome: str, reason: str = "") -> int:
        """Count one more row and return its place."""
        self.outcomes.append((outcome, reason))
        return len(self.outcomes) - 1

    def change(self, place: int, reason: str) -> None:
        """Say that the row at a place is dropped or unused after all."""
        self.outcomes[place] = (REASONS[reason].outcome, reason)

    def rows(self) -> SourceRows:
        """Return the counts."""
        counts = Counter(self.outcomes)
        by = {name: {reason: n for (outcome, reason), n in counts.items() if outcome == name} for name in OUTCOMES}
        return SourceRows(self.source, self.schema, len(self.outcomes), counts["kept", ""], **by)
