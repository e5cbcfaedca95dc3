"""What to say when training meets a number that is not finite: which rows, and which layer's features are odd."""

import torch
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch


def describe_window(batches: list[FeatureBatch], row_ids: list[list[str]], *, aux_layers: tuple[int, ...]) -> str:
    """Return the row ids of a window and, per aux layer and for the final state, the largest and the mean magnitude.

    Statistics are over real tokens, in fp32. Non-finite entries are counted, not averaged.
    """
    ids = [row_id for batch_ids in row_ids for row_id in batch_ids]
    shown = ", ".join(ids[:12]) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
    tokens = torch.cat([batch.aux_hidden_BTF[batch.document_BT >= 0].float() for batch in batches])
    chunks = tokens.chunk(max(1, len(aux_layers)), dim=-1)
    lines = [f"aux layer {k}: {_statistics(chunk)}" for k, chunk in zip(aux_layers, chunks, strict=False)]
    final = torch.cat([batch.final_hidden_BTD[batch.document_BT >= 0].float() for batch in batches])
    lines.append(f"final state: {_statistics(final)}")
    return f"rows {shown}; " + "; ".join(lines)


def _statistics(states_NF: Tensor) -> str:
    finite = torch.isfinite(states_NF)
    bad = int((~finite).sum())
    kept = states_NF[finite]
    size = (
        f"largest {float(kept.abs().max()):.3g}, root mean square {float(kept.square().mean().sqrt()):.3g}"
        if len(kept)
        else "nothing finite"
    )
    return f"{size}, {bad} not finite" if bad else size
