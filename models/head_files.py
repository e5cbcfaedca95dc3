"""A draft head as files: config.json, model.safetensors and eyas.json, read once, written whole or not at all.

Everything that judges, translates or loads a head starts from a `HeadFiles`; what is written goes to a temporary folder
beside its final name, is read back there, and is renamed only then.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.models.errors import UserError
from eyas.models.head_config import Kind

SCHEMA = 2
READABLE_SCHEMAS = (1, 2)
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "eyas.json"


@dataclass(frozen=True)
class HeadFiles:
    """What a head's folder holds: `fields` of config.json, `tensors`, and `card`, the content of eyas.json (or {})."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    card: dict[str, Any] = field(default_factory=dict)
    where: str = "this head"

    @property
    def method(self) -> Kind:
        """ "eagle3" or "eagle1", by the architecture strings; raises UserError for anything else."""
        return head_method(self.fields, where=self.where)


METHODS: dict[Kind, tuple[str, str]] = {
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    "eagle1": ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"),
}


def head_method(fields: dict[str, Any], *, where: str) -> Kind:
    """Return which kind of head a config.json describes; raises UserError when its architecture is not one of ours."""
    given = fields.get("architectures")
    for method, names in METHODS.items():
        if isinstance(given, list) and given and given[0] in names:
            return method
    known = ", ".join(names[0] for names in METHODS.values())
    raise UserError(
        f"{where}: architectures is {given!r}, which is no draft head that eyas loads ({known}); bring a foreign head "
        "in with eyas import."
    )


def read_head_files(folder: Path) -> HeadFiles:
    """Return the files of a head; raises UserError when one is missing, torn, or of a schema not known here."""
    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        card_path = folder / CARD
        card = json.loads(card_path.read_text(encoding="utf-8")) if card_path.is_file() else {}
    except (OSError, SafetensorError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"cannot read a head from {str(folder)!r}: {error}; name a folder written by eyas export."
        ) from error
    if not isinstance(fields, dict) or not isinstance(card, dict):
        raise UserError(f"cannot read a head from {str(folder)!r}: {CONFIG} and {CARD} must hold JSON objects.")
    if card and card.get("schema") not in READABLE_SCHEMAS:
        raise UserError(
            f"{folder}/{CARD} has schema {card.get('schema')!r}; this eyas reads "
            f"{' and '.join(map(str, READABLE_SCHEMAS))}: export the head again, or use the eyas that wrote it."
        )
    return HeadFiles(fields, tensors, card, str(folder))


def update_card(folder: Path, fields: dict[str, Any]) -> None:
    """Set some fields of a head's eyas.json, which is replaced whole."""
    path = folder / CARD
    card = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    unfinished = folder / f".{CARD}.{os.getpid()}.tmp"
    unfinished.write_text(json.dumps({**card, **fields, "schema": SCHEMA}, indent=2) + "\n", encoding="utf-8")
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_head_files(
    folder: Path,
    files: HeadFiles,
    *,
    check: Callable[[Path], object],
    texts: dict[str, str] | None = None,
) -> None:
    """Write a head's folder, replacing what is there; `check` reads the temporary folder back and may refuse it."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(files.tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        documents = {
            CONFIG: json.dumps(files.fields, indent=2),
            CARD: json.dumps({**files.card, "schema": SCHEMA}, indent=2),
            **(texts or {}),
        }
        for name, text in documents.items():
            (temporary / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        check(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    retired = temporary.with_suffix(".old")
    if folder.exists():
        folder.rename(retired)  # a kill while the old files are deleted must not leave half of them under the name
    temporary.rename(folder)
    shutil.rmtree(retired, ignore_errors=True)
