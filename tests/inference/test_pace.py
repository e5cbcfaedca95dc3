"""When a session rests and probes: traces worked out by hand."""

import pytest

from eyas.inference.pace import CREDIT, FIRST_REST, LONGEST_REST, MEMORY, PROBE_CREDIT, Pace, Trust


def rounds(pace: Pace, count: int, *, tokens: float, seconds: float = 1.0, without: float = 1.0) -> list[bool]:
    """Return whether each of the next rounds rests; those that do not are recorded, beside plain ones of one second."""
    trace = []
    for _ in range(count):
        trace.append(pace.rests())
        if not trace[-1]:
            pace.record(tokens=tokens, seconds=seconds, tokens_without=without, seconds_without=1.0)
    return trace


def patience(loss: float, credit: float, owed: float = 0.0) -> tuple[int, float]:
    """Return after how many rounds that lose so many tokens each a credit is used up, and what is owed then."""
    count, left = 0, credit - owed
    while left >= 0:
        left = MEMORY * left - loss
        count += 1
    return count, -left


def test_speculation_that_pays_never_rests() -> None:
    assert not any(rounds(Pace(), 200, tokens=1.5, seconds=1.2))
    assert not any(rounds(Pace(), 200, tokens=1.5, seconds=1.5))  # as good as plain decoding
    assert not any(rounds(Pace(), 200, tokens=3.3, seconds=1.2, without=2.7))  # 2.75 a second against 2.7


def test_speculation_that_loses_rests_longer_and_longer_and_probes_in_between() -> None:
    trace = rounds(Pace(), 600, tokens=1.0, seconds=1.1)
    count, owed = patience(0.1, CREDIT)
    expected, rest = [False] * count, FIRST_REST
    while len(expected) < 600:
        count, owed = patience(0.1, PROBE_CREDIT, owed)
        expected += [True] * rest + [False] * count
        rest = min(2 * rest, LONGEST_REST)
    assert trace == expected[:600]
    assert trace.index(True) == 13
    assert trace.count(False) / 600 < 0.07


def test_what_the_copies_bring_anyway_is_no_gain() -> None:
    """Three tokens a round of 1.2 s are no reason to ask a head when the copies alone bring 2.8 in one."""
    assert any(rounds(Pace(), 30, tokens=3.0, seconds=1.2, without=2.8))


def test_a_gain_in_between_makes_the_next_rest_short_again() -> None:
    pace = Pace()
    rounds(pace, 60, tokens=1.0, seconds=1.1)
    assert pace.next_rest > 2 * FIRST_REST
    rounds(pace, LONGEST_REST, tokens=4.0)
    trace = rounds(pace, 60, tokens=1.0, seconds=3.0)
    start = trace.index(True)
    assert trace[start : start + FIRST_REST + 1] == [True] * FIRST_REST + [False]


def test_a_few_bad_rounds_among_good_ones_are_no_reason() -> None:
    pace = Pace()
    rounds(pace, 5, tokens=2.0)
    assert not any([*rounds(pace, 10, tokens=1.0, seconds=1.1), *rounds(pace, 20, tokens=2.0)])


def test_a_rest_that_has_ended_is_told_once() -> None:
    pace, woke = Pace(), []
    for place in range(50):
        woke += [place] * (pace.wakes() + pace.wakes())
        rounds(pace, 1, tokens=1.0, seconds=1.1)
    count, owed = patience(0.1, CREDIT)
    first = count + FIRST_REST
    assert woke == [first, first + patience(0.1, PROBE_CREDIT, owed)[0] + 2 * FIRST_REST]


def test_trust_follows_what_became_of_the_drafts() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    trust.record(promised=2.0, accepted=0)
    assert trust.factor == pytest.approx(2 / 4)
    trust.record(promised=1.0, accepted=1)
    assert trust.factor == pytest.approx((2 + 1) / (2 + 0.97 * 2 + 1))
    trust.forget()
    assert trust.factor == pytest.approx((2 + 0.5) / (2 + (0.97 * 2 + 1) / 2))
    for _ in range(30):
        trust.record(promised=1.0, accepted=3)
    assert trust.factor == 1.0, "better than promised is no reason to expect more"
    fooled = Trust()
    for _ in range(10):
        fooled.record(promised=3.0, accepted=0)
    assert fooled.factor < 0.1
