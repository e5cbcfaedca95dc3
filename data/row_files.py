"""Rows of a prompt file, one by one: JSON lines, JSON or Parquet, plain or gzipped.

A row that cannot be read is handed on with its fault, never skipped: whoever counts rows sees every line. What concerns
the whole file (no such file, a broken gzip, a JSON list that does not parse) is a UserError.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.row_checks import BadRow
from eyas.models.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
READERS = {".jsonl": "lines", ".ndjson": "lines", ".json": "document", ".parquet": "parquet"}


@dataclass(frozen=True)
class RawRow:
    """One row as it was found: its number (the line, or the place in the list, from 1), its value or its fault."""

    number: int
    value: Any
    fault: BadRow | None = None
    repairs: tuple[str, ...] = ()


def row_format(path: Path) -> str:
    """Return how a file is read, by its name; raises UserError naming the endings that are known."""
    ending = Path(path.name.removesuffix(".gz")).suffix.lower()
    if ending not in READERS:
        raise UserError(f"{path.name!r}: prompts are read from {', '.join(READERS)}, each also with .gz behind it.")
    return READERS[ending]


def read_file(path: Path) -> Iterator[RawRow]:
    """Yield every row of a file in order."""
    form = row_format(path)
    try:
        if form == "parquet":
            yield from _parquet(path)
        elif form == "lines":
            with _open(path) as file:
                yield from _lines(file)
        else:
            yield from _document(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path.name!r} is a broken gzip file: {error}; fetch it again.") from None


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(lines: Any) -> Iterator[RawRow]:
    for number, line in enumerate(lines, start=1):
        yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> RawRow:
    repairs = []
    if number == 1 and line.startswith(BYTE_ORDER_MARK):
        line = line.removeprefix(BYTE_ORDER_MARK)
        repairs.append("byte order mark")
    line = line.removesuffix(b"\n")
    if line.endswith(b"\r"):
        repairs.append("Windows line end")
    if not line.strip():
        return RawRow(number, None, BadRow("blank line"))
    try:
        return RawRow(number, json.loads(line.decode()), repairs=tuple(repairs))
    except UnicodeDecodeError as error:
        return RawRow(number, None, BadRow("not UTF-8", f"byte {error.start}"))
    except (ValueError, RecursionError) as error:
        return RawRow(number, None, BadRow("broken JSON", str(error)[:80]))


def _document(path: Path) -> Iterator[RawRow]:
    """Yield the rows of one JSON document: a list, an object holding one list of objects, or lines after all."""
    with _open(path) as file:
        data: bytes = file.read()
    repairs = ("byte order mark",) if data.startswith(BYTE_ORDER_MARK) else ()
    try:
        value = json.loads(data.removeprefix(BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError) as error:
        if data.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{"):  # JSON lines under the other name
            yield from _lines(data.removesuffix(b"\n").split(b"\n"))
            return
        raise UserError(f"{path.name!r} is not one JSON document: {error}; write one JSON object per line.") from None
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(value) == len(lists) == 1 and "messages" not in value else [value]
    rows = value if isinstance(value, list) else [value]
    for number, row in enumerate(rows, start=1):
        yield RawRow(number, row, repairs=repairs if number == 1 else ())


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _open(path) as file:
            source = pyarrow.BufferReader(file.read()) if path.suffix == ".gz" else file
            number = 0
            for batch in pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(number, row)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path.name!r} is no readable Parquet file: {str(error).splitlines()[0]}") from None
