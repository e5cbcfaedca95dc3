"""Single tensors of a target's checkpoint, read from its safetensors files without loading the model."""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from eyas.models.errors import UserError

TEXT_PART = "language_model."  # in the names of models with pictures
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def tensor_files(folder: str) -> dict[str, str]:
    """Return the file of every tensor of a checkpoint (a folder or a Hub id); raises UserError when it has none."""
    index = cached_file(folder, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        named = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        return {key: str(cached_file(folder, name)) for key, name in named.items()}
    single = cached_file(folder, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise UserError(f"target {folder!r} has no {SINGLE}.")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def read_tensor(files: dict[str, str], wanted: tuple[str, ...]) -> tuple[str, Tensor]:
    """Return the first of the wanted tensors that a checkpoint has, as stored, and its name there.

    It may stand behind a longer prefix, or in the part of a model with pictures that writes text. Raises UserError when
    there is none of them.
    """
    plain = {key.replace(TEXT_PART, ""): key for key in files}
    for name in wanted:
        key = next((key for short, key in plain.items() if short == name or short.endswith(f".{name}")), None)
        if key is not None:
            with safe_open(files[key], framework="pt") as file:
                return key, file.get_tensor(key)
    raise UserError(f"the target's files hold none of {', '.join(wanted)}.")
