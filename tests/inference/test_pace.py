"""When a session rests and probes: traces worked out by hand."""

import pytest

from eyas.inference.pace import FIRST_REST, LONGEST_REST, PATIENCE, Pace, Trust


def rounds(pace: Pace, count: int, *, tokens: float, seconds: float = 1.0) -> list[bool]:
    """Return whether each of the next rounds rests; those that do not are recorded."""
    trace = []
    for _ in range(count):
        trace.append(pace.rests())
        if not trace[-1]:
            pace.record(tokens=tokens, seconds=seconds)
    return trace


def test_speculation_that_pays_never_rests() -> None:
    assert not any(rounds(Pace(), 200, tokens=1.5, seconds=1.2))
    assert not any(rounds(Pace(), 200, tokens=1.5, seconds=1.5))  # as good as plain decoding


def test_speculation_that_loses_rests_longer_and_longer_and_probes_in_between() -> None:
    trace = rounds(Pace(), 600, tokens=1.0, seconds=1.1)
    expected, rest = [], FIRST_REST
    while len(expected) < 600:
        expected += [False] * PATIENCE + [True] * rest
        rest = min(2 * rest, LONGEST_REST)
    assert trace == expected[:600]
    assert trace.count(False) / 600 < 0.07


def test_a_gain_in_between_makes_the_next_rest_short_again() -> None:
    pace = Pace()
    rounds(pace, PATIENCE + FIRST_REST + PATIENCE + 2 * FIRST_REST, tokens=1.0, seconds=1.1)
    assert not any(rounds(pace, 10, tokens=3.0))
    trace = rounds(pace, 60, tokens=1.0, seconds=3.0)
    start = trace.index(True)
    assert trace[start : start + FIRST_REST + 1] == [True] * FIRST_REST + [False]


def test_one_bad_round_among_good_ones_is_no_reason() -> None:
    pace = Pace()
    rounds(pace, 5, tokens=2.0)
    assert not any([*rounds(pace, 1, tokens=1.0, seconds=1.1), *rounds(pace, 20, tokens=2.0)])


def test_the_first_round_after_a_rest_is_told() -> None:
    pace, waking = Pace(), []
    for _ in range(40):
        waking.append(pace.is_waking)
        rounds(pace, 1, tokens=1.0, seconds=1.1)
    first = PATIENCE + FIRST_REST
    assert [place for place, is_waking in enumerate(waking) if is_waking] == [first, first + PATIENCE + 2 * FIRST_REST]


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
