"""How a request samples: temperature, then top-k, then top-p (the Hugging Face order)."""

from dataclasses import dataclass

from torch import Tensor

from eyas.models.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything; `seed` fixes all coins of the request."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                f"temperature {self.temperature} must be 0 or more, top_k {self.top_k} 0 or more, "
                f"top_p {self.top_p} in (0, 1]."
            )

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the fp64 distribution the request samples from, for one vector of logits."""
        assert self.temperature > 0, "greedy requests have no distribution"
        logits = logits_V.double() / self.temperature
        if 0 < self.top_k < len(logits):
            threshold = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        if self.top_p < 1:
            ranked = logits.sort(descending=True)
            before = ranked.values.softmax(-1).cumsum(-1) - ranked.values.softmax(-1)
            logits = logits.index_fill(0, ranked.indices[before >= self.top_p], float("-inf"))
        return logits.softmax(-1)
