"""The corpus: what the target wrote, as exact token ids, one JSON line per reply.

While a corpus is being written it lives in numbered part files, each written whole and renamed, so a kill loses at most
one part and no row is ever half there. Rows are known by id: resuming skips the ids that are already on disk.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eyas.data.encode import TokenizedExample, encode_reply
from eyas.models.errors import UserError


@dataclass(frozen=True)
class CorpusRow:
    """One prompt and the target's reply; ids are exactly those the target read and wrote."""

    id: str
    source: str
    category: str
    split: str
    temperature: float
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    finish_reason: str
    prompt_text: str
    reply_text: str

    def example(self) -> TokenizedExample:
        """Return the tokenized example: the reply marked, nothing added to a cut reply."""
        return encode_reply(list(self.prompt_ids), list(self.reply_ids))


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under its final name only when it is whole and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_rows(path: Path) -> Iterator[CorpusRow]:
    """Yield the rows of one corpus file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield CorpusRow(**{**row, "prompt_ids": tuple(row["prompt_ids"]), "reply_ids": tuple(row["reply_ids"])})


class PartWriter:
    """Appends rows to numbered part files of `rows_per_part` rows each; `close` writes what is left."""

    def __init__(self, folder: Path, *, rows_per_part: int) -> None:
        self.folder = folder
        self.rows_per_part = rows_per_part
        self.pending: list[CorpusRow] = []
        folder.mkdir(parents=True, exist_ok=True)
        numbers = (int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.jsonl"))
        self.next_part = max(numbers, default=-1) + 1

    def add(self, row: CorpusRow) -> None:
        """Keep a row; writes a part when enough have gathered."""
        self.pending.append(row)
        if len(self.pending) >= self.rows_per_part:
            self.close()

    def close(self) -> None:
        """Write the pending rows as one part."""
        if not self.pending:
            return
        write_atomically(self.folder / f"part-{self.next_part:05d}.jsonl", to_jsonl(self.pending))
        self.next_part += 1
        self.pending = []

    def written(self) -> dict[str, CorpusRow]:
        """Return all rows in finished parts, by id."""
        rows = (row for part in sorted(self.folder.glob("part-*.jsonl")) for row in read_rows(part))
        return {row.id: row for row in rows}


def to_jsonl(rows: Iterable[CorpusRow]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def load_corpus(path: Path) -> list[CorpusRow]:
    """Return the rows of a finished corpus; raises UserError when there is none."""
    if not path.is_file():
        raise UserError(f"there is no corpus {str(path)!r}; run the synthesize stage first.")
    return list(read_rows(path))
