"""How much each slot and step counts, by what the head itself drafts there now. All off by default.

With a(t, s) the probability that the draft of slot t at step s is accepted (the overlap of draft and teacher; 0 where
the token cannot be drafted), each weight is a detached factor in [0, S]:

pace     sum over m >= s of prod over i <= m of b(t, i), with b = (1 - pace) a + pace. Without smoothing that is the
         derivative of the expected accepted length sum_m prod_{i<=m} a(t, i) by log a(t, s): what a step is worth
         once the steps before it are right (D-PACE, arXiv 2605.18810, carried over to training-time test).
top_k    1 if the text's tokens of all earlier steps are among the head's top_k there, else 0: decoding never goes on
         below a token that was not drafted (the alignment mask of GRIFFIN, arXiv 2502.11018).
starts   floor + (1 - floor) v(t), with v(t) the expected number of rounds that start at slot t when rounds are
         replayed with a: v of a reply's first slot is 1, and a round at t goes on at t + n + 1 after n accepted drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotWeighting:
    """Which weights are multiplied; None leaves one out."""

    pace: float | None = None
    top_k: int | None = None
    start_floor: float | None = None

    @property
    def active(self) -> bool:
        """Whether any weight is on."""
        return (self.pace, self.top_k, self.start_floor) != (None, None, None)

    def weights(self, overlap_NS: Tensor, rank_NS: Tensor, supervised_NS: Tensor, line_length: int) -> Tensor:
        """Return the weight of every slot (flat over lines of `line_length`) and step, [N, S]."""
        accept_NS = overlap_NS * supervised_NS
        weights_NS = torch.ones_like(accept_NS)
        if self.pace is not None:
            weights_NS = weights_NS * pace_weights(accept_NS, supervised_NS, smoothing=self.pace)
        if self.top_k is not None:
            drafted_NS = (rank_NS < self.top_k).to(accept_NS.dtype).cumprod(-1)
            weights_NS[:, 1:] *= drafted_NS[:, :-1]
        if self.start_floor is not None:
            visits_N = round_starts(accept_NS, supervised_NS[:, 0], line_length)
            weights_NS = weights_NS * (self.start_floor + (1 - self.start_floor) * visits_N)[:, None]
        return weights_NS


UNWEIGHTED = SlotWeighting()


def pace_weights(accept_NS: Tensor, supervised_NS: Tensor, *, smoothing: float) -> Tensor:
    """Return the suffix sums of the running products of smoothed acceptance, over supervised steps only."""
    reach_NS = (((1 - smoothing) * accept_NS + smoothing) * supervised_NS).cumprod(-1)
    return reach_NS.flip(-1).cumsum(-1).flip(-1)


def round_starts(accept_NS: Tensor, supervised_N: Tensor, line_length: int) -> Tensor:
    """Return the expected number of rounds starting at each slot: replay, with probabilities in place of hits.

    A run of supervised slots is one reply; it ends with its line.
    """
    accept, supervised = accept_NS.double().tolist(), supervised_N.tolist()
    steps = accept_NS.shape[1]
    visits = [0.0] * len(accept)
    for t, here in enumerate(supervised):
        if not here:
            continue
        if t % line_length == 0 or not supervised[t - 1]:
            visits[t] = 1.0
        arriving = visits[t]
        for n in range(steps + 1):
            going_on = t + n + 1
            hit = accept[t][n] if n < steps else 0.0
            if going_on < len(visits) and all(supervised[t + 1 : going_on + 1]):
                visits[going_on] += arriving * (1 - hit)
            arriving *= hit
    return torch.tensor(visits, dtype=accept_NS.dtype, device=accept_NS.device)
