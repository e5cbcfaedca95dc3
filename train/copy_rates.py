"""How often copies from the text are right, by how much of it matched: what the rates of `inference/copies.py` rest on.

Every generated token of a corpus row but a span's first is put to the test: what the text before it proposes, and what
the head, fed the row itself, gives its best child there. The numbers are of acceptance at the row's own temperature.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.data.corpus import CorpusRow
from eyas.inference.copies import NGRAM
from eyas.inference.draft import ChainTree
from eyas.inference.eagle_drafter import EagleDrafter, EagleDrafting
from eyas.inference.prompt_lookup import LookupDrafting
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.models.target import Target, TargetOutput

DEPTH = 8


@dataclass
class Tally:
    """Cases, how many were right, and the sum of what the head gave its best child in them."""

    cases: int = 0
    right: int = 0
    head: float = 0.0

    def count(self, right: bool, head: float = 0.0) -> None:
        self.cases, self.right, self.head = self.cases + 1, self.right + right, self.head + head

    @property
    def rate(self) -> float | None:
        return self.right / self.cases if self.cases else None

    @property
    def doubt_taken(self) -> float | None:
        """How much less than the head's own doubt is left: 1 - (1 - rate) / (1 - the head's mean probability)."""
        if self.rate is None or self.head >= self.cases:
            return None
        return 1.0 - (1.0 - self.rate) / (1.0 - self.head / self.cases)


def _tallies() -> list[Tally]:
    return [Tally() for _ in range(NGRAM)]


@dataclass
class CopyRates:
    """Tallies by the number of tokens that matched, 1 to NGRAM."""

    tokens: int = 0
    alone: list[Tally] = field(default_factory=_tallies)
    following: list[Tally] = field(default_factory=_tallies)
    opposed: list[Tally] = field(default_factory=_tallies)
    agreed: list[Tally] = field(default_factory=_tallies)


@torch.inference_mode()
def measure_copies(
    target: Target, head: DraftHead, rows: list[CorpusRow], *, progress: Callable[[int, int, int], None]
) -> CopyRates:
    """Return the tallies over some rows; `progress` hears rows done, rows in all, and tokens."""
    EagleDrafter(head, ChainTree(1)).check(target)
    rates = CopyRates()
    for number, row in enumerate(rows):
        ids = torch.tensor(row.input_ids, device=target.device)
        best_T, log_p_T = _best_children(target, head, ids)
        text = LookupDrafting(DEPTH, NGRAM)
        text.join([row.input_ids], [Sampling()], capacity=len(ids))
        nothing = TargetOutput(torch.empty(0), torch.empty(0))
        for place in range(1, len(ids)):
            if any(start < place < end for start, end in row.generated):
                end = next(end for start, end in row.generated if start < place < end)
                _judge(rates, text, list(row.input_ids[place:end]), int(best_T[place - 2]), float(log_p_T[place - 2]))
            text.extend(0, [[row.input_ids[place]]], nothing)
        progress(number + 1, len(rows), rates.tokens)
    return rates


def _best_children(target: Target, head: DraftHead, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head's best child of every slot (a guess of the token two later) and its log-probability."""
    drafting = EagleDrafting(head, ChainTree(1))
    drafting.join([(int(ids_T[0]),)], [Sampling()], capacity=len(ids_T))
    out = target.forward(ids_T[None])
    cache = drafting.cache
    cache.commit(len(ids_T) - 1)
    features = head.fuse(head.states(out.aux_hidden_BTF, out.final_hidden_BTD)[:, :-1].to(head.dtype))
    positions = torch.arange(len(ids_T) - 1, device=ids_T.device)[None]
    _, logits_1TU = head.step(features, ids_T[None, 1:], positions, cache)
    log_p, best = torch.log_softmax(logits_1TU[0].float(), -1).max(-1)
    return head.to_target_ids(best).cpu(), log_p.cpu()


def _judge(rates: CopyRates, text: LookupDrafting, true: list[int], best: int, log_p: float) -> None:
    rates.tokens += 1
    guess, matched = text.find(0)
    if not guess:
        return
    p = math.exp(log_p)
    rates.alone[matched - 1].count(guess[0] == true[0])
    (rates.agreed if guess[0] == best else rates.opposed)[matched - 1].count(guess[0] == true[0], p)
    for step in range(1, min(len(true), len(guess))):
        if guess[step - 1] != true[step - 1]:
            break
        rates.following[matched - 1].count(guess[step] == true[step])
