"""How other programs read a head's folder, written from their documented rules: the proof of an export without them.

Each reader sees the folder alone, applies its program's rules with all their silences (unknown tensors skipped, missing
ones left random, layers fixed), and drafts with arithmetic of its own. Nothing of `eyas.models` is used.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass
class Reader:
    """A head as one program understands it."""

    config: dict[str, Any]
    weights: Weights
    layers: tuple[int, ...]
    target_ids_U: Tensor
    flags: dict[str, bool]
    skips_fc_at_equal_width: bool = False

    def fuse(self, aux_TF: Tensor) -> Tensor:
        D = self.config["hidden_size"]
        if self.skips_fc_at_equal_width and aux_TF.shape[-1] == D:
            return aux_TF
        if self.flags.get("norm_before_fc"):
            aux_TF = self._norm(aux_TF, "input_norm")
        if self.flags.get("fc_norm"):
            chunks = aux_TF.chunk(len(self.layers), dim=-1)
            aux_TF = torch.cat([self._norm(chunk, f"fc_norm.{a}") for a, chunk in enumerate(chunks)], dim=-1)
        return aux_TF @ self.weights["fc.weight"].T

    def draft(self, aux_TF: Tensor, embeds_TD: Tensor, drafted_KD: Tensor) -> list[Tensor]:
        """Return target-vocabulary log-probabilities after the T committed slots and after each of K drafted tokens."""
        features, embeds, found = self.fuse(aux_TF), embeds_TD, []
        for number in range(len(drafted_KD) + 1):
            out = self._layer(features, embeds)
            normed = self._norm(out, "norm")
            found.append(self._to_target(normed[-1] @ self.weights["lm_head.weight"].T))
            if number < len(drafted_KD):
                next_feature = normed if self.flags.get("norm_output") else out
                features = torch.cat((features, next_feature[-1:]))
                embeds = torch.cat((embeds, drafted_KD[number : number + 1]))
        return found

    def _to_target(self, logits_U: Tensor) -> Tensor:
        full = torch.full((self.config["vocab_size"],), -math.inf)
        full[self.target_ids_U] = torch.log_softmax(logits_U, -1)
        return full

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def _layer(self, features_TD: Tensor, embeds_TD: Tensor) -> Tensor:
        normed = self._norm(features_TD, "midlayer.hidden_norm")
        residual = normed if self.flags.get("norm_before_residual") else features_TD
        x = torch.cat((self._norm(embeds_TD, "midlayer.input_layernorm"), normed), dim=-1)
        x = residual + attention(x, self.weights, "midlayer.", self.config)
        x = x + mlp(self._norm(x, "midlayer.post_attention_layernorm"), self.weights, "midlayer.")
        for number in range(1, self.config["num_hidden_layers"]):
            prefix = f"layers.{number}."
            x = x + attention(self._norm(x, f"{prefix}input_layernorm"), self.weights, prefix, self.config)
            x = x + mlp(self._norm(x, f"{prefix}post_attention_layernorm"), self.weights, prefix)
        return x


def attention(x_TE: Tensor, weights: Weights, prefix: str, config: dict[str, Any]) -> Tensor:
    """Causal attention over all rows, row t at RoPE position t."""
    T, d = len(x_TE), config["head_dim"]
    q, k, v = ((x_TE @ weights[f"{prefix}self_attn.{n}_proj.weight"].T).view(T, -1, d).transpose(0, 1) for n in "qkv")
    angles = torch.arange(T)[:, None] * inverse_frequencies(config)
    cos, sin = angles.cos(), angles.sin()

    def turn(y: Tensor) -> Tensor:
        a, b = y[..., : d // 2], y[..., d // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    groups = q.shape[0] // k.shape[0]
    q, k, v = turn(q), turn(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
    return out @ weights[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def inverse_frequencies(config: dict[str, Any]) -> Tensor:
    """Default, linear and llama3 frequencies, by hand."""
    scaling = config.get("rope_scaling") or {}
    exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"]
    frequencies = config["rope_theta"] ** -exponents
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif kind == "llama3":
        length = scaling["original_max_position_embeddings"]
        low, high = length / scaling["low_freq_factor"], length / scaling["high_freq_factor"]
        wave = 2 * math.pi / frequencies
        blend = (length / wave - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        between = (1 - blend) * frequencies / scaling["factor"] + blend * frequencies
        slow = torch.where(wave > low, frequencies / scaling["factor"], between)
        frequencies = torch.where(wave < high, frequencies, slow)
    elif kind != "default":
        raise ValueError(f"unknown RoPE scaling {kind}")
    return frequencies.float()


def _default_layers(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def _allocated(config: dict[str, Any], aux: int, bias: bool) -> Weights:
    """Return the parameters a program allocates before it loads: random, and they stay so when a name is not found."""
    D, M, U = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    width = aux * config.get("target_hidden_size", D)
    shapes = {
        "fc.weight": (D, width), "norm.weight": (D,), "lm_head.weight": (U, D), "input_norm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * D), "midlayer.self_attn.k_proj.weight": (kv, 2 * D),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * D), "midlayer.self_attn.o_proj.weight": (D, q),
        "midlayer.mlp.gate_proj.weight": (M, D), "midlayer.mlp.up_proj.weight": (M, D),
        "midlayer.mlp.down_proj.weight": (D, M),
        **{f"midlayer.{n}.weight": (D,) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        **{f"fc_norm.{a}.weight": (width // aux,) for a in range(aux)},
    }  # fmt: skip
    for number in range(1, config["num_hidden_layers"]):
        first = {
            name.removeprefix("midlayer."): shape for name, shape in shapes.items() if name.startswith("midlayer.")
        }
        reads = {f"self_attn.{n}_proj.weight": (first[f"self_attn.{n}_proj.weight"][0], D) for n in "qkv"}
        shapes |= {f"layers.{number}.{name}": shape for name, shape in {**first, **reads}.items()}
    assert not bias, "attention or fc biases would be allocated and left random"
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _load(allocated: Weights, found: Weights) -> Weights:
    for name, tensor in found.items():
        if name in allocated:  # anything else is skipped without a word
            assert allocated[name].shape == tensor.shape, name
            allocated[name] = tensor.float()
    return allocated


def read_sglang(folder: Path, *, target_layers: int) -> Reader:
    """SGLang: eagle_config's ids plus one; norm_before_residual does not exist; fc only where widths differ."""
    config, found = _open(folder)
    assert config["architectures"][0] == "LlamaForCausalLMEagle3"
    assert "draft_vocab_size" in config, "SGLang reads the attribute"
    assert config["tie_word_embeddings"] is False, "lm_head would be the embedding"
    nested = config.get("eagle_config", {})
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(i + 1 for i in ids) if ids else _default_layers(target_layers)
    weights = _load(_allocated(config, len(layers), config.get("bias") or config["attention_bias"]), found)
    flags = {n: bool(nested.get(n, config.get(n))) for n in ("norm_before_fc", "fc_norm", "norm_output")}
    return Reader(config, weights, layers, _target_ids(config, found), flags, skips_fc_at_equal_width=True)


def read_original(folder: Path, *, target_layers: int) -> Reader:
    """The original code: three fixed layers, no flags, embeddings of the target only without target_hidden_size."""
    config, found = _open(folder)
    assert "target_hidden_size" not in config, "the embeddings would stay random"
    scaling = config.get("rope_scaling")
    if scaling is not None:
        assert scaling.keys() == {"type", "factor"}, "rope_scaling must have two keys"
        config = {**config, "rope_theta": 10000.0}  # its scaled classes are not given the base
    weights = _load(_allocated(config, 3, bias=False), found)
    return Reader(config, weights, _default_layers(target_layers), _target_ids(config, found), {}, True)


def read_vllm(folder: Path, *, target_layers: int) -> Reader:
    """vLLM: top-level ids as they stand, midlayer.* or layers.0.*, unknown names refused, a missing lm_head unseen."""
    config, found = _open(folder)
    if "speculators_config" in config:
        verifier = config["speculators_config"]["verifier"]["name_or_path"]
        assert verifier
        own = {n: config[n] for n in ("draft_vocab_size", "target_hidden_size", "norm_before_residual")}
        rest = {n: config.get(n, False) for n in ("norm_before_fc", "fc_norm", "norm_output")}
        ids = {"eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"]}
        config = {**config["transformer_layer_config"], **own, **rest, **ids}
    found = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in found.items()}
    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(sorted(set(ids or _default_layers(target_layers))))
    allocated = _allocated(config, len(layers), bool(config.get("attention_bias")))
    unknown = found.keys() - allocated.keys() - {"d2t", "t2d"}
    assert not unknown, f"vLLM refuses {unknown}"
    flags = {n: bool(config.get(n)) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    return Reader(config, _load(allocated, found), layers, _target_ids(config, found), flags)


READERS = {"vllm": read_vllm, "sglang": read_sglang, "eagle": read_original, "speculators": read_vllm}


def draft_eagle1(folder: Path, program: str, features_TD: Tensor, embeds_TD: Tensor, output_VD: Tensor) -> Tensor:
    """Return logits_TV of an EAGLE-1 folder as vLLM or SGLang read it: fc with a bias in SGLang, without in vLLM."""
    config, found = _open(folder)
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} & found.keys()
    assert config["bias"] is False
    names = config["architectures"]
    assert (names[0] if program == "sglang" else names[-1]) in ("LlamaForCausalLMEagle", "LlamaForCausalLM")
    found = {name: tensor.float() for name, tensor in found.items()}
    bias = torch.zeros(())
    if program == "sglang":
        bias = found.get("fc.bias", torch.randn(config["hidden_size"]))
    x = torch.cat((embeds_TD, features_TD), dim=-1) @ found["fc.weight"].T + bias
    x = x + attention(x, found, "layers.0.", config)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
    x = x + mlp(x * scale * found["layers.0.post_attention_layernorm.weight"], found, "layers.0.")
    return x @ output_VD.T


def _open(folder: Path) -> tuple[dict[str, Any], Weights]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def _target_ids(config: dict[str, Any], found: Weights) -> Tensor:
    """Offsets; a missing map means the first ids, without a word."""
    draft_ids = torch.arange(config["draft_vocab_size"])
    return draft_ids + found["d2t"] if "d2t" in found else draft_ids
