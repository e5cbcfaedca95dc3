"""Held-out acceptance during training: rounds replayed as the engine runs them, by a chain and by a dynamic tree.

A chain's drafts are made for all slots at once, under autocast; a tree's by the runtime's own drafting, with a copy of
the head in the working dtype, as it will be served.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_row import FeatureRow, RowSource, as_source
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import DynamicTree
from eyas.inference.replay import (
    Replay,
    WrittenRow,
    average_over_slots,
    replay_chain,
    replay_trees,
    sample_chain,
)
from eyas.models.draft_head import DraftHead, copy_head
from eyas.models.packed_linear import pack_linears
from eyas.models.ttt_attention import TTTContext
from eyas.train.target_odds import TargetOdds

CHAIN_TOKENS = 2048
"""Tokens of a batch of rows whose chains are drafted at once."""
TREE_TOKENS = 8192
"""Tokens of the rows whose trees are drafted side by side."""
ROWS_SIDE_BY_SIDE = 32
"""How many rows that is, roughly: what the head's weights are packed for."""


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Acceptance over held-out rows; what was not asked for is None.

    `replay` (a chain) and `tree` are what decoding at T=0 would count; `slot_average` takes every slot for a round
    start and over-states the chain's. `sampled` and `sampled_tree` are the same rounds verified by sampling at T=1.
    """

    replay: AcceptanceStats
    slot_average: AcceptanceStats
    tree: AcceptanceStats | None = None
    sampled: AcceptanceStats | None = None
    sampled_tree: AcceptanceStats | None = None

    def __add__(self, other: "HeldOutAcceptance") -> "HeldOutAcceptance":
        return HeldOutAcceptance(
            self.replay + other.replay,
            self.slot_average + other.slot_average,
            _sum(self.tree, other.tree),
            _sum(self.sampled, other.sampled),
            _sum(self.sampled_tree, other.sampled_tree),
        )

    def taus(self) -> dict[str, float]:
        """Return every tau by the name it is reported under."""
        found = {_REPORTED[name]: stats.tau for name, stats in self.__dict__.items() if stats is not None}
        return {f"{prefix}tau": tau for prefix, tau in found.items()}

    def per_step(self) -> dict[str, list[float]]:
        """Return survival and alpha per drafted step of everything measured."""
        found: dict[str, list[float]] = {}
        for name, stats in self.__dict__.items():
            if stats is not None:
                found[f"{_REPORTED[name]}survival"] = stats.survival
                found[f"{_REPORTED[name]}alpha"] = stats.alpha
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything measured, for a head's card."""
        return {name: stats.as_dict() for name, stats in self.__dict__.items() if stats is not None}


_REPORTED = {
    "replay": "", "slot_average": "slot_", "tree": "tree_", "sampled": "sampled_", "sampled_tree": "sampled_tree_",
}  # fmt: skip


def _sum(a: AcceptanceStats | None, b: AcceptanceStats | None) -> AcceptanceStats | None:
    return a + b if a is not None and b is not None else None


@torch.no_grad()
def held_out_acceptance(
    head: DraftHead,
    rows: RowSource | list[FeatureRow],
    *,
    depth: int,
    dtype: torch.dtype,
    tree: DynamicTree | None = None,
    odds: TargetOdds | None = None,
    chain_tokens: int = CHAIN_TOKENS,
    tree_tokens: int = TREE_TOKENS,
) -> HeldOutAcceptance:
    """Return the acceptance over greedily written rows of a chain of `depth`, and of a `tree` where one is given.

    `odds` says how likely the target holds a draft; without it nothing is said about T=1.
    """
    was_training = head.training
    head.eval()
    source = as_source(rows)
    empty = AcceptanceStats(depth)
    found = HeldOutAcceptance(empty, empty, sampled=empty if odds else None)
    for chunk in _chunks(source, chain_tokens):
        found += _chains(head, chunk, depth=depth, dtype=dtype, odds=odds)
    if tree is not None:
        replay = Replay(AcceptanceStats(tree.depth), AcceptanceStats(tree.depth))
        drafter = drafting_copy(head, dtype=dtype, rows=tree.top_k * ROWS_SIDE_BY_SIDE)
        for chunk in _chunks(source, tree_tokens):
            replay += replay_trees(
                drafter, tree, [written(row) for row in chunk], odds=odds.of(chunk) if odds else None
            )
        sampled = replay.sampled if odds else None
        found = HeldOutAcceptance(found.replay, found.slot_average, replay.greedy, found.sampled, sampled)
    head.train(was_training)
    return found


def drafting_copy(head: DraftHead, *, dtype: torch.dtype, rows: int) -> DraftHead:
    """Return a copy of a head to draft with, in a dtype, its CPU weights packed for inputs of about `rows` rows."""
    drafter = copy_head(head).to(dtype).eval()
    pack_linears(drafter, rows=rows)
    return drafter


def written(row: FeatureRow) -> WrittenRow:
    """Return a row as replay reads it."""
    replies = generated_spans(row.generated_mask_T)
    return WrittenRow(row.input_ids_T, row.aux_hidden_TF, row.final_hidden_TD, replies)


def _chunks(source: RowSource, tokens: int) -> Iterator[list[FeatureRow]]:
    """Yield the rows by length, as many at a time as hold so many tokens when padded to the longest."""
    ordered = sorted(range(len(source)), key=lambda index: source.lengths[index])
    start = 0
    while start < len(ordered):
        stop = start + 1
        while stop < len(ordered) and (stop + 1 - start) * source.lengths[ordered[stop]] <= tokens:
            stop += 1
        yield source.rows(ordered[start:stop])
        start = stop


def _chains(
    head: DraftHead, chunk: list[FeatureRow], *, depth: int, dtype: torch.dtype, odds: TargetOdds | None
) -> HeldOutAcceptance:
    device = head.device
    batch = collate([[row] for row in chunk], length=len(chunk[-1]), dtype=torch.float32).to(device)
    with torch.autocast(device_type=device.type, dtype=dtype, enabled=dtype != torch.float32):
        drafts = chain_drafts(head, batch, depth=depth)
    odds_BTS = _chain_odds(drafts, odds, chunk) if odds else None
    replay, average, sampled = AcceptanceStats(depth), AcceptanceStats(depth), AcceptanceStats(depth)
    for b, row in enumerate(chunk):
        hits_TS = drafts.hits_BTS[b]
        for first, last in generated_spans(row.generated_mask_T):
            replay += replay_chain(hits_TS, first=first, last=last)
            average += average_over_slots(hits_TS, first=first, last=last)
            if odds_BTS is not None:
                sampled += sample_chain(hits_TS, odds_BTS[b], first=first, last=last)
    return HeldOutAcceptance(replay, average, sampled=sampled if odds else None)


class Drafts(NamedTuple):
    """The draft of every slot at every step, on the CPU.

    `tokens_BTS`: the drafted target ids, -1 where no slot is supervised; `hits_BTS`: whether it is the text's own token
    t+2+s. A token outside the draft vocabulary is never hit.
    """

    tokens_BTS: Tensor
    hits_BTS: Tensor


def chain_drafts(head: DraftHead, batch: FeatureBatch, *, depth: int) -> Drafts:
    """Return the drafts of all slots at once, each step fed with the text's own tokens before it."""
    B, T = batch.input_ids_BT.shape
    tokens = torch.full((B * T, depth), -1, device=batch.input_ids_BT.device)
    hits = torch.zeros(B * T, depth, dtype=torch.bool, device=tokens.device)
    context = TTTContext(batch.document_BT)
    feature = head.fuse(head.states(batch.aux_hidden_BTF, batch.final_hidden_BTD))
    text = batch.input_ids_BT.flatten()
    for step in range(depth):
        slots_N = batch.supervised(step).flatten().nonzero().squeeze(-1)
        feature, logits_NU = head.step(
            feature, batch.token_ids(step), batch.position_ids(step), context, logits_at=slots_N
        )
        tokens[slots_N, step] = head.to_target_ids(logits_NU.argmax(-1))
        hits[slots_N, step] = tokens[slots_N, step] == text[slots_N + 2 + step]
    return Drafts(tokens.view(B, T, depth).cpu(), hits.view(B, T, depth).cpu())


def _chain_odds(drafts: Drafts, odds: TargetOdds, chunk: list[FeatureRow]) -> Tensor:
    """Return how likely the target holds every draft, [B, T, S]; 0 where none is supervised."""
    rows_M, slots_M, steps_M = (drafts.tokens_BTS >= 0).nonzero(as_tuple=True)
    found_M = odds.of(chunk)(rows_M, slots_M + 1 + steps_M, drafts.tokens_BTS[rows_M, slots_M, steps_M])
    odds_BTS = torch.zeros(drafts.tokens_BTS.shape, dtype=found_M.dtype)
    return odds_BTS.index_put_((rows_M, slots_M, steps_M), found_M)


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
