"""A target of which only some parts are loaded: what training a head borrows is a hundredth of a large model.

The model is built from its config on the meta device; the modules asked for are then filled from the target's own
files, tensor by tensor. Its buffers, such as rotary frequencies, are made for real; the other parameters stay without
memory.
"""

import json
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.models.target_loading import find_decoder

TEXT_PART = "language_model."  # in the names of models with pictures
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def borrowed_parts(name: str, *, dtype: torch.dtype, device: str = "cpu", last_layer: bool = True) -> Target:
    """Return a target with its embedding, final norm and output head alone, and its last layer where asked for.

    Nothing can be run on it. Raises UserError where the target's files do not hold these tensors, plain, under their
    usual names.
    """
    model = empty_model(name)
    decoder, layers = find_decoder(model)
    parts = [model.get_input_embeddings(), final_norm(decoder), model.get_output_embeddings()]
    fill(model, [*parts, *([layers[-1]] if last_layer else [])], resolve_model(name), dtype=dtype, device=device)
    for module in (*parts, getattr(decoder, "rotary_emb", None)):
        if module is not None:
            module.to(device)  # the buffers, which were made on the CPU
    return Target(model)


@torch.no_grad()
def input_embeddings(name: str, *, dtype: torch.dtype) -> Tensor:
    """Return what a target's layers are given for each of its tokens, [V, D]: scaled where the family scales it."""
    model = empty_model(name)
    embedding: Any = model.get_input_embeddings()
    fill(model, [embedding], resolve_model(name), dtype=dtype)
    return embedding(torch.arange(embedding.num_embeddings))


def empty_model(name: str) -> PreTrainedModel:
    """Return a target's text model without the memory of its parameters; raises UserError where there is none alone."""
    config = AutoConfig.from_pretrained(resolve_model(name)).get_text_config()
    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot build a {config.model_type} text model without its weights: {error}") from error


def final_norm(decoder: nn.Module) -> Any:
    """Return a decoder's final norm; raises UserError when it has none under a usual name."""
    for name in FINAL_NORMS:
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise UserError(f"cannot find the final norm of a {type(decoder).__name__} (looked for {', '.join(FINAL_NORMS)}).")


def fill(
    model: PreTrainedModel, modules: list[nn.Module], folder: str, *, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Give the parameters of some modules of an empty model their values from the model's files."""
    names: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(key)  # a tied matrix has two names, its file one of them
    files = _files(folder)
    filled: dict[int, nn.Parameter] = {}
    for module in modules:
        for part in module.modules():
            for key, parameter in list(part.named_parameters(recurse=False)):
                if id(parameter) not in filled:
                    tensor = _read(files, names[id(parameter)], tuple(parameter.shape))
                    filled[id(parameter)] = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
                setattr(part, key, filled[id(parameter)])


def _files(folder: str) -> dict[str, str]:
    """Return the safetensors file of every tensor of a checkpoint."""
    index = cached_file(folder, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        with open(index, encoding="utf-8") as file:  # noqa: PTH123 - the library returns a string
            return {key: str(cached_file(folder, name)) for key, name in json.load(file)["weight_map"].items()}
    single = cached_file(folder, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise UserError(f"target {folder!r} has no {SINGLE}.")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _read(files: dict[str, str], wanted: list[str], shape: tuple[int, ...]) -> Tensor:
    """Return the first of the wanted tensors that a checkpoint has: under its name, behind a longer prefix, or in the
    part of a model with pictures that writes text.
    """
    plain = {key.replace(TEXT_PART, ""): key for key in files}
    for name in wanted:
        key = next((key for short, key in plain.items() if short == name or short.endswith(f".{name}")), None)
        if key is not None:
            with safe_open(files[key], framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
            if tensor.dtype not in PLAIN or tuple(tensor.shape) != shape:
                raise UserError(
                    f"{key} is stored quantised or packed ({tensor.dtype} {tuple(tensor.shape)}, not {shape})."
                )
            return tensor
    raise UserError(f"the target's files hold none of {', '.join(wanted)}.")
