"""A target of which only some parts are loaded: what training a head borrows is a hundredth of a large model.

The model is built from its config on the meta device; the modules asked for are then filled from the target's own
files, tensor by tensor. Its buffers, such as rotary frequencies, are made for real; the other parameters stay without
memory.
"""

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.models.target_files import read_tensor, tensor_files
from eyas.models.target_loading import find_decoder

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def borrowed_parts(name: str, *, dtype: torch.dtype, device: str = "cpu", last_layer: bool = True) -> Target:
    """Return a target with its embedding, final norm and output head alone, and its last layer where asked for.

    Nothing can be run on it. Raises UserError where the target's files do not hold these tensors, plain, under their
    usual names.
    """
    model = empty_model(name, dtype=dtype)
    decoder, layers = find_decoder(model)
    parts = [model.get_input_embeddings(), final_norm(decoder), model.get_output_embeddings()]
    fill(model, [*parts, *([layers[-1]] if last_layer else [])], resolve_model(name), dtype=dtype, device=device)
    for module in (*parts, getattr(decoder, "rotary_emb", None)):
        if module is not None:
            module.to(device)  # the buffers, which were made on the CPU
    return Target(model)


def input_embedding(name: str, *, dtype: torch.dtype) -> Any:
    """Return a target's embedding module alone, filled: called, it scales its table where the family does so there."""
    model = empty_model(name, dtype=dtype)
    embedding: Any = model.get_input_embeddings()
    fill(model, [embedding], resolve_model(name), dtype=dtype)
    return embedding


@torch.no_grad()
def input_embeddings(name: str, *, dtype: torch.dtype) -> Tensor:
    """Return what a target's embedding module makes of each of its tokens, [V, D]."""
    embedding = input_embedding(name, dtype=dtype)
    given_VD: Tensor = embedding(torch.arange(embedding.num_embeddings))
    return given_VD


def empty_model(name: str, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a target's text model without the memory of its parameters; raises UserError where there is none alone."""
    whole = AutoConfig.from_pretrained(resolve_model(name))
    config = whole.get_text_config()
    tied = config.tie_word_embeddings or whole.tie_word_embeddings
    config.tie_word_embeddings = False  # what is tied is found in the files, and then shared (`fill`)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot build a {config.model_type} text model without its weights: {error}") from error
    model.config.tie_word_embeddings = tied
    return model


def final_norm(decoder: nn.Module) -> Any:
    """Return a decoder's final norm; raises UserError when it has none under a usual name."""
    for name in FINAL_NORMS:
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise UserError(f"cannot find the final norm of a {type(decoder).__name__} (looked for {', '.join(FINAL_NORMS)}).")


def fill(
    model: PreTrainedModel, modules: list[nn.Module], folder: str, *, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Give the parameters of some modules of an empty model their values from the model's files.

    A tied output head that has no tensor of its own shares the embedding's.
    """
    names: dict[int, tuple[str, ...]] = {id(parameter): (key,) for key, parameter in model.named_parameters()}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.tie_word_embeddings:
        names[id(output.weight)] += names[id(embedding.weight)]
    files = tensor_files(folder)
    filled: dict[str, nn.Parameter] = {}
    for part in (part for module in modules for part in module.modules()):
        for key, parameter in list(part.named_parameters(recurse=False)):
            found, tensor = read_tensor(files, names[id(parameter)])
            if tensor.dtype not in PLAIN or tensor.shape != parameter.shape:
                raise UserError(
                    f"{found} is stored quantised or packed ({tensor.dtype} {tuple(tensor.shape)} instead of "
                    f"{tuple(parameter.shape)})."
                )
            if found not in filled:
                filled[found] = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
            setattr(part, key, filled[found])
