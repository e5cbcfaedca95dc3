"""Prompt files: every line and every list item comes out as a row, readable or with its fault."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from eyas.data.row_files import RawRow, read_file
from eyas.models.errors import UserError

ROWS = [{"prompt": "one"}, {"prompt": "zwei \xfc", "n": 2}, {"prompt": "\u4e09"}]


def seen(path: Path) -> list[tuple[int, object, str | None, tuple[str, ...]]]:
    return [(row.number, row.value, row.fault and row.fault.reason, row.repairs) for row in read_file(path)]


def lines(*data: bytes) -> bytes:
    return b"".join(data)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.json", "a.jsonl.gz", "a.json.gz", "list.json",
                                  "wrapped.json", "a.parquet", "a.parquet.gz"])  # fmt: skip
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if "parquet" in name:
        plain = tmp_path / "plain.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"n": None, **row} for row in ROWS]), plain)
        data = plain.read_bytes()
    elif name == "list.json":
        data = json.dumps(ROWS, indent=1).encode()
    elif name == "wrapped.json":
        data = json.dumps({"data": ROWS}).encode()
    else:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    values = [{key: value for key, value in row.value.items() if value is not None} for row in read_file(path)]
    assert values == ROWS
    assert [row.number for row in read_file(path)] == [1, 2, 3]
    assert all(row.fault is None and row.repairs == () for row in read_file(path))


def test_every_line_of_a_dirty_file_comes_out_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "dirty.jsonl"
    path.write_bytes(
        lines(
            b'\xef\xbb\xbf{"prompt": "a"}\r\n', b'{"prompt": "b"}\r\n', b"\n", b'{"prompt": "c\n', b"[1]\n",
            b"nonsense\n",
            b'{"prompt": "caf\xe9"}\n', b" \t \n", b"[" * 100_000 + b"\n", b'{"n": ' + b"9" * 5000 + b"}\n",
            '{"prompt": "x\u2028y\x85z"}'.encode(),
        )
    )  # fmt: skip
    assert seen(path) == [
        (1, {"prompt": "a"}, None, ("byte order mark", "Windows line end")),
        (2, {"prompt": "b"}, None, ("Windows line end",)),
        (3, None, "blank line", ()),
        (4, None, "broken JSON", ()),
        (5, [1], None, ()),
        (6, None, "broken JSON", ()),
        (7, None, "not UTF-8", ()),
        (8, None, "blank line", ()),
        (9, None, "broken JSON", ()),
        (10, None, "broken JSON", ()),
        (11, {"prompt": "x\u2028y\x85z"}, None, ()),
    ]


def test_json_lines_under_the_other_name_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": \n{"prompt": "c"}\n')
    assert [(number, fault) for number, _, fault, _ in seen(path)] == [(1, None), (2, "broken JSON"), (3, None)]
    assert next(iter(read_file(path))).repairs == ("byte order mark",)


@pytest.mark.parametrize("value", [{"messages": [{"role": "user"}]}, {"a": [1]}, {"a": [{}], "b": [{}]}])
def test_an_object_that_wraps_no_rows_is_one_row(tmp_path: Path, value: object) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    assert list(read_file(path)) == [RawRow(1, value)]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b'[{"a": 1},', "'a.json' is not one JSON document: .*; write one JSON object per line"),
        ("a.txt", b"{}", r"'a.txt': prompts are read from \.jsonl, \.ndjson, \.json, \.parquet, each also with \.gz"),
        ("a.csv.gz", b"", r"'a.csv.gz': prompts are read from"),
        ("a.jsonl.gz", b"no gzip", "'a.jsonl.gz' is a broken gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999)[:-9], "'a.jsonl.gz' is a broken gzip file"),
        ("a.jsonl.gz", gzip.compress(b"{}")[:10] + b"\xff" * 30, "'a.jsonl.gz' is a broken gzip file"),
        ("a.parquet", b"no parquet", "'a.parquet' is no readable Parquet file"),
        ("a.parquet", b"", "'a.parquet' is no readable Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_at_all_is_one_sentence(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        list(read_file(path))
    assert "\n" not in str(caught.value)
