"""Loading a target from disk or Hub, and finding the parts of it that eyas needs by structure, not by family.

The decoder is the module that holds the input embedding and, as a direct child, a list of as many layers as the text
config says: so nested wrappers (`model.language_model.*`, `text_config`) are seen through, and nothing is guessed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError

DeviceMap = str | dict[str, int | str] | None


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    device_map: DeviceMap = None,
    quantization: str = "none",
    attention: str = "auto",
) -> PreTrainedModel:
    """Return a frozen-to-be model of a bundled name, a model folder or a Hub id.

    A checkpoint that is quantised already is loaded as its own config says; `quantization` is for plain ones, and
    leaves the output head as it is. With a `device_map` modules are placed by it, otherwise all go to `device`.
    """
    folder = resolve_model(name)
    try:
        config = AutoConfig.from_pretrained(folder)
        model: Any = _loader(config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=None if attention == "auto" else attention,
            device_map=device_map,
            quantization_config=_quantization_config(name, config, quantization),
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot load target {name!r} as a causal language model: {error}") from error
    return model if device_map is not None else model.to(device)


def _loader(config: PreTrainedConfig) -> Any:
    """Return the auto class of a config: causal language models, and those with pictures that hold one."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def takes_pictures(name: str) -> bool:
    """Return whether a target has a part that reads pictures beside the one that heads are trained for."""
    return hasattr(AutoConfig.from_pretrained(resolve_model(name)), "vision_config")


def _quantization_config(name: str, config: PreTrainedConfig, quantization: str) -> Any:
    if quantization == "none":
        return None
    own = own_quantization(config)
    if own != "none":
        raise UserError(
            f"target {name!r} is quantised already ({own}); set target.quantization to none to use it as it is."
        )
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError:
        raise UserError(
            "target.quantization int8 needs torchao: pip install 'eyas[quantization]', or set it to none."
        ) from None
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def own_quantization(config: PreTrainedConfig) -> str:
    """Return the method a checkpoint's config says it is quantised by, or "none"."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return "none"
    return str(own.get("quant_method", "unknown") if isinstance(own, dict) else own.quant_method)


def quantization_of(name: str, asked: str) -> str:
    """Return how a target's weights are quantised: as asked for, else as its checkpoint is."""
    if asked != "none":
        return asked
    try:
        return own_quantization(AutoConfig.from_pretrained(resolve_model(name)))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the config of target {name!r}: {error}") from None


def find_decoder(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """Return the text decoder of a model and the list of its layers.

    Raises UserError naming the lists of layers that were found when none or several fit.
    """
    count, embedding = model.config.get_text_config().num_hidden_layers, model.get_input_embeddings()
    fitting = [
        (module, child)
        for module in model.modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == count and _holds(module, embedding)
    ]
    if len(fitting) != 1:
        lists = [f"{name} ({len(m)})" for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        raise UserError(
            f"cannot tell the {count} decoder layers of a {model.config.model_type} model: {len(fitting)} lists of "
            f"that many stand beside its input embedding. Its lists are {', '.join(lists) or 'none'}."
        )
    return fitting[0]


def _holds(module: nn.Module, wanted: nn.Module) -> bool:
    return any(part is wanted for part in module.modules())


def plain_weight(layer: Any) -> Tensor:
    """Return the weight of a linear layer as plain numbers, undoing a quantisation that can be undone.

    Raises UserError for one that cannot: its numbers mean nothing without scales that are kept elsewhere.
    """
    weight = getattr(layer, "weight", None)
    if weight is None:
        raise UserError(f"a layer of this target ({type(layer).__name__}) keeps its weight in a packed form.")
    weight = weight.detach()
    if type(weight) is not Tensor and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"a layer of this target ({type(layer).__name__}) keeps its weight as {weight.dtype}.")
    return weight
