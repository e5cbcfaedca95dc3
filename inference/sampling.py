"""How a request samples: temperature, then top-k, then top-p (the Hugging Face order), and which coins it uses.

The definition is `kernels/truncate.py`'s, ties included; `probabilities` does the same for rows of different settings
and sorts only as much of a row as its top-p needs. Coins are numbered: coin i decides token i of a request, whoever
proposes it, so at one seed the text of a deterministic tree is the text of plain sampling.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.truncate import probabilities_reference
from eyas.models.errors import UserError

DRAFT_SEED = (
    0x9E3779B97F4A7C15  # added to a request's seed for the coins that draft, which must not be those that verify
)


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything; `seed` fixes all coins of the request."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                f"temperature {self.temperature} must be 0 or more, top_k {self.top_k} 0 or more, "
                f"top_p {self.top_p} in (0, 1]."
            )

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the fp64 distribution the request samples from, for one vector of logits."""
        assert self.temperature > 0, "greedy requests have no distribution"
        return probabilities_reference(logits_V[None], self.temperature, self.top_k, self.top_p)[0]


def probabilities(logits_RV: Tensor, samplings: list[Sampling]) -> Tensor:
    """Return the fp64 distribution of each row under its own request's settings, [R, V]."""
    assert all(sampling.temperature > 0 for sampling in samplings), "greedy requests have no distribution"
    device, V = logits_RV.device, logits_RV.shape[-1]
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64, device=device)
    logits = logits_RV.double() / temperatures[:, None]
    cut = [r for r, sampling in enumerate(samplings) if 0 < sampling.top_k < V]
    if cut:
        ranks = torch.tensor([samplings[r].top_k - 1 for r in cut], device=device)
        best = logits[cut].topk(int(ranks.max()) + 1).values
        threshold = best.gather(1, ranks[:, None])
        logits[cut] = logits[cut].masked_fill(logits[cut] < threshold, float("-inf"))
    nucleus = [r for r, sampling in enumerate(samplings) if sampling.top_p < 1]
    if nucleus:
        top_p = torch.tensor([samplings[r].top_p for r in nucleus], dtype=torch.float64, device=device)
        logits[nucleus] = _keep_nucleus(logits[nucleus], top_p)
    return logits.softmax(-1)


def _keep_nucleus(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Return logits whose tail behind the mass top_p is -inf; looks at 64 tokens, then at 8 times more, and so on.

    The last one kept takes its equals along, wherever they stand.
    """
    weights, count = logits_RV.softmax(-1), 64
    while True:
        best = weights.topk(min(count, weights.shape[-1]))
        upto = best.values.cumsum(-1)
        if count >= weights.shape[-1] or bool((upto[:, -1] >= top_p_R).all()):
            break
        count *= 8
    kept = (upto - best.values) < top_p_R[:, None]
    least_R1 = logits_RV.gather(1, best.indices).masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
    return logits_RV.masked_fill(logits_RV < least_R1, float("-inf"))


@dataclass
class Coins:
    """The numbered uniforms in [0, 1) of one seed, fp64."""

    seed: int
    _drawn: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed % 2**64)

    def take(self, start: int, count: int) -> list[float]:
        """Return coins start .. start+count-1."""
        while len(self._drawn) < start + count:
            self._drawn.append(float(torch.rand((), generator=self._generator, dtype=torch.float64)))
        return self._drawn[start : start + count]
