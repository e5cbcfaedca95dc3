"""The manifest of a feature store: everything its features depend on, and what was measured while they were written.

A store may be read only for exactly what it was made of. Each field of `FeatureSpec` is compared by name; the same
fields stand in every shard, so a shard of another run is never taken for one of this run.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas.data.corpus import write_atomically
from eyas.data.encode import TokenizedExample
from eyas.models.errors import UserError

SCHEMA = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FeatureSpec:
    """What features are made of. Fingerprints are short hashes; aux layers count in the neutral index.

    `final_at`: final states are kept where a slot is taught ("taught") or at every token ("everywhere").
    """

    target: str
    quantization: str
    tokenizer: str
    template: str
    template_arguments: str
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    compute_dtype: str
    state_dtype: str
    data: str
    final_at: str = "taught"
    aux_state: str = "pre-norm"
    final_state: str = "post-norm"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "FeatureSpec":
        """Return the spec that was written as JSON; a field this version does not know is an error of ours."""
        return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})


@dataclass(frozen=True)
class FeatureManifest:
    """A finished store: its spec, its shards, what they hold, and the measurements (see data/measure.py)."""

    spec: FeatureSpec
    max_length: int
    longest: int
    rows: int
    tokens: int
    taught: int
    shards: tuple[str, ...]
    measured: dict[str, Any]
    schema: int = SCHEMA


def check_schema(found: object, *, where: str) -> None:
    """Raise UserError naming both versions unless a store or shard has this version's schema."""
    if found != SCHEMA:
        raise UserError(f"{where} has feature schema {found}, this version reads {SCHEMA}; extract again.")


def check_spec(found: FeatureSpec, expected: FeatureSpec, *, where: str) -> None:
    """Raise UserError naming every field that differs, with both values."""
    differing = [
        f"{field.name} is {getattr(found, field.name)!r} there, {getattr(expected, field.name)!r} here"
        for field in fields(FeatureSpec)
        if getattr(found, field.name) != getattr(expected, field.name)
    ]
    if differing:
        raise UserError(
            f"{where} was made of something else: {'; '.join(differing)}. Run extract again, in a new folder or after "
            "deleting the old one."
        )


def write_manifest(folder: Path, manifest: FeatureManifest) -> None:
    """Write the manifest, which makes the store count as finished."""
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")


def read_manifest(folder: Path) -> FeatureManifest:
    """Return the manifest of a finished store; raises UserError when there is none or it has another schema."""
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"there is no finished feature store in {str(folder)!r}; run the extract stage first."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({error}); extract again.") from None
    check_schema(values.get("schema"), where=f"the feature store {str(folder)!r}")
    return FeatureManifest(
        **{**values, "spec": FeatureSpec.from_json(values["spec"]), "shards": tuple(values["shards"])}
    )


def row_hash(row_id: str, input_ids_T: Tensor, generated_mask_T: Tensor) -> int:
    """Return a 63-bit hash of what a row is: its id, its tokens and which of them the target generated."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (row_id.encode(), _int64(input_ids_T), _int64(generated_mask_T)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big") >> 1


def data_fingerprint(examples: Iterable[tuple[str, TokenizedExample]]) -> str:
    """Return a short hash of all rows in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for row_id, example in examples:
        digest.update(row_hash(row_id, example.input_ids_T, example.generated_mask_T).to_bytes(8, "big"))
    return digest.hexdigest()


def _int64(values: Tensor) -> bytes:
    return values.long().numpy().tobytes()
