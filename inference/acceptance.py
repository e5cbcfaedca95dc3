"""The one definition of acceptance.

tau (acceptance length) = mean tokens emitted per round, the target's bonus token included = 1 + accepted / rounds.
survival at depth d     = share of rounds in which at least d draft tokens were accepted (vLLM: "per-position rate").
alpha at depth d        = survival_d / survival_{d-1} (the papers' n-alpha).
A target token outside the draft vocabulary is a miss; nothing after a stop is counted. Counts are whole numbers where
rounds were run, and expected ones where a round's chances were added up instead.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AcceptanceStats:
    """Counts over rounds of at most `depth` drafted levels; add rounds with `record`, merge with `+`."""

    depth: int
    rounds: int = 0
    drafted: int = 0
    survived: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.survived = self.survived or [0] * self.depth
        assert len(self.survived) == self.depth

    def record(self, accepted: int, *, drafted: int) -> None:
        """Count one round: `accepted` draft tokens kept out of `drafted` nodes proposed."""
        assert 0 <= accepted <= min(self.depth, drafted)
        self.rounds += 1
        self.drafted += drafted
        for level in range(accepted):
            self.survived[level] += 1

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        depth = max(self.depth, other.depth)
        total = AcceptanceStats(depth, self.rounds + other.rounds, self.drafted + other.drafted)
        for stats in (self, other):
            for level, count in enumerate(stats.survived):
                total.survived[level] += count
        return total

    @property
    def accepted(self) -> float:
        """Draft tokens accepted over all rounds."""
        return sum(self.survived)

    @property
    def tau(self) -> float:
        """Mean tokens per round, bonus included; 1.0 before any round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def survival(self) -> list[float]:
        """P(at least d accepted) for d = 1..depth."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.survived]

    @property
    def alpha(self) -> list[float]:
        """survival_d / survival_{d-1} for d = 1..depth; 0 where nothing survived to be tested."""
        before = [self.rounds, *self.survived][: self.depth]
        return [count / base if base else 0.0 for count, base in zip(self.survived, before, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers of a report."""
        return {
            "tau": self.tau,
            "survival": self.survival,
            "alpha": self.alpha,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "depth": self.depth,
            "survived": self.survived,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "AcceptanceStats":
        """Return the stats that `as_dict` described."""
        return cls(fields["depth"], fields["rounds"], fields["drafted"], list(fields["survived"]))
