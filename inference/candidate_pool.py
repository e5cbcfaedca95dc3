"""The pool a cost-aware tree is chosen from: the head's candidates and those copied from the text, judged together.

Parents stand before their children: the head's candidates come level by level, what only a copy proposes behind them.
Exactly one child of a node can be right, so what a copied token gains its siblings lose, and with them all below them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.inference.budget import Floats
from eyas.inference.copies import Copy
from eyas.inference.draft import Columns, Ints

SURE = 1.0 - 1e-9


@dataclass(frozen=True)
class CandidatePool:
    """Candidates of every row, [R, P]: token, parent (an index of the pool, -1: the root) and depth.

    `log_p_RP`: log-probability that the whole path is accepted, -inf where a row has no such candidate.
    `head_RP`: the same as the head's calibrated scores alone have it, -inf for what only a copy proposes.
    """

    tokens_RP: Ints
    parents_RP: Ints
    depths_RP: Ints
    log_p_RP: Floats
    head_RP: Floats

    @classmethod
    def of(cls, columns: Columns, trust_R: list[float]) -> "CandidatePool":
        """Return the pool of a head's candidates; `trust_R`, at most 1, corrects every step of each row's paths."""
        tokens, parents, depths, scores = (column.cpu().numpy() for column in columns)
        head_RP = scores.astype(np.float64)
        log_p_RP = head_RP + depths * np.log(np.asarray(trust_R))[:, None]
        return cls(tokens, parents, depths, log_p_RP, head_RP)

    @classmethod
    def empty(cls, rows: int) -> "CandidatePool":
        """Return the pool of rows for which nothing was drafted."""
        whole, real = np.empty((rows, 0), dtype=np.int64), np.empty((rows, 0))
        return cls(whole, whole, whole, real, real)

    def with_copies(self, copies_R: list[Copy | None]) -> "CandidatePool":
        """Return the pool with each row's copy as a path from its root: known candidates grow likelier, others join."""
        width = max((len(copy.tokens) for copy in copies_R if copy), default=0)
        if width == 0:
            return self

        def widened(column: NDArray[Any], value: float) -> NDArray[Any]:
            wide = np.empty((len(column), column.shape[1] + width), dtype=column.dtype)
            wide[:, : column.shape[1]], wide[:, column.shape[1] :] = column, value
            return wide

        tokens, parents, depths = widened(self.tokens_RP, 0), widened(self.parents_RP, -1), widened(self.depths_RP, 1)
        log_p, head = widened(self.log_p_RP, -np.inf), widened(self.head_RP, -np.inf)
        P = self.tokens_RP.shape[1]
        for r, copy in enumerate(copies_R):
            if copy is not None:
                _add(copy, P, tokens[r], parents[r], depths[r], log_p[r])
        return CandidatePool(tokens, parents, depths, log_p, head)

    def promised(self, frontier_RK: Ints, step_R1: Floats) -> Floats:
        """Return log-probabilities of the best children below some candidates, which the head has not drawn yet.

        `step_R1`: log-probability of such a child below an accepted parent. Where a copy goes on from a candidate,
        only what the head's child would add to it counts.
        """
        below_RK = np.take_along_axis(self.log_p_RP, frontier_RK, axis=1) + step_R1
        for r, place in np.argwhere((self.head_RP == -np.inf) & (self.log_p_RP > -np.inf)):
            for k in np.flatnonzero(frontier_RK[r] == self.parents_RP[r, place]):
                more = math.exp(below_RK[r, k]) - math.exp(self.log_p_RP[r, place])
                below_RK[r, k] = math.log(more) if more > 0 else -np.inf
        return below_RK


def _add(copy: Copy, P: int, tokens_P: Ints, parents_P: Ints, depths_P: Ints, log_p_P: Floats) -> None:
    """Add a copy to one row in place; its first P candidates are the head's, room for the copy's own lies behind."""
    tokens, parents, log_p = tokens_P[:P].tolist(), parents_P[:P].tolist(), log_p_P[:P].tolist()
    steps = [own - (log_p[parent] if parent >= 0 else 0.0) for own, parent in zip(log_p, parents, strict=True)]
    node, own, here = -1, P, 0.0
    for step, token in enumerate(copy.tokens):
        children = [place for place in range(P) if parents[place] == node]
        known = next((child for child in children if tokens[child] == token), None)
        if not children:
            rate = copy.unasked(step)
        else:
            best = max(children, key=steps.__getitem__)  # the first of equals
            p = 0.0 if known is None else math.exp(steps[known])
            rate = copy.beside(step, best=known == best, p=p)
            left = min(math.log((1.0 - min(rate, SURE)) / (1.0 - min(p, SURE))), 0.0)
            for child in children:
                steps[child] += left
        here += math.log(rate)
        if known is not None:
            node, steps[known] = known, math.log(rate)
            continue
        tokens_P[own], parents_P[own], depths_P[own], log_p_P[own] = token, node, step + 1, here
        node, own = own, own + 1
    for place, (parent, likely) in enumerate(zip(parents, steps, strict=True)):
        log_p[place] = likely + (log_p[parent] if parent >= 0 else 0.0)
    log_p_P[:P] = log_p
