"""Rows of a `datasets` dataset: by Hub id, by a folder that save_to_disk wrote, or by a folder of data files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.row_files import RawRow
from eyas.models.errors import UserError, nearest


@dataclass(frozen=True)
class DatasetName:
    """A Hub id or a local folder, with what `datasets` needs to know to choose from it; no split means train."""

    name: str
    config: str | None = None
    revision: str | None = None
    split: str | None = None
    streaming: bool = False


def read_dataset(name: DatasetName) -> Iterator[RawRow]:
    """Yield the rows of one split in order; raises UserError when the dataset or the split cannot be had."""
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        rows = _saved(name) if _was_saved(name) else _loaded(name)
        for number, row in enumerate(rows, start=1):
            yield RawRow(number, dict(row))
    except UserError:
        raise
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"dataset {name.name!r} does not load: {reason}; name its files as `path`, where each row is checked alone."
        ) from None
    except (DatasetsError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"dataset {name.name!r} does not load: {reason}") from None


def _was_saved(name: DatasetName) -> bool:
    folder = Path(name.name)
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _saved(name: DatasetName) -> Any:
    from datasets import Dataset, load_from_disk

    if name.config or name.revision:
        raise UserError(f"dataset {name.name!r} was saved to disk: config and revision say nothing about it.")
    found = load_from_disk(name.name)
    if isinstance(found, Dataset):
        if name.split and found.split is not None and str(found.split) != name.split:
            raise UserError(f"dataset {name.name!r} is the split {str(found.split)!r}, asked for {name.split!r}.")
        return found
    split = name.split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if split not in found:
        splits = ", ".join(sorted(found))
        raise UserError(f"dataset {name.name!r} has no split {split!r}, only {splits}.{nearest(split, found)}")
    return found[split]


def _loaded(name: DatasetName) -> Any:
    from datasets import load_dataset
    from datasets.utils import disable_progress_bars

    disable_progress_bars()  # rows are counted as they are read
    return load_dataset(
        name.name, name.config, split=name.split or "train", revision=name.revision, streaming=name.streaming
    )
