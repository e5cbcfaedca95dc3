"""Penalties and logits processors: what changes a request's logits by the text before them.

They see the text of the path: at a node of a draft tree, the committed text and the drafted tokens down to that node.
So a speculative round gives exactly the logits that plain decoding would have given there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.models.errors import UserError

# transformers' interface: (input_ids [1, T], scores [1, V]) -> scores [1, V]; must depend on nothing else.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Penalties:
    """What repeated tokens lose.

    `repetition` divides (or, below zero, multiplies) the logits of all tokens of prompt and text, as transformers does;
    `presence` is subtracted once from every token already generated, `frequency` as often as it was generated.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        if not self.repetition > 0:
            raise UserError(f"the repetition penalty must be above 0 (1 is none), given {self.repetition}.")

    def __bool__(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    def apply(self, logits_V: Tensor, text: list[int], *, generated_from: int) -> Tensor:
        """Return the penalised logits of the token after `text`, whose generated part starts at `generated_from`."""
        logits_V = logits_V.clone()
        if self.repetition != 1.0:
            seen = torch.tensor(sorted(set(text)), device=logits_V.device)
            scores = logits_V[seen]
            logits_V[seen] = torch.where(scores < 0, scores * self.repetition, scores / self.repetition)
        counts = Counter(text[generated_from:])
        if counts and (self.presence or self.frequency):
            seen = torch.tensor(list(counts), device=logits_V.device)
            often = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[seen] -= self.presence + self.frequency * often
        return logits_V


def apply_all(
    logits_V: Tensor,
    text: list[int],
    *,
    generated_from: int,
    penalties: Penalties,
    processors: tuple[LogitsProcessor, ...],
) -> Tensor:
    """Return the logits after the penalties and then the processors, in their order."""
    if penalties:
        logits_V = penalties.apply(logits_V, text, generated_from=generated_from)
    if processors:
        ids_1T = torch.tensor([text], device=logits_V.device)
        for processor in processors:
            scores_1V = processor(ids_1T, logits_V[None])
            if scores_1V.shape != (1, len(logits_V)):
                raise UserError(
                    f"a logits processor returned shape {tuple(scores_1V.shape)}, not (1, {len(logits_V)})."
                )
            logits_V = scores_1V[0]
    return logits_V
