"""How many draft nodes pay: expected tokens of a round over the seconds it takes, maximised.

With probability P_i that node i is accepted, a tree of the n likeliest nodes emits 1 + P_1 + ... + P_n tokens on
average, because a node is accepted only below accepted parents and the bonus comes on top. The n likeliest nodes are a
tree: a child is never likelier than its parent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Budget:
    """A number of draft nodes per row, and the tokens and seconds of a round over all rows with it."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def expected_gains(log_p_RP: Floats, *, most: int) -> Floats:
    """Return how many drafts are accepted on average with 0, 1, ... of each row's likeliest candidates, [R, n + 1].

    `log_p_RP` are log-probabilities of acceptance of whole paths. n is `most` or all candidates.
    """
    likely_RP = np.sort(np.exp(log_p_RP), axis=1)[:, : -most - 1 : -1]
    gains_RN = np.zeros((len(likely_RP), likely_RP.shape[1] + 1))
    likely_RP.cumsum(1, out=gains_RN[:, 1:])
    return gains_RN


def best_budget(gains_RN: Floats, verify_N: Floats, drafting: float) -> Budget:
    """Return the budget of the highest rate, the smallest of equal ones.

    `verify_N[n]` are the seconds of a target forward with n nodes below every root, `drafting` those already spent.
    """
    count = min(gains_RN.shape[1], len(verify_N))
    tokens_N = len(gains_RN) + gains_RN[:, :count].sum(0)
    seconds_N = drafting + verify_N[:count]
    best = int((tokens_N / seconds_N).argmax())  # the first of equals
    return Budget(best, float(tokens_N[best]), float(seconds_N[best]))
