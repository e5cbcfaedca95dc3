"""One prompt source: where its rows come from, what it is called, and which schema its rows have."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eyas.data.conversation import bundled_prompts
from eyas.data.row_checks import BadRow
from eyas.data.row_datasets import DatasetName, read_dataset
from eyas.data.row_files import RawRow, read_file, row_format
from eyas.data.schema import probe_schema
from eyas.models.errors import UserError

Say = Callable[[str], None]
PROBE_ROWS = 100


@dataclass(frozen=True)
class PromptSource:
    """One source: a file or a bundled set ("bundled:train") by `path`, or a dataset. `limit` reads no further rows."""

    path: str | None = None
    dataset: DatasetName | None = None
    schema: str | None = None
    weight: float | None = None
    limit: int | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        assert (self.path is None) != (self.dataset is None)

    @property
    def name(self) -> str:
        """The source as the user would call it."""
        if self.dataset is None:
            return str(self.path)
        return "/".join(part for part in (self.dataset.name, self.dataset.config, self.dataset.split) if part)

    @property
    def file(self) -> Path | None:
        """The file to read, None for a dataset; raises UserError when there is none."""
        if self.path is None:
            return None
        bundled = self.path.startswith("bundled:")
        path = bundled_prompts(self.path.removeprefix("bundled:")) if bundled else Path(self.path)
        if not path.is_file():
            remedy = (
                "give that folder as {dataset: ...}"
                if path.is_dir() and self.path not in (".", "")
                else "give a JSONL file, or bundled:train or bundled:eval"
            )
            raise UserError(f"there is no prompt file {self.path!r}; {remedy}.")
        row_format(path)
        return path

    @property
    def stem(self) -> str:
        """The short name that ids and categories are made of."""
        name = Path(self.dataset.name if self.dataset else str(self.file)).name
        return name.removesuffix(".gz").rsplit(".", 1)[0] if self.dataset is None else name

    @property
    def label(self) -> str:
        """What the corpus calls it: its name, a file's without the folders it lies in."""
        bundled = self.path is None or self.path.startswith("bundled:")
        return self.name if bundled else Path(self.name).name

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows, at most `limit`."""
        file = self.file
        rows = read_file(file) if file is not None else read_dataset(self.dataset or DatasetName(""))
        return islice(rows, self.limit)

    def where(self, row: RawRow) -> str:
        """Return what a message calls one of the rows."""
        return f"{self.name if self.path is None else Path(self.path).name} line {row.number}"

    def find_schema(self, first: list[RawRow], *, say: Say = lambda line: None) -> str:
        """Return the stated schema, or the one that fits most of the first rows; raises UserError when none does."""
        if all(row.fault is not None and row.fault.reason == "blank line" for row in first):
            raise UserError(f'prompt file {self.name!r} is empty; it needs at least one line with "messages".')
        if self.schema is not None:
            say(f"  {self.name}: schema {self.schema} (stated)")
            return self.schema
        objects = [row.value for row in first if isinstance(row.value, dict)]
        if not objects:
            bad = next(row for row in first if row.fault is None or row.fault.reason != "blank line")
            fault = bad.fault or BadRow("not an object", repr(bad.value)[:60])
            raise UserError(f"{self.where(bad)}: {fault}; none of the first {len(first)} rows can be read.")
        name, fitting = probe_schema(objects, source=self.name)
        say(f"  {self.name}: schema {name} (fits {fitting} of the first {len(first)} rows)")
        return name

    def probe(self) -> None:
        """Raise UserError when the source is not there or none of its first rows can be read."""
        self.find_schema(list(islice(self.rows(), PROBE_ROWS)))
