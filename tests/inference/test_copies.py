"""Copies from the text: rates by match and by what the head says, and what a round teaches about them."""

import pytest

from eyas.inference.copies import AGREED, ALONE, FOLLOWING, NGRAM, OPPOSED, Copy


def test_there_is_a_rate_for_every_length_of_a_match_and_longer_matches_are_better() -> None:
    for rates in (ALONE, FOLLOWING, OPPOSED, AGREED):
        assert len(rates) == NGRAM
        assert list(rates) == sorted(rates)
        assert all(0 < rate < 1 for rate in rates)


def test_the_rate_where_no_head_was_asked() -> None:
    copy = Copy((7, 8, 9), matched=2)
    assert [copy.unasked(step) for step in range(3)] == [0.50, 0.75, 0.75]
    assert Copy((7,), matched=5, trust=0.5).unasked(0) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("matched", "step", "best", "p", "rate"),
    [
        (2, 0, True, 0.6, 0.808),  # 1 - .4 * .48
        (1, 1, True, 0.6, 0.808),  # one token more has matched by then
        (5, 3, True, 0.5, 0.94),  # 5 is the most that is known
        (4, 0, False, 0.0, 0.59),
        (1, 0, False, 0.3, 0.3),  # the head's second choice is likelier than a match of one
    ],
)
def test_the_rate_beside_a_head(matched: int, step: int, best: bool, p: float, rate: float) -> None:
    assert Copy((1,) * 9, matched).beside(step, best=best, p=p) == pytest.approx(rate)


def test_little_trust_makes_copies_unlikely_and_never_takes_from_the_head() -> None:
    copy = Copy((1,), 5, trust=0.1)
    assert copy.beside(0, best=False, p=0.0) == pytest.approx(0.081)
    assert copy.beside(0, best=True, p=0.6) == pytest.approx(1 - 0.4 * 0.912)


@pytest.mark.parametrize(
    ("emitted", "promised", "right"),
    [
        ([7, 8, 9, 4], 0.61 + 0.81 + 0.81, 3),  # all right, and one more
        ([7, 8], 0.61 + 0.81, 2),  # the third was not put to the test
        ([7, 5, 9], 0.61 + 0.81, 1),
        ([5, 8, 9], 0.61, 0),
    ],
)
def test_only_what_was_put_to_the_test_counts(emitted: list[int], promised: float, right: int) -> None:
    assert Copy((7, 8, 9), matched=3).hits(emitted) == (pytest.approx(promised), right)
