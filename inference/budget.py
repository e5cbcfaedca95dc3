"""How many draft nodes pay: expected tokens of a round over the seconds it takes, maximised.

With probability P_i that node i is accepted, a tree of the n likeliest nodes emits 1 + P_1 + ... + P_n tokens on
average, because a node is accepted only below accepted parents and the bonus comes on top. The n likeliest nodes are a
tree: a child is never likelier than its parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """A number of draft nodes per row, and the tokens and seconds of a round over all rows with it."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def expected_gains(scores_RP: Tensor, depths_RP: Tensor, trust_R1: Tensor, *, most: int) -> Tensor:
    """Return how many drafts are accepted on average with 0, 1, ... of each row's likeliest candidates, [R, n + 1].

    `scores_RP` are log-probabilities of acceptance of whole paths; `trust_R1`, at most 1, corrects every step of them.
    n is `most` or all candidates.
    """
    trusted_RP = scores_RP.double().exp() * trust_R1.double() ** depths_RP
    likely_RP = trusted_RP.sort(dim=1, descending=True).values[:, :most]
    return torch.cat((torch.zeros(len(likely_RP), 1, dtype=torch.float64), likely_RP.cumsum(1)), dim=1)


def best_budget(gains_RN: Tensor, verify_N: Sequence[float], drafting: float) -> Budget:
    """Return the budget of the highest rate, the smallest of equal ones.

    `verify_N[n]` are the seconds of a target forward with n nodes below every root, `drafting` those already spent.
    """
    tokens_N = (len(gains_RN) + gains_RN.sum(0)).tolist()
    choices = [
        Budget(nodes, tokens, drafting + seconds)
        for nodes, (tokens, seconds) in enumerate(zip(tokens_N, verify_N, strict=False))
    ]
    return max(choices, key=lambda choice: choice.rate)
