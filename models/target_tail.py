"""The end of a target alone, its final norm and output head: what turns a pre-norm state into logits.

An engine hands out the last layer's state before the final norm. To store it as the library would, and to rebuild the
teacher from it, these few tensors are read from the target's files; the rest is never loaded.
"""

import json
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.hub import cached_file

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.target_head import TargetHead

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class TargetTail:
    """The final norm and the output head of a target, in one dtype on the CPU."""

    def __init__(self, name: str, *, dtype: torch.dtype) -> None:
        """Raise UserError where the target's files do not hold the tensors under their usual names."""
        folder = resolve_model(name)
        self.config = AutoConfig.from_pretrained(folder).get_text_config()
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.config)
        decoder = model.get_decoder()
        found = next((n for n in FINAL_NORMS if isinstance(getattr(decoder, n, None), nn.Module)), None)
        if found is None:
            raise UserError(
                f"cannot find the final norm of a {self.config.model_type} target (looked for "
                f"{', '.join(FINAL_NORMS)}); extract with extract.backend: hf."
            )
        names: dict[int, list[str]] = {}
        for key, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(key)  # a tied matrix has two names, its file one of them
        files = _files(folder)
        self.norm: Any = getattr(decoder, found)
        for module in (self.norm, model.get_output_embeddings()):
            for key, parameter in list(module.named_parameters(recurse=False)):
                tensor = _read(files, names[id(parameter)], dtype)
                setattr(module, key, nn.Parameter(tensor, requires_grad=False))
        self.head = TargetHead.of(model)

    @torch.inference_mode()
    def final_state(self, state: Tensor) -> Tensor:
        """Return the post-norm state of a pre-norm one."""
        return self.norm(state)


def _files(folder: str) -> dict[str, str]:
    """Return the safetensors file of every tensor of a checkpoint."""
    index = cached_file(folder, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        with open(index, encoding="utf-8") as file:  # noqa: PTH123 - the library returns a string
            return {key: str(cached_file(folder, name)) for key, name in json.load(file)["weight_map"].items()}
    single = cached_file(folder, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise UserError(f"target {folder!r} has no {SINGLE}; extract.backend vllm reads its final norm and head there.")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _read(files: dict[str, str], wanted: list[str], dtype: torch.dtype) -> Tensor:
    """Return the first of the wanted tensors that a checkpoint has, under its name or behind a longer prefix."""
    for name in wanted:
        key = next((key for key in files if key == name or key.endswith(f".{name}")), None)
        if key is not None:
            with safe_open(files[key], framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
            if not tensor.is_floating_point():
                raise UserError(f"{key} is stored quantised ({tensor.dtype}); extract with extract.backend: hf.")
            return tensor.to(dtype)
    raise UserError(f"the target's files hold none of {', '.join(wanted)}; extract with extract.backend: hf.")
