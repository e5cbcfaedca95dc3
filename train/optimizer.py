"""Optimizers: AdamW over everything, or Muon for the matrices with AdamW for what is no matrix.

The head's output rows learn at a rate of their own (`lm_head_rate` times the base rate; 0 freezes them).
"""

from collections.abc import Iterable

import torch
from torch import nn

from eyas.models.errors import UserError


def adamw(
    head: nn.Module, *, learning_rate: float, lm_head_rate: float, betas: tuple[float, float], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return AdamW over the head."""
    return _adamw(_trained(head), learning_rate, lm_head_rate, betas, weight_decay)


def muon(
    head: nn.Module, *, learning_rate: float, lm_head_rate: float, betas: tuple[float, float], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon over the head's inner matrices and AdamW over the rest.

    Muon's updates are scaled to AdamW's size (`match_rms_adamw`), so one learning rate serves both. Output rows and
    norms stay with AdamW, as its authors advise.
    """
    trained = _trained(head)
    inner = {name: p for name, p in trained.items() if p.ndim == 2 and not name.startswith("lm_head.")}
    if not inner:
        raise UserError("train.optimizer muon needs at least one trained matrix; use adamw.")
    groups = [{"params": list(inner.values()), "rate": 1.0}]
    matrices = torch.optim.Muon(groups, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    rest = {name: p for name, p in trained.items() if name not in inner}
    return [matrices, *(_adamw(rest, learning_rate, lm_head_rate, betas, weight_decay) if rest else [])]


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], learning_rate: float) -> None:
    """Give every parameter group its share of the learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["rate"]


def freeze_output_rows(head: nn.Module, *, lm_head_rate: float) -> None:
    """Freeze the head's output rows when their rate is 0."""
    for name, parameter in head.named_parameters():
        if name.startswith("lm_head."):
            parameter.requires_grad_(lm_head_rate > 0)


def _trained(head: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def _adamw(
    trained: dict[str, nn.Parameter], learning_rate: float, lm_head_rate: float, betas: tuple[float, float],
    weight_decay: float,
) -> list[torch.optim.Optimizer]:  # fmt: skip
    groups = [
        {"params": [p for name, p in trained.items() if not name.startswith("lm_head.")], "rate": 1.0},
        {"params": [p for name, p in trained.items() if name.startswith("lm_head.")], "rate": lm_head_rate},
    ]
    used = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(used, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)]
