"""The corpus: what the target wrote, as exact token ids, one JSON line per row.

A row is a stretch of a conversation as the target read and wrote it, with the spans it generated: one reply behind its
prompt, or several turns of one conversation where every prompt begins with all that came before it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from eyas.data.encode import TokenizedExample
from eyas.models.errors import UserError


@dataclass(frozen=True)
class CorpusRow:
    """Ids exactly as the target read and wrote them; `generated` are its spans of them, (start, end), end exclusive.

    `finish_reason` is the last span's: a reply cut by the limit ("length") is always the last and has no end-of-turn.
    `prompt_text` is the message the first span answers, `reply_texts` are the texts of all spans.
    """

    id: str
    source: str
    category: str
    split: str
    temperature: float
    input_ids: tuple[int, ...]
    generated: tuple[tuple[int, int], ...]
    finish_reason: str
    prompt_text: str
    reply_texts: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.generated, f"row {self.id} has nothing that the target wrote"
        edges = [0, *(edge for span in self.generated for edge in span), len(self.input_ids)]
        assert edges == sorted(edges), f"row {self.id} has spans {self.generated} of {len(self.input_ids)} tokens"
        assert len(self.reply_texts) == len(self.generated)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids before the first generated token."""
        return self.input_ids[: self.generated[0][0]]

    @property
    def reply_ids(self) -> tuple[int, ...]:
        """All generated ids, of all spans."""
        return tuple(token for start, end in self.generated for token in self.input_ids[start:end])

    def example(self) -> TokenizedExample:
        """Return the tokenized example: the generated spans marked, nothing added to a cut reply."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.generated:
            mask[start:end] = True
        return TokenizedExample(torch.tensor(self.input_ids, dtype=torch.int64), mask)


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
            row["input_ids"] = tuple(row["input_ids"])
            row["generated"] = tuple((start, end) for start, end in row["generated"])
            row["reply_texts"] = tuple(row["reply_texts"])
            yield CorpusRow(**row)


def to_jsonl(rows: Iterable[CorpusRow]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def load_corpus(path: Path) -> list[CorpusRow]:
    """Return the rows of a finished corpus; raises UserError when there is none."""
    if not path.is_file():
        raise UserError(f"there is no corpus {str(path)!r}; run the synthesize stage first.")
    return list(read_rows(path))


def load_split(folder: Path, split: str) -> list[CorpusRow]:
    """Return the rows of one split ("train", "validation" or "heldout") of a finished corpus."""
    return [row for row in load_corpus(folder / "corpus.jsonl") if row.split == split]
