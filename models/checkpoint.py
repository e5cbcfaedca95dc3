"""The head's checkpoint: one folder that vLLM, SGLang, the original EAGLE code and eyas all load.

config.json carries the aux layers in both numberings (top level: vLLM's, equal to the neutral index; eagle_config:
SGLang's, one less) and the norm flags in both places. model.safetensors carries exactly the tensors the engines read;
d2t and t2d are there iff the vocabulary is reduced. eyas.json carries what the engines do not need: fingerprints, the
template, measured numbers. Saving and loading are strict both ways, and nothing half-written gets a final name.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas.models.draft_head import DraftHead
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig
from eyas.models.heads import new_head

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SCHEMA = 1


def head_config_json(config: HeadConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of a head: the engines' names and numberings."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta", None)
    kind = rope.pop("rope_type", "default")
    flags = {name: getattr(config, name) for name in FLAGS}
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"] if config.kind == "eagle3" else ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "num_aux_hidden_states": len(config.aux_layers),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in config.aux_layers],
            **flags,
        },
        **flags,
    }
    if kind != "default":
        fields["rope_scaling"] = {
            "rope_type": kind,
            **{name: value for name, value in rope.items() if value is not None},
        }
    return {name: value for name, value in fields.items() if value is not None}


def head_config_from_json(fields: dict[str, Any], *, where: str) -> HeadConfig:
    """Return the HeadConfig of a config.json written by `head_config_json`; raises UserError naming what is missing."""
    nested = fields.get("eagle_config", {})
    for name in FLAGS:
        if name in nested and nested[name] != fields.get(name, False):
            raise UserError(
                f"{where}: {name} is {fields.get(name)} at the top level and {nested[name]} in eagle_config."
            )
    try:
        rope = dict(fields.get("rope_scaling") or {"rope_type": "default"})
        values: dict[str, Any] = {
            **{name: fields[name] for name in _PLAIN_FIELDS},
            "rope_parameters": {"rope_theta": fields["rope_theta"], **rope},
            "target_num_layers": fields["target_num_hidden_layers"],
            "aux_layers": tuple(fields["eagle_aux_hidden_state_layer_ids"]),
            **{name: fields.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **{name: fields.get(name, False) for name in FLAGS},
            "kind": "eagle1" if "LlamaForCausalLMEagle" in fields["architectures"] else "eagle3",
        }
        return HeadConfig(**values)
    except KeyError as missing:
        raise UserError(f"{where} has no {missing}: not a head written by eyas, or an older layout.") from None


_PLAIN_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
)


def save_head(
    head: DraftHead, folder: Path, *, metadata: dict[str, Any], dtype: torch.dtype, files: dict[str, str] | None = None
) -> None:
    """Write a head checkpoint to `folder`, replacing what is there, through a temporary folder and a rename.

    `metadata` goes to eyas.json, `files` are extra text files (launch lines, README).
    """
    check_map(head)
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    texts = {
        "config.json": json.dumps(head_config_json(head.config, dtype=dtype), indent=2),
        "eyas.json": json.dumps({"schema": SCHEMA, "head": asdict(head.config), **metadata}, indent=2),
        **(files or {}),
    }
    for name, text in texts.items():
        (temporary / name).write_text(text + "\n", encoding="utf-8")
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    load_head(temporary, dtype=dtype)
    retired = temporary.with_suffix(".old")
    if folder.exists():
        folder.rename(retired)  # a kill while the old files are deleted must not leave half of them under the name
    temporary.rename(folder)
    shutil.rmtree(retired, ignore_errors=True)


def load_head(folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> DraftHead:
    """Return the head of a checkpoint folder; raises UserError on any missing, extra or misshapen tensor."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UserError(
            f"cannot read a head from {str(folder)!r}: {error}; name a folder written by eyas export."
        ) from error
    head = new_head(head_config_from_json(fields, where=f"{folder}/config.json"))
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [
            f"{k} {found[k]} instead of {expected[k]}"
            for k in expected.keys() & found.keys()
            if expected[k] != found[k]
        ]
        raise UserError(f"{folder}: tensors missing {missing}, unknown {extra}, of wrong shape {wrong}.")
    head.load_state_dict(tensors)
    check_map(head)
    return head.to(device=device, dtype=dtype).eval()


def check_map(head: DraftHead) -> None:
    """Raise UserError unless the head's vocabulary map is sorted, in range, filled, and d2t agrees with t2d."""
    if head.config.full_vocabulary:
        return
    d2t_U, t2d_V = head.d2t.cpu(), head.t2d.cpu()
    if not bool(d2t_U.any()) and bool(t2d_V[: len(d2t_U)].all()) and int(t2d_V.sum()) == len(d2t_U):
        return  # filled: the draft vocabulary is the first ids, whose offsets are all zero
    vocabulary = DraftVocabulary.from_d2t(d2t_U, head.config.vocab_size)
    if not torch.equal(vocabulary.t2d_V, t2d_V):
        raise UserError("d2t and t2d name different tokens: the engines would read different vocabularies.")
