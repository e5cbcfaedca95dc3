"""Drafting that rests where it does not pay: an EAGLE drafting state under a `Pace`, fed only when it drafts.

The head is asked in no round of a rest, and in none whose copies of the text (`copies.py`) are so likely right that it
could add little. Meanwhile the tokens that are committed and the target's states wait here; the next round with the
head feeds them all in one step, which costs hardly more than feeding one token. Copies cost nothing and never rest: the
head has to beat what they would have brought without it.
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch

from eyas.inference.copies import Copy
from eyas.inference.cost_aware_tree import CostAwareTree, PricedRound, PricedTree, Pricing
from eyas.inference.draft import HeadState
from eyas.inference.drafter import Drafting
from eyas.inference.pace import Pace, Trust
from eyas.inference.prompt_lookup import LookupDrafting
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.models.draft_cache import DraftCache
from eyas.models.target import TargetOutput


class HeadDrafting(Drafting, HeadState, Protocol):
    """A drafting state that makers read."""

    cache: DraftCache


@dataclass
class _Row:
    """What is known of a row: how far head and copies are trusted, what was drafted last, and what waits to be fed."""

    trust: Trust = field(default_factory=Trust)
    copy_trust: Trust = field(default_factory=Trust)
    copy: Copy | None = None
    priced: PricedTree | None = None
    is_new: bool = True
    tokens: list[int] = field(default_factory=list)
    states: list[TargetOutput] = field(default_factory=list)

    def learn(self, emitted: list[int]) -> int:
        """Record what the round that has just been run said of the copy, drafted or not, and of the head's nodes.

        Returns how many tokens of the copy were right.
        """
        right = 0
        if self.copy is not None:
            promised, right = self.copy.hits(emitted)
            self.copy_trust.record(promised=promised, accepted=right)
        if self.priced is not None:
            path = self.priced.tree.follow(emitted[:-1])
            of_head = sum(self.priced.of_head_N[node] for node in path)
            self.trust.record(promised=self.priced.promised, accepted=of_head)
        return right


class PacedDrafting:
    """The drafting state of a session with a cost-aware tree; `drafting` is what drafts when it is time to."""

    def __init__(self, drafting: HeadDrafting, tree: CostAwareTree) -> None:
        self.drafting = drafting
        self.tree = tree
        self.pace = Pace()
        self.rows: list[_Row] = []
        self.texts = LookupDrafting(tree.depth, tree.ngram)
        self.priced: PricedRound | None = None  # the round under way, if the head was asked

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        self.drafting.join(prompts, samplings, capacity=capacity)
        self.texts.join(prompts, samplings, capacity=capacity)
        self.rows += [_Row() for _ in prompts]

    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        rows = self.rows[first : first + len(next_tokens)]
        self.texts.extend(first, next_tokens, states)
        if rows[0].is_new:  # a prompt is fed at once: rows that joined together are of one kind
            for row in rows:
                row.is_new = False
            self.drafting.extend(first, next_tokens, states)
            return
        self._learn(next_tokens)
        for place, (row, tokens) in enumerate(zip(rows, next_tokens, strict=True)):
            row.tokens += tokens
            seen = slice(0, len(tokens))
            row.states.append(TargetOutput(states.aux_hidden_BTF[place, seen], states.final_hidden_BTD[place, seen]))

    @torch.inference_mode()
    def draft(self, roots: list[int]) -> list[DraftTree]:
        for place, row in enumerate(self.rows):
            tokens, matched = self.texts.find(place)
            row.copy = Copy(tuple(tokens), matched, row.copy_trust.factor) if tokens else None
            row.priced = None
        self.priced = None  # all rows may have ended with the round before, untold
        if self.pace.wakes():
            for row in self.rows:
                row.trust.forget()
        trust = [row.trust.factor for row in self.rows]
        pricing = Pricing(self.tree, self.drafting.samplings, trust, [row.copy for row in self.rows])
        if self.pace.rests() or not pricing.asks_the_head():
            return pricing.copy(roots)
        self._feed()
        priced = pricing.draw(self.drafting, roots)
        self.drafting.cache.discard_tree()
        for row, of_row in zip(self.rows, priced.rows, strict=True):
            row.priced = of_row
        self.priced = priced
        return [row.tree for row in priced.rows]

    def leave(self, row: int) -> None:
        self.drafting.leave(row)
        self.texts.leave(row)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def _learn(self, emitted_RT: list[list[int]]) -> None:
        """Record the round that has just been run, of the rows that go on."""
        copied = [row.learn(emitted) for row, emitted in zip(self.rows, emitted_RT, strict=True)]
        if self.priced is None:
            return
        without = self.priced.without
        self.pace.record(
            tokens=sum(map(len, emitted_RT)) / len(emitted_RT),
            seconds=self.priced.seconds,
            tokens_without=1 + sum(min(right, without.nodes) for right in copied) / len(emitted_RT),
            seconds_without=without.seconds,
        )
        self.priced = None

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
