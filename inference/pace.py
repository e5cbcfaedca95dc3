"""When a session speculates and when it rests: rules that a trace of rounds decides alone, with no clock and no chance.

Beside what a round with the head emitted stands what it would have emitted without: the copies of the text are there
anyway, and how far they were right is known afterwards. When the rounds without would have had the higher rate, older
ones counting less, the session rests: it decodes without the head and does not even feed it. A head is owed some
patience, because a token more or less in a round is chance: it begins with a credit. After a rest it gets a smaller
one; every rest that follows without a gain in between is twice as long as the one before.
"""

from dataclasses import dataclass

MEMORY = 0.97  # what a round counts for when one more has been run
CREDIT, PROBE_CREDIT = 1.5, 0.25  # tokens per row in the head's favour, at first and after a rest
LASTING = 3  # rounds that a gain must last after a rest
FIRST_REST, LONGEST_REST = 8, 64  # rounds
PRIOR = 2.0  # accepted drafts that a row's trust begins with
TRUST_MEMORY = 0.97


@dataclass
class Pace:
    """The state of one session: tokens per row and seconds of its rounds, as they were and as without the head."""

    tokens: float = CREDIT
    seconds: float = 0.0
    tokens_without: float = 0.0
    seconds_without: float = 0.0
    rounds: int = 0
    resting: int = 0
    next_rest: int = FIRST_REST
    sleeps: bool = False

    def rests(self) -> bool:
        """Return whether the round that begins now is one of a rest; counts it."""
        if self.resting == 0:
            return False
        self.resting -= 1
        return True

    def wakes(self) -> bool:
        """Return whether a rest has ended since this was asked last."""
        if not self.sleeps or self.resting > 0:
            return False
        self.sleeps = False
        return True

    def record(self, *, tokens: float, seconds: float, tokens_without: float, seconds_without: float) -> None:
        """Count a round for which the head was asked: what it emitted per row and took, with the head and without."""
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens_without = MEMORY * self.tokens_without + tokens_without
        self.seconds_without = MEMORY * self.seconds_without + seconds_without
        self.rounds += 1
        if self.tokens * self.seconds_without >= self.tokens_without * self.seconds:
            if self.rounds >= LASTING:
                self.next_rest = FIRST_REST
            return
        self.resting, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)
        self.tokens += PROBE_CREDIT
        self.rounds, self.sleeps = 0, True


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
