"""How large a target is, read from its config alone: parameters counted on the meta device, no weight is loaded."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from eyas.models.errors import UserError
from eyas.models.head_config import EXPERT_COUNTS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TargetSize:
    """Counts of one target. `active` parameters take part in a token's forward pass: all but the experts it is not
    routed to and an input embedding that is not also the output head. `mlp_width` is what one token passes through.
    """

    parameters: int
    active: int
    vocab_size: int
    hidden_size: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def embedding(self) -> int:
        """Numbers in one vocabulary-by-hidden matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_per_token(self) -> int:
        """Numbers that the KV cache keeps for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def target_size(config: PreTrainedConfig) -> TargetSize:
    """Return the size of a target from its config; raises UserError for a family transformers cannot build."""
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot count the parameters of a {text.model_type} target: {error}") from error
    experts = next((count for name in EXPERT_COUNTS if (count := getattr(text, name, None))), 0)
    routed = getattr(text, "num_experts_per_tok", None) or experts
    total = active = 0.0
    for name, parameter in model.named_parameters():  # a tied matrix is listed once
        total += parameter.numel()
        active += parameter.numel() * (routed / experts if experts and ".experts." in name else 1.0)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not output:
        active -= embedding.numel()
    width = getattr(text, "moe_intermediate_size", None) if experts else None
    width = width or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    heads = text.num_attention_heads
    return TargetSize(
        parameters=int(total),
        active=int(active),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        mlp_width=width * (routed if experts else 1),
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
