"""When a session speculates and when it rests: rules that a trace of rounds decides alone, with no clock and no chance.

While it speculates, the tokens of its rounds are added up beside their costs, older rounds counting less; when plain
decoding would have emitted as much in less time, the session rests: it decodes plainly and does not even feed the head.
After a rest it probes; every rest that follows without a gain in between is twice as long as the one before.
"""

from dataclasses import dataclass

MEMORY = 0.8  # what a round counts for when one more has been run
PATIENCE = 3  # rounds before a session may rest
FIRST_REST, LONGEST_REST = 8, 64  # rounds
PRIOR = 2.0  # accepted drafts that a row's trust begins with
TRUST_MEMORY = 0.97


@dataclass
class Pace:
    """The state of one session."""

    worth: float = 0.0
    cost: float = 0.0
    rounds: int = 0
    resting: int = 0
    next_rest: int = FIRST_REST
    has_rested: bool = False

    def rests(self) -> bool:
        """Return whether the round that begins now is one of a rest; counts it."""
        if self.resting == 0:
            return False
        self.resting -= 1
        return True

    @property
    def is_waking(self) -> bool:
        """Whether the round that begins now is the first after a rest."""
        return self.rounds == 0 and self.resting == 0 and self.has_rested

    def record(self, *, tokens: float, seconds: float) -> None:
        """Count a speculating round: its tokens per row, and its seconds in units of those a token takes without it.

        Tokens are the mean of those expected, which chance does not touch, and those emitted, which are no promise.
        """
        self.worth = MEMORY * self.worth + tokens
        self.cost = MEMORY * self.cost + seconds
        self.rounds += 1
        if self.rounds < PATIENCE:
            return
        if self.worth >= self.cost:
            self.next_rest = FIRST_REST
            return
        self.resting, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)
        self.worth, self.cost, self.rounds, self.has_rested = 0.0, 0.0, 0, True


@dataclass
class Trust:
    """How far a row's acceptance bears out what the calibration promised: a factor, at most 1, on every step of it."""

    promised: float = 0.0
    accepted: float = 0.0

    @property
    def factor(self) -> float:
        return min(1.0, (PRIOR + self.accepted) / (PRIOR + self.promised))

    def record(self, *, promised: float, accepted: int) -> None:
        """Count one round, older ones counting less."""
        self.promised = TRUST_MEMORY * self.promised + promised
        self.accepted = TRUST_MEMORY * self.accepted + accepted

    def forget(self) -> None:
        """Half of what is known counts no more: a probe after a rest is bolder than the rounds before it."""
        self.promised, self.accepted = self.promised / 2, self.accepted / 2
