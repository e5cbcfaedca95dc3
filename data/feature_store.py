"""A finished feature store, opened for reading: rows in corpus order, read one at a time, nothing held in memory.

    manifest.json        what the features were made of, and what was measured
    index.safetensors    row ids, lengths, and where each row lies
    shard-00000.safetensors ...

A manifest exists only for a whole store. Rows lie in the shards by length; the index leads back to corpus order.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.data.feature_row import FeatureRow, TokenRow
from eyas.data.manifest import MANIFEST, FeatureSpec, check_spec, read_manifest
from eyas.data.shard import Shard, read_header, save_whole
from eyas.models.errors import UserError

INDEX = "index.safetensors"
OPEN_SHARDS = 16


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def write_index(folder: Path, header: str, *, lengths: list[int], shards: list[int], places: list[int]) -> None:
    """Write where each row lies, in corpus order; the header holds the row ids."""
    tensors = {"lengths": torch.tensor(lengths), "shards": torch.tensor(shards), "places": torch.tensor(places)}
    save_whole(tensors, folder / INDEX, header)


class FeatureStore:
    """A finished store; a `RowSource`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.row_ids: list[str] = read_header(folder / INDEX)["row_ids"]
        try:
            with safe_open(folder / INDEX, framework="pt") as file:
                self.lengths: list[int] = file.get_tensor("lengths").tolist()
                self._shards: list[int] = file.get_tensor("shards").tolist()
                self._places: list[int] = file.get_tensor("places").tolist()
        except SafetensorError as error:
            raise UserError(f"cannot read {folder / INDEX}: {error}; extract again.") from error
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._checked = bytearray(len(self.row_ids))  # states are checked the first time they are read, not every epoch

    def __len__(self) -> int:
        return len(self.row_ids)

    def check(self, expected: FeatureSpec, *, max_length: int) -> None:
        """Raise UserError unless the features were made of exactly this and no row is longer than `max_length`."""
        check_spec(self.manifest.spec, expected, where=f"the feature store {str(self.folder)!r}")
        if self.manifest.longest > max_length:
            raise UserError(
                f"the feature store {str(self.folder)!r} was made for a max length of {self.manifest.max_length} and "
                f"holds a row of {self.manifest.longest} tokens, more than train.line_length = {max_length}; raise it "
                "to the longest row."
            )

    def check_files(self, notice: Callable[[str], None]) -> None:
        """Raise UserError when a file of the store is missing; files that are not the store's are named and ignored."""
        own = {MANIFEST, INDEX, *self.manifest.shards}
        present = {path.name for path in self.folder.iterdir()}
        missing = sorted(own - present)
        if missing:
            raise UserError(f"the feature store {str(self.folder)!r} has lost {', '.join(missing)}; extract again.")
        foreign = sorted(present - own)
        if foreign:
            notice(f"  ignored in {self.folder}, not part of this store: {', '.join(foreign)}")

    def _shard(self, number: int) -> Shard:
        """Return an open shard; the one used longest ago is closed when too many are."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = Shard(self.folder / self.manifest.shards[number])
        check_spec(shard.spec, self.manifest.spec, where=f"{shard.path.name} in {str(self.folder)!r}")
        self._open[number] = shard
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _at(self, index: int) -> tuple[Shard, int]:
        shard, place = self._shard(self._shards[index]), self._places[index]
        if shard.row_ids[place : place + 1] != [self.row_ids[index]]:
            raise UserError(
                f"row {self.row_ids[index]} is not where the index of {str(self.folder)!r} says; extract again."
            )
        return shard, place

    def tokens(self, index: int) -> TokenRow:
        """Return a row's tokens and argmax without reading its states."""
        shard, place = self._at(index)
        return shard.tokens(place)

    def rows(self, indices: Sequence[int]) -> list[FeatureRow]:
        """Return the rows of the given numbers, read now."""
        found = []
        for index in indices:
            shard, place = self._at(index)
            found.append(shard.row(place, check_states=not self._checked[index]))
            self._checked[index] = 1
        return found

    def all_rows(self) -> list[FeatureRow]:
        """Return all rows in corpus order, in memory: for small stores and tests."""
        return self.rows(range(len(self)))
