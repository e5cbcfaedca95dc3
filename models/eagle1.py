"""The EAGLE-1 draft head: a decoder layer that continues the target's own final states.

    emb(x_{t+1}) ─┐
                  ├─ fc ─ attention, no norm before it ─ MLP ─> o_t ── the target's own output head ──> x_{t+2}
    feature_t ────┘                                          └────> the next step's feature

The first feature is the target's final state *after* its last norm, and o_t is taught to equal the one at t+1, so it
goes to the target's head without a norm. Source: EAGLE (arXiv 2401.15077).
Module names equal the tensor names of the checkpoint that vLLM and SGLang load.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas.models.draft_head import DraftHead
from eyas.models.draft_layer import Attend, PlainLayer
from eyas.models.embedding_scale import check_embedding_scale
from eyas.models.head_config import HeadConfig
from eyas.models.rope import build_rope
from eyas.models.target import Target
from eyas.models.target_head import TargetHead

Scored = TypeVar("Scored")


class Eagle1Head(DraftHead):
    """An EAGLE-1 draft head; it owns no output head, `lend` lends the target's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(PlainLayer(config, layer=i, input_norm=i > 0) for i in range(config.num_layers))
        self.rope = build_rope(config)
        self._output: list[TargetHead] = []

    def lend(self, target: Target) -> None:
        """Lend the target's embedding and output head; raises UserError when it scales embeddings otherwise."""
        check_embedding_scale(target.embedding, self.config.embedding_scale)
        super().lend(target)
        self.use_output(target.head)

    def lent(self) -> list[object]:
        """Return the lent embedding and output head."""
        return [*super().lent(), *self._output]

    def use_output(self, output: TargetHead) -> None:
        """Lend an output head over the whole target vocabulary."""
        self._output = [output]

    def states(self, aux_hidden: Tensor, final_hidden: Tensor) -> Tensor:
        """Return the final states, post-norm."""
        return final_hidden

    def fuse(self, states_BTF: Tensor) -> Tensor:
        """Return the target's final states, which are the first features as they are."""
        assert states_BTF.shape[-1] == self.config.hidden_size, (
            f"final states are {states_BTF.shape[-1]} wide, this head continues states of {self.config.hidden_size}"
        )
        return states_BTF

    def advance(self, feature_BTD: Tensor, token_ids_BT: Tensor, position_ids_BT: Tensor, context: Attend) -> Tensor:
        """Return the layer's output: the guess at the target's final state one token on."""
        embeds = self.embed(token_ids_BT).to(feature_BTD.dtype)
        x = self.fc(torch.cat((embeds, feature_BTD), dim=-1))
        cos, sin = self.rope(x, position_ids_BT)
        for layer in self.layers:
            x = layer(x, cos, sin, context)
        return x

    def logits(self, feature: Tensor) -> Tensor:
        """Return the target's own logits of the features, in the target's dtype."""
        return self._borrowed().logits(feature)

    def score(self, feature_ND: Tensor, scorer: Callable[[Tensor, TargetHead], Scored]) -> Scored:
        """Return `scorer(features_ND, the target's output head)`."""
        return scorer(feature_ND, self._borrowed())

    def _borrowed(self) -> TargetHead:
        assert self._output, "call lend(target) before drafting or training"
        return self._output[0]
