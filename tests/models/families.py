"""Tiny random targets of many families, by model type; `SERVED` are those the bundled runtime and heads work for."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_SHAPE: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SERVED: dict[str, dict[str, object]] = {
    "llama": {"head_dim": 16},
    "llama tied": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "gemma": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    # Windows, alone and beside full attention; texts of the tests are longer than 6 tokens.
    "mistral window": {"head_dim": 16, "sliding_window": 6},
    "phi3 window": {"sliding_window": 6},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Families whose output heads, norms or positions are of their own, for which heads or caches are refused.
ODD_HEADS: dict[str, dict[str, object]] = {
    "cohere": {"logit_scale": 0.25},
    "glm4": {"head_dim": 16},
    "phi": {"hidden_size": 64},
    "gpt2": {"n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 256},
}


def family_config(name: str, **fields: object) -> PreTrainedConfig:
    """Return the tiny config of a family; `fields` win over the family's own."""
    own = {**SERVED, **ODD_HEADS}[name]
    shape = {k: v for k, v in _SHAPE.items() if name != "gpt2" or not k.startswith(("num_", "hidden", "inter", "max"))}
    return AutoConfig.for_model(name.split()[0], **{**shape, **own, **fields})


def family_model(name: str, **fields: object) -> PreTrainedModel:
    """Return a tiny random model of a family in fp32; norms and biases are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(name, **fields)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model
