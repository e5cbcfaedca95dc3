"""How a request samples: temperature, then top-k, then top-p (the Hugging Face order), and which coins it uses.

The definition is `kernels/truncate.py`'s, ties included; `probabilities` does the same for rows of different settings
and sorts only as much of a row as its top-p needs. `draw_tokens` draws without a distribution over the vocabulary where
a top-p leaves few tokens; its masses are then those of an fp32 softmax, as in the kernels. Coins are numbered: coin i
decides token i of a request, whoever proposes it, so at one seed the text of a deterministic tree is that of plain
sampling.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.truncate import probabilities_reference
from eyas.models.draw import draw
from eyas.models.errors import UserError
from eyas.models.nucleus import nucleus

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
    device = logits_RV.device
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64, device=device)
    p_RV = _keep_top_k(logits_RV.double() / temperatures[:, None], samplings).softmax(-1)
    cut = [r for r, sampling in enumerate(samplings) if sampling.top_p < 1]
    if cut:
        top_p = torch.tensor([samplings[r].top_p for r in cut], dtype=torch.float64, device=device)
        whole = p_RV[cut]
        weights_RK, ids_RK = nucleus(whole, top_p)
        weights_RK /= weights_RK.sum(-1, keepdim=True)
        p_RV[cut] = whole.zero_().scatter_add_(1, ids_RK, weights_RK)  # behind a nucleus stands id 0, weighing 0
    return p_RV


def draw_tokens(logits_RV: Tensor, samplings: list[Sampling], coins_R: Tensor) -> Tensor:
    """Return the token that each row's coin draws under its own request's settings; int64 [R] on the CPU.

    Tokens are drawn in the order of their ids, so every row's text is the same whoever stands beside it.
    """
    tokens_R = torch.empty(len(samplings), dtype=torch.int64)
    few = [r for r, sampling in enumerate(samplings) if sampling.top_p < 1]
    many = [r for r, sampling in enumerate(samplings) if sampling.top_p == 1]
    if many:
        whole = logits_RV if not few else logits_RV[many]
        tokens_R[many] = draw(probabilities(whole, [samplings[r] for r in many]).cpu(), coins_R[many])
    if few:
        logits = (logits_RV if not many else logits_RV[few]).float()
        settings, device = [samplings[r] for r in few], logits.device
        warm = logits / torch.tensor([one.temperature for one in settings], device=device)[:, None]
        top_p_R = torch.tensor([one.top_p for one in settings], dtype=torch.float64, device=device)
        weights_RK, ids_RK = nucleus(_keep_top_k(warm, settings).softmax(-1), top_p_R)
        ids_RK, order_RK = ids_RK.masked_fill(weights_RK == 0, logits.shape[-1]).sort(-1)
        places = draw(weights_RK.gather(1, order_RK).cpu(), coins_R[few])
        tokens_R[few] = ids_RK.cpu().gather(1, places[:, None]).squeeze(1)
    return tokens_R


def _keep_top_k(logits_RV: Tensor, samplings: list[Sampling]) -> Tensor:
    """Set what is below its row's top-k to -inf, in place, and return the logits; equals of the last one stay."""
    V = logits_RV.shape[-1]
    cut = [r for r, sampling in enumerate(samplings) if 0 < sampling.top_k < V]
    if cut:
        ranks = torch.tensor([samplings[r].top_k - 1 for r in cut], device=logits_RV.device)
        best = logits_RV[cut].topk(int(ranks.max()) + 1).values
        threshold = best.gather(1, ranks[:, None])
        logits_RV[cut] = logits_RV[cut].masked_fill(logits_RV[cut] < threshold, float("-inf"))
    return logits_RV


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
