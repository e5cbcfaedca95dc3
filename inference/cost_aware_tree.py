"""The cost-aware tree: a dynamic tree of as many levels and nodes as pay on this machine."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eyas.inference.budget import Budget, best_budget, expected_gains
from eyas.inference.calibration import Calibration
from eyas.inference.candidate_pool import CandidatePool
from eyas.inference.copies import NGRAM, Copy
from eyas.inference.draft import Columns, DynamicTree, HeadState, best_candidates, trees_of
from eyas.inference.latency import LatencyTable
from eyas.inference.tree import DraftTree


@dataclass(frozen=True)
class PricedTree:
    """A tree, how many drafts of it should be accepted, and what the head's own scores promise of the nodes it drew.

    `of_head_N`: whether a node (the root is none) was among the head's candidates.
    """

    tree: DraftTree
    expected: float
    promised: float
    of_head_N: tuple[bool, ...]


@dataclass(frozen=True)
class PricedRound:
    """The trees of all rows and the round's seconds; `alone`: tokens per second of the best round without the head."""

    rows: list[PricedTree]
    seconds: float
    alone: float


@dataclass(frozen=True)
class CostAwareTree:
    """A dynamic tree of at most `depth` levels and `num_draft_tokens` nodes: as many of both as pay on this machine.

    A round costs drafting and one target forward; its worth is the tokens it should emit. Another level is drawn while
    the best rate it promises is above the best one without it; then as many nodes are kept as make the rate highest,
    the same number in every row because the forward is as wide as its widest row. None at all is a choice too.
    With an `ngram` above 0 candidates are copied from the text, too (`copies.py`), and compete with the head's.
    """

    depth: int
    top_k: int
    num_draft_tokens: int
    calibration: Calibration
    latency: LatencyTable
    ngram: int = NGRAM

    def __post_init__(self) -> None:
        _ = self.shape  # raises for numbers that make no tree

    @cached_property
    def shape(self) -> DynamicTree:
        return DynamicTree(self.depth, self.top_k, self.num_draft_tokens, self.calibration)

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def scratch(self) -> int:
        return self.shape.scratch

    def check(self, draft_vocab_size: int) -> None:
        """A tree that is wider than the draft vocabulary takes all of it."""

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        """Return the trees of rows of which nothing is known."""
        priced = self.price(state, roots, [1.0] * len(roots), [None] * len(roots))
        return [row.tree for row in priced.rows]

    def price(
        self, state: HeadState, roots: list[int], trust_R: list[float], copies_R: list[Copy | None]
    ) -> PricedRound:
        """Return the trees that pay best; `trust_R`, at most 1, corrects every step of the head's paths by a factor."""
        R = len(roots)
        trust_R1 = np.asarray(trust_R)[:, None]
        temperatures = [sampling.temperature for sampling in state.samplings]

        def pays(columns: Columns, frontier_RK: Tensor) -> bool:
            pool = CandidatePool.of(columns, trust_R).with_copies(copies_R)
            levels = int(columns[2].max())
            hits_R1 = np.asarray(self.calibration.hit_rates(levels + 1, temperatures))[:, None]
            promised_RK = pool.promised(frontier_RK.cpu().numpy(), np.log(hits_R1 * trust_R1))
            here = self._budget(pool.log_p_RP, R, levels)
            there = self._budget(np.concatenate((pool.log_p_RP, promised_RK), axis=1), R, levels + 1)
            return there.rate > here.rate

        columns = self.shape.candidates(state, pays)
        pool = CandidatePool.of(columns, trust_R).with_copies(copies_R)
        chosen = self._budget(pool.log_p_RP, R, int(columns[2].max()))
        copied = CandidatePool.empty(R).with_copies(copies_R)
        alone = self._budget(copied.log_p_RP, R, 0)
        return PricedRound(_trees(roots, pool, chosen.nodes), chosen.seconds, alone.rate)

    def copy(self, roots: list[int], copies_R: list[Copy | None]) -> list[DraftTree]:
        """Return the copies, or as much of them as pays: drafting that costs nothing."""
        pool = CandidatePool.empty(len(roots)).with_copies(copies_R)
        chosen = self._budget(pool.log_p_RP, len(roots), 0)
        return [row.tree for row in _trees(roots, pool, chosen.nodes)]

    def _budget(self, log_p_RP: np.ndarray, rows: int, levels: int) -> Budget:
        """Return the best budget of some candidates; without levels of the head nothing is fed or drawn."""
        verify_N = self.latency.verify_seconds(rows)[: self.max_nodes]
        drafting = self.latency.draft_seconds(rows, levels) if levels else 0.0
        return best_budget(expected_gains(log_p_RP, most=len(verify_N) - 1), verify_N, drafting)


def _trees(roots: list[int], pool: CandidatePool, nodes: int) -> list[PricedTree]:
    """Return every row's tree of so many nodes, fewer where a row has no more candidates."""
    if nodes == 0:
        return [PricedTree(DraftTree.root(root), 0.0, 0.0, (False,)) for root in roots]
    log_p_RP = torch.from_numpy(pool.log_p_RP)
    chosen_RC = best_candidates(log_p_RP, nodes)
    counts_R = log_p_RP.gather(1, chosen_RC).isfinite().sum(1).tolist()
    tokens, parents, depths = (torch.from_numpy(x) for x in (pool.tokens_RP, pool.parents_RP, pool.depths_RP))
    found = []
    for r, count in enumerate(counts_R):
        own, chosen_1C = slice(r, r + 1), chosen_RC[r : r + 1, :count]
        (tree,) = trees_of([roots[r]], (tokens[own], parents[own], depths[own], log_p_RP[own]), chosen_1C)
        head_C = pool.head_RP[r, chosen_1C[0].numpy()]
        of_head_N = (False, *np.isfinite(head_C).tolist())
        expected = float(tree.scores_N[1:].exp().sum())
        found.append(PricedTree(tree, expected, float(np.exp(head_C).sum()), of_head_N))
    return found
