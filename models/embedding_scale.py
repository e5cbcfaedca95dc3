"""What a target's embedding module makes of its own table, and how heads come to terms with engines about it.

Gemma's module multiplies the table by sqrt(hidden size), MiniCPM's by scale_emb. Every engine lends a head the bare
table (vLLM 0.32-0.33 and SGLang 0.5.23 share the weight, the original code loads it), so it reads other embeddings
there than from the module. EAGLE-1 reads them through fc alone: its files hold fc with the scale multiplied in, and so
read the table. EAGLE-3 norms them first: only the norm's eps tells the two apart, by `norm_deviation`.
Where a family scales behind its embedding module (Granite), heads read the table here as everywhere.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig

SAMPLE = 512


@torch.no_grad()
def embedding_scale(embedding: nn.Module) -> float:
    """Return the factor between what an embedding module returns and its table, 1.0 where it returns the table.

    Raises UserError when the two differ by more than a factor, which no engine's head would know.
    """
    raw_ND, given_ND = _sample(embedding)
    squares = raw_ND.double().square().sum()
    scale = float((raw_ND.double() * given_ND.double()).sum() / squares) if squares > 0 else 1.0
    if not torch.allclose(given_ND, scale * raw_ND, rtol=2e-2, atol=1e-6 * abs(scale)):
        raise UserError(
            f"this target's {type(embedding).__name__} does more to its table than multiply it, and engines lend heads "
            "the table alone; train an EAGLE-3 head, which norms what it reads."
        )
    return float(f"{scale:.6g}")  # so that every device finds the same


def with_embedding_scale(config: HeadConfig, embedding: nn.Module) -> HeadConfig:
    """Return the config of a head that is to be trained on a target's embedding module."""
    return replace(config, embedding_scale=embedding_scale(embedding)) if config.kind == "eagle1" else config


@torch.no_grad()
def norm_deviation(embedding: nn.Module, *, eps: float) -> float:
    """Return by what share an RMSNorm of the bare table differs from one of the module's output, at the median row."""
    raw_ND, given_ND = (x_ND * (x_ND.square().mean(-1, keepdim=True) + eps).rsqrt() for x_ND in _sample(embedding))
    shares_N = (raw_ND - given_ND).norm(dim=-1) / given_ND.norm(dim=-1).clamp(min=1e-12)
    return float(shares_N.median())


def check_embedding_scale(embedding: nn.Module, trained: float) -> None:
    """Raise UserError unless an embedding module scales its table as the one that a head was trained on."""
    found = embedding_scale(embedding)
    if abs(found / trained - 1) > 1e-2:  # bf16 rounds a scale
        raise UserError(
            f"the head was trained on embeddings of {trained:g} times the target's table, this target's module gives "
            f"{found:g} times; it belongs to another target, or its target_embedding_scale was lost: import it again "
            "with eyas import --target MODEL."
        )


def _sample(embedding: Any) -> tuple[Tensor, Tensor]:
    """Return rows of an embedding's table and what the module returns for them, both [N, D] in fp32."""
    weight: Tensor = embedding.weight
    ids_N = torch.linspace(0, len(weight) - 1, min(SAMPLE, len(weight)), device=weight.device).long()
    return weight[ids_N].float(), embedding(ids_N).float()


def fold_scale(fc_DE: Tensor, scale: float) -> Tensor:
    """Return an EAGLE-1 head's fc [D, 2 D], whose first half reads embeddings, for embeddings `scale` times smaller."""
    D = fc_DE.shape[0]
    return torch.cat((fc_DE[:, :D].float() * scale, fc_DE[:, D:].float()), dim=-1).to(fc_DE.dtype)
