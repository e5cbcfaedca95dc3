"""Initialise a head from its target: the last block's weights, its head rows, fc = identity on the last aux state.

The head then starts as "run the target's last block once more on the last tapped state": far better than noise. The
embedding half of q/k/v starts at zero, so that at first the feature alone speaks.
"""

from typing import Any

import torch
from torch import Tensor

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.target import Target


def set_vocabulary(head: Eagle3Head, vocabulary: DraftVocabulary) -> None:
    """Write a draft vocabulary into the head's map buffers."""
    assert len(vocabulary) == head.config.draft_vocab_size
    if not head.config.full_vocabulary:
        head.d2t.copy_(vocabulary.d2t_U)
        head.t2d.copy_(vocabulary.t2d_V)


@torch.no_grad()
def init_random(head: Eagle3Head, *, std: float = 0.02) -> None:
    """Fill every matrix with a normal of the given deviation; norms stay at one."""
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=std)


def _norm_weight(norm: Any) -> Tensor:
    """Return what an RMSNorm multiplies by: its weight, or 1 + weight where the family stores it so (Gemma)."""
    weight: Tensor = norm.weight
    probe = torch.full_like(weight, 1024.0)  # large, so that eps does not show
    return weight if torch.allclose(norm(probe), weight, rtol=1e-2, atol=1e-6) else weight + 1


@torch.no_grad()
def init_from_target(head: Eagle3Head, target: Target, vocabulary: DraftVocabulary) -> None:
    """Copy what the target already knows; raises UserError when its last block is not Llama-like."""
    init_random(head)
    last: Any = target.layers[-1]
    D = head.config.hidden_size
    try:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head.midlayer.self_attn, name).weight
            weight[:, :D].zero_()
            weight[:, D:].copy_(getattr(last.self_attn, name).weight)
        head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(head.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        head.midlayer.hidden_norm.weight.copy_(_norm_weight(last.input_layernorm))
        head.midlayer.post_attention_layernorm.weight.copy_(_norm_weight(last.post_attention_layernorm))
        head.norm.weight.copy_(_norm_weight(target.decoder.norm))
    except (AttributeError, RuntimeError) as error:
        raise UserError(
            f"cannot warm-start the head from the last block of a {target.config.model_type} target ({error}); "
            "set head.init to 'random'."
        ) from error
    head.fc.weight.zero_()
    head.fc.weight[:, -D:].copy_(torch.eye(D))
    head.lm_head.weight.copy_(target.head.rows(vocabulary.token_ids_U).weight_VD)
