"""One shard of a feature store: whole rows end to end in one safetensors file, written whole and read row by row.

For T tokens in R rows, N of the tokens teaching a slot (M = N final states, or T where they are kept everywhere):

    input_ids int32 [T]   generated_mask bool [T]   aux_hidden [T, A*D] pre-norm   aux_scale fp32 [T, A] (8 bits only)
    argmax int32 [N]      final_hidden [M, D] post-norm         final_scale fp32 [M, 1] (8 bits only)
    lengths, taught, row_hash, state_hash int64 [R]

The file's only metadata entry is one JSON text (several would be written in no fixed order, and equal shards must be
equal files): schema, spec, row ids, axes, measurements. Which tokens teach follows from the mask. A row's id, ids and
mask are hashed together, its states apart, so a row that was moved, swapped, cut or damaged is found when it is read.
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.data.feature_row import BareRow, FeatureRow, scatter_rows, teaching_positions
from eyas.data.manifest import SCHEMA, FeatureSpec, check_schema, row_hash
from eyas.data.state_format import STATE_FORMATS
from eyas.models.errors import UserError

AXES = {"aux_hidden": "tokens, layers * hidden", "final_hidden": "taught tokens, hidden"}
_ENTRY = "eyas"


@dataclass(frozen=True)
class StoredRow:
    """A row as it is kept: states in the store's format, final states (M of them) and argmax only where needed."""

    id: str
    input_ids_T: Tensor
    generated_mask_T: Tensor
    aux_TF: Tensor
    aux_scale_TA: Tensor | None
    final_MD: Tensor
    final_scale_M1: Tensor | None
    argmax_N: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.__dict__.values() if isinstance(value, Tensor))

    def state_hash(self) -> int:
        """Return a checksum of the states and the argmax."""
        check = 0
        for tensor in (self.aux_TF, self.aux_scale_TA, self.final_MD, self.final_scale_M1, self.argmax_N):
            if tensor is not None:
                check = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, check)
        return check


def encode_row(row: FeatureRow, spec: FeatureSpec) -> StoredRow:
    """Return a row in the store's format. Raises UserError when a state is not finite in it."""
    taught_N = teaching_positions(row.generated_mask_T)
    final = row.final_hidden_TD if spec.final_at == "everywhere" else row.final_hidden_TD[taught_N]
    state_format, layers = STATE_FORMATS[spec.state_dtype], len(spec.aux_layers)
    kept = {}
    for name, states, count in (("aux_hidden", row.aux_hidden_TF, layers), ("final_hidden", final, 1)):
        values, scales = state_format.encode(states, layers=count)
        exact = states if scales is not None else values
        if exact.numel() and not all(bool(torch.isfinite(bound)) for bound in torch.aminmax(exact)):
            raise UserError(
                f"{name} of row {row.id} is not finite in {spec.state_dtype}: its largest value is "
                f"{float(states.abs().max()):.3g}; set extract.dtype and extract.state_dtype to float32."
            )
        kept[name] = (values, scales)
    return StoredRow(
        id=row.id,
        input_ids_T=row.input_ids_T.int(),
        generated_mask_T=row.generated_mask_T.bool(),
        aux_TF=kept["aux_hidden"][0],
        aux_scale_TA=kept["aux_hidden"][1],
        final_MD=kept["final_hidden"][0],
        final_scale_M1=kept["final_hidden"][1],
        argmax_N=row.argmax_T[taught_N].int(),
    )


def decode_row(row: StoredRow, spec: FeatureSpec) -> FeatureRow:
    """Return the row that was kept; final states that were not are NaN."""
    state_format, T = STATE_FORMATS[spec.state_dtype], len(row.input_ids_T)
    taught_N = teaching_positions(row.generated_mask_T)
    final = state_format.decode(row.final_MD, row.final_scale_M1)
    if spec.final_at == "taught":
        final = scatter_rows(final, taught_N, T, float("nan"))
    return FeatureRow(
        id=row.id,
        input_ids_T=row.input_ids_T.long(),
        generated_mask_T=row.generated_mask_T,
        aux_hidden_TF=state_format.decode(row.aux_TF, row.aux_scale_TA),
        final_hidden_TD=final,
        argmax_T=scatter_rows(row.argmax_N.long(), taught_N, T, -1),
    )


def write_shard(path: Path, rows: list[StoredRow], spec: FeatureSpec, *, measured: dict[str, Any]) -> None:
    """Write rows as one shard, whole or not at all. Raises UserError when the disk is full."""
    tensors = {
        "input_ids": torch.cat([row.input_ids_T for row in rows]),
        "generated_mask": torch.cat([row.generated_mask_T for row in rows]),
        "aux_hidden": torch.cat([row.aux_TF for row in rows]),
        "final_hidden": torch.cat([row.final_MD for row in rows]),
        "argmax": torch.cat([row.argmax_N for row in rows]),
        "lengths": torch.tensor([len(row.input_ids_T) for row in rows]),
        "taught": torch.tensor([len(row.argmax_N) for row in rows]),
        "row_hash": torch.tensor([row_hash(row.id, row.input_ids_T, row.generated_mask_T) for row in rows]),
        "state_hash": torch.tensor([row.state_hash() for row in rows]),
    }
    if STATE_FORMATS[spec.state_dtype].scaled:
        tensors["aux_scale"] = torch.cat([row.aux_scale_TA for row in rows if row.aux_scale_TA is not None])
        tensors["final_scale"] = torch.cat([row.final_scale_M1 for row in rows if row.final_scale_M1 is not None])
    header = {
        "schema": SCHEMA,
        "spec": asdict(spec),
        "axes": AXES,
        "row_ids": [row.id for row in rows],
        "measured": measured,
    }
    save_whole(tensors, path, json.dumps(header, sort_keys=True))


def save_whole(tensors: dict[str, Tensor], path: Path, header: str) -> None:
    """Write a safetensors file under its final name only when it is whole and on disk.

    The temporary name is the same every time: what a kill leaves behind is written over by whoever comes next.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, temporary, metadata={_ENTRY: header})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise UserError(
            f"cannot write {path} ({size / 1e6:.1f} MB): {error}. What was finished before is kept; make room and run "
            "again, or set extract.state_dtype to float8_e4m3fn (half the bytes) or extract.mode to online (none)."
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a file written by `save_whole`; raises UserError when it is damaged or of another schema."""
    return _header(_open(path), path)


def _open(path: Path) -> Any:
    """Return a safetensors file, memory-mapped (its Python types are not complete)."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read feature shard {path.name}: {error}; delete it and run extract again.") from error


def _header(file: Any, path: Path) -> dict[str, Any]:
    metadata = file.metadata() or {}
    header: dict[str, Any] = json.loads(metadata.get(_ENTRY, "{}"))
    check_schema(header.get("schema", metadata.get("schema")), where=path.name)
    return header


class Shard:
    """A shard opened for reading: memory-mapped, its rows read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        header = _header(self._file, path)
        self.spec = FeatureSpec.from_json(header["spec"])
        self.row_ids: list[str] = header["row_ids"]
        self.measured: dict[str, Any] = header["measured"]
        names = set(self._file.keys())
        self._columns = {name: self._file.get_slice(name) for name in sorted(names)}
        small = {name: self._file.get_tensor(name) for name in ("lengths", "taught", "row_hash", "state_hash")}
        self.lengths: list[int] = small["lengths"].tolist()
        self.taught: list[int] = small["taught"].tolist()
        self._row_hash, self._state_hash = small["row_hash"].tolist(), small["state_hash"].tolist()
        self._check_shapes()
        self._starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        self._taught_starts = [0, *torch.tensor(self.taught).cumsum(0).tolist()]

    def __len__(self) -> int:
        return len(self.row_ids)

    def _check_shapes(self) -> None:
        """Raise UserError unless every tensor has the entries that rows, layers and spec ask for."""
        tokens, taught, layers = sum(self.lengths), sum(self.taught), len(self.spec.aux_layers)
        final = tokens if self.spec.final_at == "everywhere" else taught
        expected = {
            "input_ids": [tokens],
            "generated_mask": [tokens],
            "aux_hidden": [tokens, layers * self.spec.hidden_size],
            "final_hidden": [final, self.spec.hidden_size],
            "argmax": [taught],
        }
        if STATE_FORMATS[self.spec.state_dtype].scaled:
            expected |= {"aux_scale": [tokens, layers], "final_scale": [final, 1]}
        for name, shape in expected.items():
            found = list(self._columns[name].get_shape()) if name in self._columns else None
            if found != shape:
                raise UserError(
                    f"{self.path.name}: {name} has the shape {found}, the rows {self.row_ids[0]} .. "
                    f"{self.row_ids[-1]} have {shape}; the shard is damaged: delete it and run extract again."
                )

    def _part(self, name: str, start: int, stop: int) -> Tensor:
        return self._columns[name][start:stop]

    def _where(self, place: int) -> tuple[slice, slice]:
        tokens = slice(self._starts[place], self._starts[place + 1])
        return tokens, slice(self._taught_starts[place], self._taught_starts[place + 1])

    def tokens(self, place: int) -> BareRow:
        """Return the tokens of the row at a place; raises UserError when they are not that row's."""
        tokens, taught = self._where(place)
        ids = self._part("input_ids", tokens.start, tokens.stop).long()
        mask = self._part("generated_mask", tokens.start, tokens.stop).bool()
        row_id = self.row_ids[place]
        positions = teaching_positions(mask)
        if row_hash(row_id, ids, mask) != self._row_hash[place] or len(positions) != self.taught[place]:
            raise UserError(
                f"{self.path.name}: the tokens of row {row_id} are not those its features were made from; the shard "
                "is damaged: delete it and run extract again."
            )
        argmax = self._part("argmax", taught.start, taught.stop).long()
        return BareRow(row_id, ids, mask, scatter_rows(argmax, positions, len(ids), -1))

    def row(self, place: int, *, check_states: bool = True) -> FeatureRow:
        """Return the row at a place; raises UserError when its tokens (and states, if asked) are not that row's."""
        bare = self.tokens(place)
        tokens, taught = self._where(place)
        final = tokens if self.spec.final_at == "everywhere" else taught
        scaled = STATE_FORMATS[self.spec.state_dtype].scaled
        row = StoredRow(
            id=bare.id,
            input_ids_T=bare.input_ids_T.int(),
            generated_mask_T=bare.generated_mask_T,
            aux_TF=self._part("aux_hidden", tokens.start, tokens.stop),
            aux_scale_TA=self._part("aux_scale", tokens.start, tokens.stop) if scaled else None,
            final_MD=self._part("final_hidden", final.start, final.stop),
            final_scale_M1=self._part("final_scale", final.start, final.stop) if scaled else None,
            argmax_N=self._part("argmax", taught.start, taught.stop),
        )
        if check_states and row.state_hash() != self._state_hash[place]:
            raise UserError(
                f"{self.path.name}: the features of row {row.id} are not those that were written; the shard is "
                "damaged: delete it and run extract again."
            )
        return decode_row(row, self.spec)
