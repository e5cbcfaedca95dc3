"""The cost-aware tree: a dynamic tree of as many levels and nodes as pay on this machine."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from eyas.inference.budget import Budget, Floats, best_budget, expected_gains
from eyas.inference.calibration import Calibration
from eyas.inference.candidate_pool import CandidatePool
from eyas.inference.copies import NGRAM, Copy
from eyas.inference.draft import Columns, DynamicTree, HeadState, best_candidates, tree_of
from eyas.inference.latency import LatencyTable
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree


@dataclass(frozen=True)
class PricedTree:
    """A tree, and how many acceptances the head's own scores promise of the nodes it drew.

    `of_head_N`: whether a node (the root is none) was among the head's candidates.
    """

    tree: DraftTree
    promised: float
    of_head_N: tuple[bool, ...]


@dataclass(frozen=True)
class PricedRound:
    """The trees of all rows, the round's seconds, and the best budget that there was without the head."""

    rows: list[PricedTree]
    seconds: float
    without: Budget


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
        pricing = Pricing(self, state.samplings, [1.0] * len(roots), [None] * len(roots))
        return [row.tree for row in pricing.draw(state, roots).rows]

    def budget(self, log_p_RP: np.ndarray, rows: int, levels: int) -> Budget:
        """Return the best budget of some candidates; without levels of the head nothing is fed or drawn."""
        verify_N = self.latency.verify_seconds(rows)[: self.max_nodes]
        drafting = self.latency.draft_seconds(rows, levels) if levels else 0.0
        return best_budget(expected_gains(log_p_RP, most=len(verify_N) - 1), verify_N, drafting)


class Pricing:
    """What is known of a round: at first the copies of the text, then the head's candidates, and the best budget."""

    def __init__(
        self, tree: CostAwareTree, samplings: list[Sampling], trust_R: list[float], copies_R: list[Copy | None]
    ) -> None:
        """`trust_R`, at most 1, corrects every step of the head's paths by a factor."""
        self.tree = tree
        self.temperatures = [sampling.temperature for sampling in samplings]
        self.trust_R = trust_R
        self.copies_R = copies_R
        self.levels = 0  # of the head
        self.pool = CandidatePool.empty(len(trust_R)).with_copies(copies_R)
        self.best = self.without = tree.budget(self.pool.log_p_RP, len(trust_R), 0)

    def asks_the_head(self) -> bool:
        """Return whether the head should be fed and asked, knowing the copies: where there is none, it always is.

        It adds what is likely where a copy's first token is wrong: its own best child, and the best below that.
        """
        if not any(self.copies_R):
            return True
        first_R, second_R = (self._hits(depth) for depth in (1, 2))
        wrong_R = np.array([1.0 - copy.unasked(0) if copy else 1.0 for copy in self.copies_R])
        tokens = self.without.tokens + float((wrong_R * first_R * (1.0 + second_R)).sum())
        drafting = self.tree.latency.draft_seconds(len(self.trust_R), 1)
        return tokens / (self.without.seconds + drafting) >= self.without.rate

    def copy(self, roots: list[int]) -> list[DraftTree]:
        """Return the copies, or as much of them as pays: drafting that costs nothing."""
        return [row.tree for row in _trees(roots, self.pool, self.without.nodes)]

    def draw(self, state: HeadState, roots: list[int]) -> PricedRound:
        """Return the trees that pay best."""
        self.look_at(self.tree.shape.candidates(state, self.goes_on))
        return PricedRound(_trees(roots, self.pool, self.best.nodes), self.best.seconds, self.without)

    def look_at(self, columns: Columns) -> None:
        """Judge all candidates, if there is a level among them that was not judged yet."""
        levels = int(columns[2][0, -1])
        if levels > self.levels:
            self.levels = levels
            self.pool = CandidatePool.of(columns, self.trust_R).with_copies(self.copies_R)
            self.best = self.tree.budget(self.pool.log_p_RP, len(self.trust_R), levels)

    def goes_on(self, columns: Columns, frontier_RK: Tensor) -> bool:
        """Return whether a level more promises a higher rate."""
        self.look_at(columns)
        deeper = self.levels + 1
        promised_RK = self.pool.promised(frontier_RK.cpu().numpy(), np.log(self._hits(deeper))[:, None])
        log_p_RP = np.concatenate((self.pool.log_p_RP, promised_RK), axis=1)
        return self.tree.budget(log_p_RP, len(self.trust_R), deeper).rate > self.best.rate

    def _hits(self, depth: int) -> Floats:
        """Return each row's rate at which the best child at a depth is accepted below an accepted parent."""
        return np.asarray(self.tree.calibration.hit_rates(depth, self.temperatures)) * self.trust_R


def _trees(roots: list[int], pool: CandidatePool, nodes: int) -> list[PricedTree]:
    """Return every row's tree of so many nodes, fewer where a row has no more candidates."""
    if nodes == 0:
        return [PricedTree(DraftTree.root(root), 0.0, (False,)) for root in roots]
    found = []
    for r, best_C in enumerate(best_candidates(pool.log_p_RP, nodes)):
        chosen_C = best_C[pool.log_p_RP[r, best_C] > -np.inf]
        columns = (pool.tokens_RP[r], pool.parents_RP[r], pool.depths_RP[r], pool.log_p_RP[r])
        tree = tree_of(roots[r], *columns, chosen_C=chosen_C)
        head_C = pool.head_RP[r, chosen_C]
        of_head_N = (False, *np.isfinite(head_C).tolist())
        found.append(PricedTree(tree, float(np.exp(head_C).sum()), of_head_N))
    return found
