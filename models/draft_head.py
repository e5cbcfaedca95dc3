"""What every draft head is: states of the target in, one step at a time, logits over draft ids out.

    fuse(states)            -> the first feature, from the target's own states (which ones is the head's affair)
    advance(feature, ...)   -> the next feature
    logits(feature)         -> draft logits of a feature that `advance` returned
    step = advance, then logits

Training unrolls `advance` over training-time-test steps and hands the output states to the objective, decoding calls
`step` per tree level: the same modules in the same order. What differs is only which keys a query may see, and that is
the job of the `Attend` object handed in.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas.models.draft_layer import Attend
from eyas.models.head_config import HeadConfig
from eyas.models.rope import HeadRope
from eyas.models.target import Target
from eyas.models.target_head import TargetHead

Scored = TypeVar("Scored")


class DraftHead(nn.Module, ABC):
    """A draft head. Token embeddings are the frozen target's, lent by `lend`, never saved here."""

    rope: HeadRope
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self._embedding: list[nn.Module] = []
        if not config.full_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def lend(self, target: Target) -> None:
        """Lend what the head reads of its target but does not own."""
        self.use_embedding(target.embedding)

    def lent(self) -> list[object]:
        """Return what `lend` lent: copies of a head share it."""
        return [*self._embedding]

    def use_embedding(self, embedding: nn.Module) -> None:
        """Lend the target's input embedding module (kept in a list, so that it is neither trained nor saved)."""
        self._embedding = [embedding.requires_grad_(False)]

    def embed(self, token_ids_BT: Tensor) -> Tensor:
        """Return the target's own embeddings of target token ids, [B, T, D]."""
        assert self._embedding, "call use_embedding(target.embedding) before drafting or training"
        return self._embedding[0](token_ids_BT)

    @abstractmethod
    def states(self, aux_hidden: Tensor, final_hidden: Tensor) -> Tensor:
        """Return those of the target's states that this head reads: what `fuse` takes."""

    @abstractmethod
    def fuse(self, states_BTF: Tensor) -> Tensor:
        """Return the first feature_BTD from the target's states."""

    @abstractmethod
    def advance(self, feature_BTD: Tensor, token_ids_BT: Tensor, position_ids_BT: Tensor, context: Attend) -> Tensor:
        """Return the next feature_BTD.

        Slot t takes the feature at t and the embedding of token t+1, sits at RoPE position t (+ step) and predicts
        token t+2. Slots that the context does not keep come back no more.
        """

    @abstractmethod
    def logits(self, feature: Tensor) -> Tensor:
        """Return draft logits of features that `advance` returned, [..., D] -> [..., U]."""

    @abstractmethod
    def score(self, feature_ND: Tensor, scorer: Callable[[Tensor, TargetHead], Scored]) -> Scored:
        """Return `scorer(output states_ND, output head)` of features: the objective, which makes no whole logits."""

    def step(
        self,
        feature_BTD: Tensor,
        token_ids_BT: Tensor,
        position_ids_BT: Tensor,
        context: Attend,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (next feature_BTD, draft logits) of one draft step.

        `logits_at` are flat indices into B*T for which logits are wanted: the logits are then [n, U] instead of
        [B, T, U]. Logits are over draft ids; `to_target_ids` maps them.
        """
        feature = self.advance(feature_BTD, token_ids_BT, position_ids_BT, context)
        return feature, self.logits(feature if logits_at is None else feature.flatten(0, 1)[logits_at])

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return target token ids of draft ids, any shape."""
        return draft_ids if self.config.full_vocabulary else draft_ids + self.d2t[draft_ids]


def copy_head(head: DraftHead) -> DraftHead:
    """Return a copy of a head that shares what the target lent."""
    return copy.deepcopy(head, {id(part): part for part in head.lent()})
