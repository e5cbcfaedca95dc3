"""The losses of one slot, each a function of four numbers that the draft distribution q makes with the teacher p.

    cross    -sum p log q        q = softmax of the draft logits z, p the target's renormalised over the draft ids
    entropy  -sum p log p        constant: it never moves a gradient
    hard     -log q[argmax p]
    overlap  sum min(p, q)          the probability that verification accepts a token drawn from q (1 - total variation)

    kl    cross                                    equal to KL(p || q) up to the entropy
    ce    hard
    tv    1 - overlap
    lk    lambda (cross - entropy) + (1 - lambda) (1 - overlap),   lambda = exp(-3 overlap), no gradient through lambda

lk is the acceptance-aware hybrid of arXiv 2602.23881: KL while acceptance is low, acceptance itself once it is high.
Because a loss sees only these numbers, its gradient by the logits is always the same three vectors:

    d cross / dz   = q - p
    d hard / dz    = q - onehot(argmax p)
    d overlap / dz = q * ([q < p] - sum of q where q < p)

so a loss states its value and how strongly it pulls on each, and `kernels/draft_gradients.py` does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.draft_gradients import Pull
from eyas.kernels.draft_loss import DraftTerms
from eyas.models.errors import UserError, nearest

LK_ETA = 3.0


@dataclass(frozen=True)
class SlotLoss:
    """A loss and the terms it reads."""

    needs: frozenset[str]
    pull: Callable[[DraftTerms], Pull]


def _kl(terms: DraftTerms) -> Pull:
    return Pull(terms.cross_N, cross=1.0)


def _ce(terms: DraftTerms) -> Pull:
    return Pull(terms.hard_N, hard=1.0)


def _tv(terms: DraftTerms) -> Pull:
    return Pull(1 - terms.overlap_N, overlap=-1.0)


def _lk(terms: DraftTerms) -> Pull:
    blend_N = torch.exp(-LK_ETA * terms.overlap_N.detach())
    loss_N = blend_N * (terms.cross_N - terms.entropy_N) + (1 - blend_N) * (1 - terms.overlap_N)
    return Pull(loss_N, cross=blend_N, overlap=blend_N - 1)


OBJECTIVES: dict[str, SlotLoss] = {
    "kl": SlotLoss(frozenset({"cross"}), _kl),
    "ce": SlotLoss(frozenset({"hard"}), _ce),
    "tv": SlotLoss(frozenset({"overlap"}), _tv),
    "lk": SlotLoss(frozenset({"cross", "entropy", "overlap"}), _lk),
}


@dataclass(frozen=True)
class LossMix:
    """A weighted sum of losses: pairs of a name in OBJECTIVES and a positive weight."""

    parts: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        for name, weight in self.parts:
            if name not in OBJECTIVES:
                raise UserError(
                    f"unknown loss {name!r}; there are {', '.join(OBJECTIVES)}.{nearest(name, list(OBJECTIVES))}"
                )
            if not weight > 0:
                raise UserError(f"the weight of loss {name} must be positive, given {weight}.")

    @property
    def needs(self) -> frozenset[str]:
        """The terms that some part reads."""
        return frozenset().union(*(OBJECTIVES[name].needs for name, _ in self.parts))

    def pull(self, terms: DraftTerms) -> Pull:
        """Return the weighted sum of the parts."""
        pulls = [(weight, OBJECTIVES[name].pull(terms)) for name, weight in self.parts]
        return Pull(
            loss_N=torch.stack([weight * pull.loss_N for weight, pull in pulls]).sum(0),
            cross=_weighted([(weight, pull.cross) for weight, pull in pulls]),
            hard=_weighted([(weight, pull.hard) for weight, pull in pulls]),
            overlap=_weighted([(weight, pull.overlap) for weight, pull in pulls]),
        )


def _weighted(parts: list[tuple[float, Tensor | float]]) -> Tensor | float:
    total: Tensor | float = 0.0
    for weight, value in parts:
        total = total + weight * value
    return total
