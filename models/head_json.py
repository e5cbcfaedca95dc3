"""config.json of a native checkpoint: the engines' names, with what they count differently written for each of them."""

from dataclasses import asdict
from typing import Any

import torch

from eyas.models.head_config import HeadConfig
from eyas.models.head_files import METHODS
from eyas.models.head_layout import BORROWED, FLAGS, PLAIN_FIELDS, SCALE_FIELD, TOKEN_FIELDS


def head_config_json(config: HeadConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of a head."""
    return native_json(config.kind, asdict(config), dtype=str(dtype).removeprefix("torch."))


def native_json(method: str, neutral: dict[str, Any], *, dtype: str) -> dict[str, Any]:
    """Return config.json of a head whose fields are named and numbered as in HeadConfig.

    Nothing in it is null, and nothing is taken over of the target's biases, ties or quantisation.
    """
    fields = {
        "architectures": _ARCHITECTURES[method],
        "model_type": "llama",
        "num_hidden_layers": neutral["num_layers"],
        **{name: neutral[name] for name in PLAIN_FIELDS if method == "eagle3" or name not in BORROWED},
        **_rope(neutral["rope_parameters"]),
        "tie_word_embeddings": False,
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **{name: neutral[name] for name in TOKEN_FIELDS},
        "target_num_hidden_layers": neutral["target_num_layers"],
        SCALE_FIELD: None if neutral.get("embedding_scale", 1.0) == 1 else neutral["embedding_scale"],
        **(_aux_fields(neutral) if method == "eagle3" else {}),
    }
    return {name: value for name, value in fields.items() if value is not None}


# vLLM and SGLang each take the first name they know.
_ARCHITECTURES = {"eagle3": [METHODS["eagle3"][0]], "eagle1": [METHODS["eagle1"][0], "LlamaForCausalLM"]}


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    rope = {name: value for name, value in parameters.items() if value is not None}
    theta, kind = rope.pop("rope_theta", None), rope.pop("rope_type", "default")
    return {"rope_theta": theta, **({} if kind == "default" else {"rope_scaling": {"rope_type": kind, **rope}})}


def _aux_fields(neutral: dict[str, Any]) -> dict[str, Any]:
    """Return layers and norm flags in both places: vLLM reads the top level, SGLang eagle_config, one layer less."""
    flags = {name: neutral[name] for name in FLAGS}
    layers = neutral["aux_layers"]
    return {
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in layers],
            **flags,
        },
        **flags,
    }
