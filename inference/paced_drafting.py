"""Drafting that rests where it does not pay: an EAGLE drafting state under a `Pace`, fed only when it drafts.

While a session rests, the tokens it commits and the target's states wait here; the probe feeds them all in one step of
the head, which costs hardly more than feeding one token.
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch

from eyas.inference.cost_aware_tree import CostAwareTree
from eyas.inference.draft import HeadState
from eyas.inference.drafter import Drafting
from eyas.inference.pace import Pace, Trust
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.models.draft_cache import DraftCache
from eyas.models.target import TargetOutput


class HeadDrafting(Drafting, HeadState, Protocol):
    """A drafting state that makers read."""

    cache: DraftCache


@dataclass
class _Row:
    """What is known of a row: its trust, what its tree promises and is expected to yield, and what waits to be fed."""

    trust: Trust = field(default_factory=Trust)
    promised: float = 0.0
    expected: float = 0.0
    is_new: bool = True
    tokens: list[int] = field(default_factory=list)
    states: list[TargetOutput] = field(default_factory=list)


class PacedDrafting:
    """The drafting state of a session with a cost-aware tree; `drafting` is what drafts when it is time to."""

    def __init__(self, drafting: HeadDrafting, tree: CostAwareTree) -> None:
        self.drafting = drafting
        self.tree = tree
        self.pace = Pace()
        self.rows: list[_Row] = []
        self.seconds: float | None = None  # of the round under way, None in a rest

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        self.drafting.join(prompts, samplings, capacity=capacity)
        self.rows += [_Row() for _ in prompts]

    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        rows = self.rows[first : first + len(next_tokens)]
        if rows[0].is_new:  # a prompt is fed at once: rows that joined together are of one kind
            for row in rows:
                row.is_new = False
            self.drafting.extend(first, next_tokens, states)
            return
        self._learn([len(tokens) - 1 for tokens in next_tokens])
        for place, (row, tokens) in enumerate(zip(rows, next_tokens, strict=True)):
            row.tokens += tokens
            seen = slice(0, len(tokens))
            row.states.append(TargetOutput(states.aux_hidden_BTF[place, seen], states.final_hidden_BTD[place, seen]))

    @torch.inference_mode()
    def draft(self, roots: list[int]) -> list[DraftTree]:
        if self.pace.rests():
            return [DraftTree.root(root) for root in roots]
        if self.pace.is_waking:
            for row in self.rows:
                row.trust.forget()
        self._feed()
        priced = self.tree.price(self.drafting, roots, [row.trust.factor for row in self.rows])
        self.drafting.cache.discard_tree()
        for row, promised, expected in zip(self.rows, priced.promised_R, priced.expected_R, strict=True):
            row.promised, row.expected = promised, expected
        self.seconds = priced.seconds / (self.tree.latency.verify_seconds(len(roots))[0])
        return priced.trees

    def leave(self, row: int) -> None:
        self.drafting.leave(row)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def _learn(self, accepted_R: list[int]) -> None:
        """Record the round that has just been run, of the rows that go on."""
        if self.seconds is None:
            return
        tokens = 1 + sum(
            (row.expected + accepted) / 2 for row, accepted in zip(self.rows, accepted_R, strict=True)
        ) / len(accepted_R)
        self.pace.record(tokens=tokens, seconds=self.seconds)
        for row, accepted in zip(self.rows, accepted_R, strict=True):
            row.trust.record(promised=row.promised, accepted=accepted)
        self.seconds = None

    def _feed(self) -> None:
        """Commit what waits: rows side by side as long as equally much waits in them, so that nothing is padded."""
        for count, group in groupby(enumerate(self.rows), key=lambda entry: len(entry[1].tokens)):
            if count == 0:
                continue
            places, rows = zip(*group, strict=True)
            aux = torch.stack([torch.cat([one.aux_hidden_BTF for one in row.states]) for row in rows])
            final = torch.stack([torch.cat([one.final_hidden_BTD for one in row.states]) for row in rows])
            self.drafting.extend(places[0], [row.tokens for row in rows], TargetOutput(aux, final))
            for row in rows:
                row.tokens, row.states = [], []
