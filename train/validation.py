"""Held-out acceptance during training: drafts of all slots at once, then rounds replayed as the engine runs them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_row import FeatureRow, RowSource, as_source
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.replay import average_over_slots, replay_chain
from eyas.models.draft_head import DraftHead
from eyas.models.ttt_attention import TTTContext


@dataclass(frozen=True)
class HeldOutAcceptance:
    """`replay` is what decoding would see; `slot_average` counts every slot as a round start and over-states it."""

    replay: AcceptanceStats
    slot_average: AcceptanceStats


@torch.no_grad()
def held_out_acceptance(
    head: DraftHead,
    rows: RowSource | list[FeatureRow],
    *,
    depth: int,
    dtype: torch.dtype,
    tokens_per_batch: int = 2048,
) -> HeldOutAcceptance:
    """Return the acceptance of a chain of `depth` over greedily written rows."""
    was_training = head.training
    head.eval()
    device = head.device
    replay, average = AcceptanceStats(depth), AcceptanceStats(depth)
    source = as_source(rows)
    ordered = sorted(range(len(source)), key=lambda index: source.lengths[index])
    start = 0
    while start < len(ordered):
        stop = start + 1
        while stop < len(ordered) and (stop + 1 - start) * source.lengths[ordered[stop]] <= tokens_per_batch:
            stop += 1
        chunk = source.rows(ordered[start:stop])
        batch = collate([[row] for row in chunk], length=len(chunk[-1]), dtype=torch.float32).to(device)
        with torch.autocast(device_type=device.type, dtype=dtype, enabled=dtype != torch.float32):
            hits_BTS = draft_hits(head, batch, depth=depth).cpu()
        for b, row in enumerate(chunk):
            for first, last in generated_spans(row.generated_mask_T):
                replay += replay_chain(hits_BTS[b], first=first, last=last)
                average += average_over_slots(hits_BTS[b], first=first, last=last)
        start = stop
    head.train(was_training)
    return HeldOutAcceptance(replay, average)


def draft_hits(head: DraftHead, batch: FeatureBatch, *, depth: int) -> Tensor:
    """Return bool [B, T, depth]: whether the draft of slot t at step s is the text's own token t+2+s.

    Slots that are not supervised at a step are False; a token outside the draft vocabulary is never hit.
    """
    B, T = batch.input_ids_BT.shape
    hits = torch.zeros(B * T, depth, dtype=torch.bool, device=batch.input_ids_BT.device)
    context = TTTContext(batch.document_BT)
    feature = head.fuse(head.states(batch.aux_hidden_BTF, batch.final_hidden_BTD))
    tokens = batch.input_ids_BT.flatten()
    for step in range(depth):
        slots_N = batch.supervised(step).flatten().nonzero().squeeze(-1)
        feature, logits_NU = head.step(
            feature, batch.token_ids(step), batch.position_ids(step), context, logits_at=slots_N
        )
        drafted_N = head.to_target_ids(logits_NU.argmax(-1))
        hits[slots_N, step] = drafted_N == tokens[slots_N + 2 + step]
    return hits.view(B, T, depth)


def generated_spans(mask_T: Tensor) -> list[tuple[int, int]]:
    """Return (first, last) token positions of every run of generated tokens."""
    mask = mask_T.bool().tolist()
    spans, first = [], None
    for i, generated in enumerate([*mask, False]):
        if generated and first is None:
            first = i
        elif not generated and first is not None:
            spans.append((first, i - 1))
            first = None
    return spans
