"""What is measured while features are written: the size of each aux layer's states, and what keeping them costs.

Sums per shard, added up in shard order at the end, so that the numbers do not depend on who wrote which shard.
    rms, largest    of each aux layer over all tokens; layers of very different size learn better with head.fc_norm
    kl, agreement   of the teacher rebuilt from kept final states against the one from the states as computed, nats
    aux_error       |kept - computed| / |computed| per aux layer, final_error likewise; over the checked rows
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from eyas.data.feature_row import FeatureRow, teaching_positions
from eyas.models.target_head import TargetHead

POSITIONS_PER_ROW = 64
UNEVEN = 100.0  # how many times larger one aux layer's states may be before head.fc_norm is suggested


def state_sums(rows: Iterable[Tensor], *, layers: int) -> dict[str, Any]:
    """Return the token count, and per layer the sum of squares and the largest magnitude, of aux states [T, F]."""
    tokens, squares, largest = 0, torch.zeros(layers, dtype=torch.float64), torch.zeros(layers)
    for aux_TF in rows:
        tokens += len(aux_TF)
        if not layers:  # an EAGLE-1 head reads final states alone
            continue
        states = aux_TF.float().unflatten(-1, (layers, -1))
        squares += states.square().mean(-1).sum(0, dtype=torch.float64)
        largest = torch.maximum(largest, states.abs().amax((0, 2)))
    return {"tokens": tokens, "squares": squares.tolist(), "largest": largest.tolist()}


@torch.inference_mode()
def fidelity_sums(
    head: TargetHead, computed: list[FeatureRow], kept: list[FeatureRow], *, layers: int
) -> dict[str, Any]:
    """Return the sums behind the fidelity report for rows as computed and as kept."""
    sums: dict[str, Any] = {"positions": 0, "kl": 0.0, "agreeing": 0}
    error, size = torch.zeros(layers + 1, dtype=torch.float64), torch.zeros(layers + 1, dtype=torch.float64)
    for row, stored in zip(computed, kept, strict=True):
        positions = teaching_positions(row.generated_mask_T)[:POSITIONS_PER_ROW]
        pairs = [*zip(_layers(row.aux_hidden_TF, layers), _layers(stored.aux_hidden_TF, layers), strict=True)]
        pairs.append((row.final_hidden_TD[positions].float(), stored.final_hidden_TD[positions].float()))
        for i, (a, b) in enumerate(pairs):
            error[i] += float((a - b).square().sum(dtype=torch.float64))
            size[i] += float(a.square().sum(dtype=torch.float64))
        if len(positions):
            logits, rebuilt = (_logits(head, r.final_hidden_TD[positions]) for r in (row, stored))
            log_p, log_q = logits.log_softmax(-1), rebuilt.log_softmax(-1)
            sums["positions"] += len(positions)
            sums["kl"] += float((log_p.exp() * (log_p - log_q)).sum())
            sums["agreeing"] += int((logits.argmax(-1) == rebuilt.argmax(-1)).sum())
    return {**sums, "error": error.tolist(), "size": size.tolist()}


def _layers(aux_TF: Tensor, layers: int) -> tuple[Tensor, ...]:
    return aux_TF.float().chunk(layers, -1) if layers else ()


def _logits(head: TargetHead, final_ND: Tensor) -> Tensor:
    return head.logits(final_ND.to(head.weight_VD.device)).float()


def summarise(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements of a store from its shards' sums."""
    states, fidelity = [shard["states"] for shard in shards], [shard["fidelity"] for shard in shards]
    tokens = sum(part["tokens"] for part in states)
    positions = max(1, sum(part["positions"] for part in fidelity))
    errors = [
        math.sqrt(_total(fidelity, "error", i) / max(_total(fidelity, "size", i), 1e-30))
        for i in range(len(fidelity[0]["error"]))
    ]
    return {
        "rms": [math.sqrt(_total(states, "squares", i) / tokens) for i in range(len(states[0]["squares"]))],
        "largest": [max(values) for values in zip(*(part["largest"] for part in states), strict=True)],
        "checked_positions": sum(part["positions"] for part in fidelity),
        "kl": sum(part["kl"] for part in fidelity) / positions,
        "agreement": sum(part["agreeing"] for part in fidelity) / positions,
        "aux_error": errors[:-1],
        "final_error": errors[-1],
    }


def _total(parts: list[dict[str, Any]], name: str, index: int) -> float:
    return math.fsum(part[name][index] for part in parts)


def describe(measured: dict[str, Any], aux_layers: tuple[int, ...]) -> list[str]:
    """Return the measurements as lines for the user."""
    sizes = ", ".join(f"{k}: {rms:.3g}" for k, rms in zip(aux_layers, measured["rms"], strict=True))
    lines = [f"  aux states, root mean square by layer: {sizes}"] if aux_layers else []
    if aux_layers and max(measured["rms"]) > UNEVEN * max(min(measured["rms"]), 1e-12):
        lines.append("  the aux layers differ in size a hundred times and more; head.fc_norm: true evens them out")
    errors = ", ".join(f"{error:.2%}" for error in measured["aux_error"]) or "none kept"
    lines.append(
        f"  kept against computed, {measured['checked_positions']} positions: teacher KL {measured['kl']:.2g} nats, "
        f"same argmax {measured['agreement']:.2%}; relative error of aux states {errors}, of final states "
        f"{measured['final_error']:.2%}"
    )
    return lines
