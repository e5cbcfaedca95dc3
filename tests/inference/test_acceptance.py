"""The numbers of acceptance, worked out by hand."""

import pytest

from eyas.inference.acceptance import AcceptanceStats


def stats_of(rounds: list[int], *, depth: int = 3) -> AcceptanceStats:
    stats = AcceptanceStats(depth)
    for accepted in rounds:
        stats.record(accepted, drafted=depth)
    return stats


def test_four_rounds_accepting_3_0_1_2() -> None:
    stats = stats_of([3, 0, 1, 2])
    assert stats.survived == [3, 2, 1]
    assert stats.tau == 2.5  # (4 + 1 + 2 + 3) / 4 tokens, the bonus included
    assert stats.survival == [0.75, 0.5, 0.25]
    assert stats.alpha == pytest.approx([0.75, 2 / 3, 0.5])
    assert (stats.accepted, stats.drafted, stats.rounds) == (6, 12, 4)
    assert stats.accepted / stats.drafted == 0.5
    product, length = 1.0, 1.0
    for alpha in stats.alpha:
        product *= alpha
        length += product
    assert length == pytest.approx(2.5)  # the conditional numbers simulate to tau, the per-depth ones do not


def test_tau_is_one_plus_the_sum_of_survival() -> None:
    for rounds in ([0], [3], [1, 2, 2], [0, 0, 3]):
        stats = stats_of(rounds)
        assert stats.tau == pytest.approx(1 + sum(stats.survival)) == pytest.approx(1 + sum(rounds) / len(rounds))


def test_nothing_that_survives_leaves_nothing_to_test_deeper() -> None:
    stats = stats_of([0, 0, 1])
    assert stats.survival == pytest.approx([1 / 3, 0, 0])
    assert stats.alpha == pytest.approx([1 / 3, 0, 0])


def test_no_rounds_and_no_depth_are_plain_decoding() -> None:
    empty = AcceptanceStats(3)
    assert (empty.tau, empty.survival, empty.alpha) == (1.0, [0.0] * 3, [0.0] * 3)
    plain = AcceptanceStats(0)
    plain.record(0, drafted=0)
    assert (plain.tau, plain.rounds, plain.survival) == (1.0, 1, [])


def test_merging_adds_counts_of_any_depth() -> None:
    a, b = stats_of([3, 0]), stats_of([1, 2, 1], depth=2)
    merged = a + b
    assert (merged.depth, merged.rounds, merged.drafted, merged.survived) == (3, 5, 12, [4, 2, 1])
    assert (b + a) == merged
    assert a.survived == [1, 1, 1], "an operand was changed"
    assert (AcceptanceStats(0) + a) == a


def test_a_dict_holds_the_numbers_and_leads_back() -> None:
    stats = stats_of([3, 0, 1, 2])
    fields = stats.as_dict()
    assert (fields["tau"], fields["survival"], fields["rounds"]) == (2.5, [0.75, 0.5, 0.25], 4)
    again = AcceptanceStats.from_dict(fields)
    assert again == stats
    again.record(3, drafted=3)
    assert fields["survived"] == [3, 2, 1], "the dict is shared"
    assert AcceptanceStats.from_dict(AcceptanceStats(0).as_dict()) == AcceptanceStats(0)


@pytest.mark.parametrize(("accepted", "drafted"), [(4, 9), (-1, 3), (3, 2)])
def test_a_round_accepts_no_more_than_was_drafted(accepted: int, drafted: int) -> None:
    stats = AcceptanceStats(3)
    with pytest.raises(AssertionError):
        stats.record(accepted, drafted=drafted)
    assert stats.rounds == 0


def test_a_tree_drafts_more_nodes_than_levels() -> None:
    stats = AcceptanceStats(2)
    stats.record(2, drafted=10)
    assert (stats.tau, stats.drafted) == (3.0, 10)
