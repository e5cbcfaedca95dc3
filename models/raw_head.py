"""A head as somebody published it: whatever weights and config lie in the folder, with names and config made plain.

Known layouts: the original EAGLE code (pytorch_model.bin or safetensors, `midlayer.*`, EAGLE-1 `layers.0.*`), SpecForge
and SGLang (`midlayer.*`), NVIDIA Model-Optimizer (`layers.0.*`, d2t without t2d), speculators (`layers.0.*`, the config
of the layer nested), and eyas' own exports of each. Nothing is resolved here, only renamed: `import_head` asks.
"""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.models.errors import UserError

PREFIXES = ("draft_model.", "model.", "eagle_module.")
DROPPED = ("rotary_emb.inv_freq", "verifier_lm_head.", "verifier_norm.")  # recomputed, or the target's own


@dataclass(frozen=True)
class RawHead:
    """A published head under native tensor names: `fields` are flat, `notes` say what was renamed or dropped."""

    method: str
    layout: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    card: dict[str, Any]
    notes: tuple[str, ...]
    where: str


def read_raw_head(folder: Path) -> RawHead:
    """Return a published head; raises UserError when the folder holds no weights or no head known here."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        card_path = folder / "eyas.json"
        card = json.loads(card_path.read_text(encoding="utf-8")) if card_path.is_file() else {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read the config of a head from {str(folder)!r}: {error}.") from error
    found, file_name = _read_weights(folder)
    tensors, notes = _plain_names(found)
    method = _method(tensors, folder)
    speculators = "speculators_config" in config or "speculators_model_type" in config
    layered = any(name.startswith("layers.0.") for name in found)
    layout = "speculators" if speculators else "layers.0" if layered and method == "eagle3" else "midlayer"
    if method == "eagle3":
        tensors = {
            "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
            for name, tensor in tensors.items()
        }
    notes = [f"read {file_name}, an {method} head in the {layout} layout", *notes]
    return RawHead(method, layout, _flat(config) if speculators else config, tensors, card, tuple(notes), str(folder))


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of model.safetensors (or its shards) or pytorch_model.bin, the latter without running code."""
    shards = sorted(folder.glob("model*.safetensors"))
    binary = folder / "pytorch_model.bin"
    try:
        if shards:
            tensors: dict[str, Tensor] = {}
            for shard in shards:
                with safe_open(shard, framework="pt") as file:
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, ", ".join(shard.name for shard in shards)
        if binary.is_file():
            loaded = torch.load(binary, map_location="cpu", weights_only=True)
            if isinstance(loaded, dict) and all(isinstance(value, Tensor) for value in loaded.values()):
                return loaded, binary.name
            raise UserError(f"{binary} is no plain dictionary of tensors; save the head's state_dict and import that.")
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise UserError(
            f"cannot read the weights in {str(folder)!r}: {str(error).splitlines()[0]}; weights are loaded without "
            "running code, so a file that holds more than tensors is refused."
        ) from error
    raise UserError(f"{str(folder)!r} holds neither model.safetensors nor pytorch_model.bin.")


def _plain_names(found: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    tensors: dict[str, Tensor] = {}
    notes = []
    for name, tensor in found.items():
        plain = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
        if any(part in plain for part in DROPPED):
            notes.append(f"left out {name}, which the head does not own")
            continue
        if plain in tensors:
            raise UserError(f"tensor {plain} is there twice, once as {name}; remove one of them.")
        tensors[plain] = tensor
    return tensors, notes


def _method(tensors: dict[str, Tensor], folder: Path) -> str:
    names = tensors.keys()
    if "fc.weight" in names and any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle1"
    raise UserError(
        f"{str(folder)!r} holds no EAGLE head: it needs fc.weight and midlayer.* or layers.0.* tensors, and has "
        f"{', '.join(sorted(names)[:6])}."
    )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a speculators config with the layer's fields at the top level, where the head's own win."""
    flat = {**config.get("transformer_layer_config", {})}
    flat |= {name: value for name, value in config.items() if name not in ("transformer_layer_config", "architectures")}
    return flat
