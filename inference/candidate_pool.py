"""The pool a cost-aware tree is chosen from: the head's candidates and those copied from the text, judged together.

Parents stand before their children: the head's candidates come level by level, what only a copy proposes behind them.
Exactly one child of a node can be right, so what a copied token gains its siblings lose, and with them all below them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.inference.budget import Floats
from eyas.inference.copies import Copy
from eyas.inference.draft import Columns

Ints = NDArray[np.int64]
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
            return np.pad(column, ((0, 0), (0, width)), constant_values=value)

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
        copied = self.head_RP == -np.inf
        if copied.any():
            for r, k in zip(*np.nonzero(np.isfinite(below_RK)), strict=True):
                goes_on = copied[r] & (self.parents_RP[r] == frontier_RK[r, k])
                more = np.exp(below_RK[r, k]) - np.exp(self.log_p_RP[r, goes_on]).sum()
                below_RK[r, k] = np.log(more) if more > 0 else -np.inf
        return below_RK


def _add(copy: Copy, P: int, tokens_P: Ints, parents_P: Ints, depths_P: Ints, log_p_P: Floats) -> None:
    """Add a copy to one row in place; its first P candidates are the head's, room for the copy's own lies behind."""
    steps_P = log_p_P[:P] - np.where(parents_P[:P] < 0, 0.0, log_p_P[parents_P[:P]])
    node, own, here = -1, P, 0.0
    for step, token in enumerate(copy.tokens):
        children = np.flatnonzero(parents_P[:P] == node) if node < P else np.empty(0, dtype=np.int64)
        if len(children) == 0:
            rate, known = copy.unasked(step), np.empty(0, dtype=np.int64)
        else:
            best = children[steps_P[children].argmax()]
            known = children[tokens_P[children] == token]
            p = float(np.exp(steps_P[known[0]])) if len(known) else 0.0
            rate = copy.beside(step, best=bool(len(known)) and known[0] == best, p=p)
            left = np.log((1.0 - min(rate, SURE)) / (1.0 - min(p, SURE)))
            steps_P[children] += min(left, 0.0)
        here += float(np.log(rate))
        if len(known):
            node = int(known[0])
            steps_P[node] = np.log(rate)
            continue
        tokens_P[own], parents_P[own], depths_P[own], log_p_P[own] = token, node, step + 1, here
        node, own = own, own + 1
    for depth in range(1, int(depths_P[:P].max(initial=0)) + 1):
        level = np.flatnonzero(depths_P[:P] == depth)
        above_P = np.where(parents_P[level] < 0, 0.0, log_p_P[parents_P[level]])
        log_p_P[level] = above_P + steps_P[level]
