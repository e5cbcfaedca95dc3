"""The latency table: interpolation by hand, nothing beyond what was measured, and its file both ways."""

import json

import pytest

from eyas.inference.latency import LatencyTable, RowsLatency
from eyas.models.errors import UserError

ONE = RowsLatency(1, (1, 3, 5), (10.0, 14.0, 20.0), feed=1.0, first=0.5, level=2.0)
FOUR = RowsLatency(4, (1, 3), (16.0, 26.0), feed=2.0, first=1.0, level=3.0)
TABLE = LatencyTable(256, (ONE, FOUR))


def test_between_measured_sizes_it_is_linear() -> None:
    assert TABLE.verify_seconds(1) == pytest.approx((10.0, 12.0, 14.0, 17.0, 20.0))
    assert TABLE.verify_seconds(4) == pytest.approx((16.0, 21.0, 26.0))
    assert TABLE.verify_seconds(2) == pytest.approx((12.0, 15.0, 18.0))  # a third of the way, as far as both go
    assert TABLE.draft_seconds(1, 1) == 1.5
    assert TABLE.draft_seconds(1, 4) == 7.5
    assert TABLE.draft_seconds(4, 3) == 9.0
    assert TABLE.draft_seconds(3, 1) == pytest.approx(1.5 + 2 / 3 * 1.5)


@pytest.mark.parametrize("rows", [0, 5])
def test_rows_that_were_not_measured_are_refused(rows: int) -> None:
    with pytest.raises(UserError, match=f"knows 1 to 4 rows side by side, not {rows}"):
        TABLE.verify_seconds(rows)


def test_the_file_holds_all_of_it_and_nothing_else_is_read() -> None:
    assert LatencyTable.from_json(TABLE.as_json()) == TABLE
    known = json.loads(TABLE.as_json())
    for damaged in ("{", "[]", json.dumps({**known, "more": 1}), json.dumps({"context": 1})):
        with pytest.raises(UserError, match="delete it"):
            LatencyTable.from_json(damaged)
    known["by_rows"][0]["nodes"] = [1, 3]
    with pytest.raises(UserError, match="ascending nodes from 1 on"):
        LatencyTable.from_json(json.dumps(known))


def test_tables_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="ascending numbers of rows from 1 on"):
        LatencyTable(256, (FOUR,))
    with pytest.raises(UserError, match="ascending numbers of rows from 1 on"):
        LatencyTable(256, (ONE, ONE))
    for nodes in ((2, 3, 5), (1, 5, 3)):
        with pytest.raises(UserError, match="ascending nodes from 1 on"):
            RowsLatency(1, nodes, (1.0, 2.0, 3.0), 0.0, 0.0, 0.0)
