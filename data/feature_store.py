"""Frozen target features on disk: safetensors shards of whole rows, an index inside each, one manifest for all.

A shard holds, for its rows laid end to end: input_ids, generated_mask, aux_hidden (pre-norm), final_hidden (post-norm),
argmax of the target's full logits (-1 where no slot is taught). The hash of each row's ids stands beside its features,
so a shifted or swapped row is found on reading. Shards are written to a temporary name and renamed; a manifest exists
only for a whole store and names everything the features depend on.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.data.corpus import write_atomically
from eyas.models.errors import UserError

SCHEMA = 1
_TOKEN_TENSORS = ("input_ids", "generated_mask", "aux_hidden", "final_hidden", "argmax")


@dataclass(frozen=True)
class FeatureRow:
    """One row's tokens and features; T tokens, aux states F wide, final states D wide."""

    id: str
    input_ids_T: Tensor
    generated_mask_T: Tensor
    aux_hidden_TF: Tensor
    final_hidden_TD: Tensor
    argmax_T: Tensor

    def __post_init__(self) -> None:
        T = len(self.input_ids_T)
        for name, value in self.__dict__.items():
            assert name == "id" or len(value) == T, f"{self.id}: {name} has {len(value)} entries for {T} tokens"

    def __len__(self) -> int:
        return len(self.input_ids_T)


@dataclass(frozen=True)
class FeatureManifest:
    """What a store was made of; a head may only be trained on a store whose manifest matches its target."""

    target_fingerprint: str
    corpus_fingerprint: str
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: str
    final_state: str
    max_length: int
    shards: tuple[str, ...]
    rows: int
    tokens: int
    schema: int = SCHEMA


def ids_hash(ids_T: Tensor) -> int:
    """Return a 63-bit hash of a row's token ids."""
    digest = hashlib.blake2b(ids_T.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def write_shard(path: Path, rows: list[FeatureRow], *, state_dtype: torch.dtype) -> None:
    """Write rows as one shard, whole or not at all. Raises UserError when a state overflows the dtype."""
    for row in rows:
        for name, states in (("aux_hidden", row.aux_hidden_TF), ("final_hidden", row.final_hidden_TD)):
            if not bool(torch.isfinite(states.to(state_dtype)).all()):
                raise UserError(
                    f"{name} of row {row.id} is not finite in {state_dtype}: its largest value is "
                    f"{float(states.abs().max()):.3g}; set extract.dtype and extract.state_dtype to float32."
                )
    lengths = torch.tensor([len(row) for row in rows])
    tensors = {
        "input_ids": torch.cat([row.input_ids_T for row in rows]).to(torch.int32),
        "generated_mask": torch.cat([row.generated_mask_T for row in rows]),
        "aux_hidden": torch.cat([row.aux_hidden_TF for row in rows]).to(state_dtype),
        "final_hidden": torch.cat([row.final_hidden_TD for row in rows]).to(state_dtype),
        "argmax": torch.cat([row.argmax_T for row in rows]).to(torch.int32),
        "lengths": lengths,
        "ids_hash": torch.tensor([ids_hash(row.input_ids_T) for row in rows]),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    header = {"schema": str(SCHEMA), "axes": "tokens, features", "aux_hidden": "pre-norm", "final_hidden": "post-norm"}
    save_file(tensors, temporary, metadata={**header, "row_ids": json.dumps([row.id for row in rows])})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def read_shard(path: Path) -> Iterator[FeatureRow]:
    """Yield the rows of one shard; raises UserError on another schema, a wrong length or a row whose ids changed."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read feature shard {path.name}: {error}; delete it and run extract again.") from error
    if header.get("schema") != str(SCHEMA):
        raise UserError(
            f"{path.name} has feature schema {header.get('schema')}, this version reads {SCHEMA}; extract again."
        )
    lengths = tensors["lengths"].tolist()
    row_ids = json.loads(header["row_ids"])
    for name in _TOKEN_TENSORS:
        if len(tensors[name]) != sum(lengths):
            raise UserError(
                f"{path.name}: {name} holds {len(tensors[name])} tokens, the rows {row_ids[0]} .. {row_ids[-1]} have "
                f"{sum(lengths)}; the shard is damaged: delete it and run extract again."
            )
    pieces = {name: tensors[name].split(lengths) for name in _TOKEN_TENSORS}
    for i, row_id in enumerate(row_ids):
        ids = pieces["input_ids"][i].to(torch.int64)
        if ids_hash(ids) != int(tensors["ids_hash"][i]):
            raise UserError(f"{path.name}: the tokens of row {row_id} are not those its features were made from.")
        yield FeatureRow(
            id=row_id,
            input_ids_T=ids,
            generated_mask_T=pieces["generated_mask"][i],
            aux_hidden_TF=pieces["aux_hidden"][i],
            final_hidden_TD=pieces["final_hidden"][i],
            argmax_T=pieces["argmax"][i].to(torch.int64),
        )


class FeatureStore:
    """A finished store opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            fields = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"there is no finished feature store in {str(folder)!r}; run the extract stage first."
            ) from None
        if fields.get("schema") != SCHEMA:
            raise UserError(
                f"{folder} has feature schema {fields.get('schema')}, this version reads {SCHEMA}; extract again."
            )
        listed = {name: tuple(fields[name]) for name in ("aux_layers", "shards")}
        self.manifest = FeatureManifest(**{**fields, **listed})

    def check_target(self, *, target_fingerprint: str, aux_layers: tuple[int, ...]) -> None:
        """Raise UserError unless the features were made by this target at these layers."""
        if self.manifest.target_fingerprint != target_fingerprint:
            raise UserError(
                f"the feature store {str(self.folder)!r} was made for another target (fingerprint "
                f"{self.manifest.target_fingerprint}, this target has {target_fingerprint}); extract again."
            )
        if self.manifest.aux_layers != aux_layers:
            raise UserError(
                f"the feature store holds aux layers {list(self.manifest.aux_layers)}, the recipe asks for "
                f"{list(aux_layers)}; run extract again or set head.aux_layers to the stored ones."
            )

    def rows(self) -> list[FeatureRow]:
        """Return all rows, in corpus order (tensors stay memory-mapped where the platform allows)."""
        return [row for shard in self.manifest.shards for row in read_shard(self.folder / shard)]


def write_manifest(folder: Path, manifest: FeatureManifest) -> None:
    """Write the manifest, which makes the store count as finished."""
    write_atomically(folder / "manifest.json", json.dumps(asdict(manifest), indent=2))
