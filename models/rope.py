"""Rotary position embedding of the draft head, computed by transformers from the target's own RoPE parameters.

The head must rotate exactly as its target does, so the frequencies come from the library's table of RoPE types; a type
that the library does not know is an error, never a fall-back to the default.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.models.errors import UserError, nearest
from eyas.models.head_config import HeadConfig


class HeadRope(LlamaRotaryEmbedding):
    """The library's rotary module whose frequencies stay in fp32 when the head is cast.

    Frequencies rounded to bf16 are off by up to 0.4 %: a whole turn and more at position 5000.
    """

    @staticmethod
    def compute_default_rope_parameters(config: LlamaConfig, **_: Any) -> tuple[Tensor, float]:
        """Return plain frequencies of the part of each head that is rotated, which Llama's own take for the whole."""
        parameters: Any = config.rope_parameters
        assert config.head_dim is not None
        rotated = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HeadRope":
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]


def build_rope(config: HeadConfig) -> HeadRope:
    """Return the rotary module of a head; called with (x, position_ids_BT) it gives cos and sin of [B, T, head_dim]."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    known = ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in known:
        raise UserError(f"unknown RoPE type {kind!r}; known types are {', '.join(known)}.{nearest(str(kind), known)}")
    return HeadRope(
        LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,  # the library insists that heads divide it
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(parameters),
        )
    )


def rotate(x_BHTd: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """Return `x` rotated pairwise (first half against second half of the first r dims, as Llama does); the rest stays.

    r is the head dim, or less where the target rotates a part of it.
    """
    r = cos_BTr.shape[-1]
    part = x_BHTd[..., :r]
    first, second = part.chunk(2, dim=-1)
    turned = part * cos_BTr.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin_BTr.unsqueeze(1)
    return turned if r == x_BHTd.shape[-1] else torch.cat((turned, x_BHTd[..., r:]), dim=-1)


def check_same_rope(head_rope: nn.Module, target_model: Any, config: HeadConfig) -> None:
    """Raise UserError when the head's rotary angles differ from the target's at positions 0, 63, 5000 or the last."""
    target_rope = getattr(target_model, "rotary_emb", None)
    if target_rope is None:
        return
    last = config.max_position_embeddings - 1
    positions = torch.tensor([[p for p in (0, 63, 5000) if p < last] + [last]])
    probe = torch.zeros(1, 1, dtype=torch.float32)
    ours = head_rope(probe, positions)
    by_type = {"layer_type": "full_attention"} if "layer_type" in signature(target_rope.forward).parameters else {}
    device = next(target_model.parameters()).device
    theirs = target_rope(probe.to(device), positions.to(device), **by_type)
    for name, a, b in zip(("cos", "sin"), ours, theirs, strict=True):
        if 2 * b.shape[-1] == a.shape[-1]:  # GPT-OSS hands out each angle once, for both halves it turns
            b = torch.cat((b, b), dim=-1)
        if a.shape != b.shape or not torch.allclose(a, b.float().cpu(), atol=1e-5):
            raise UserError(
                f"the head's rotary {name} differs from the target's ({config.rope_parameters}); this target's RoPE "
                "cannot be reproduced from its config, so a head for it would draft at wrong positions."
            )
