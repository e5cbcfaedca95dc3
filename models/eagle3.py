"""The EAGLE-3 draft head: a decoder layer that reads target features and token embeddings and predicts two ahead.

    feature_t ──hidden_norm──┐
                             ├─ [emb ; feature] ─ attention ─ (+ feature) ─ MLP ─> o_t ── norm ── lm_head ──> x_{t+2}
    emb(x_{t+1}) ─input_norm─┘                                                    └────> the next step's feature

The first feature is fc of the target's aux hidden states (pre-norm), concatenated in ascending layer order. Layers
behind the first (`num_layers` > 1) are plain Llama layers, as vLLM reads them.
Source: EAGLE-3 (arXiv 2503.01840); 3.1 flags `fc_norm` and `norm_output` as vLLM reads them.
Module names equal the tensor names of the cross-engine checkpoint.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas.models.draft_head import DraftHead
from eyas.models.draft_layer import Attend, FirstLayer, PlainLayer
from eyas.models.head_config import HeadConfig
from eyas.models.layers import OutputLinear, RMSNorm
from eyas.models.rope import build_rope
from eyas.models.target_head import TargetHead

Scored = TypeVar("Scored")


class Eagle3Head(DraftHead):
    """An EAGLE-3 draft head."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.aux_width, D, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.aux_width, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in config.aux_layers)
        self.midlayer = FirstLayer(config)
        self.layers = nn.ModuleDict({str(i): PlainLayer(config, layer=i) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(D, eps=eps)
        self.lm_head = OutputLinear(D, config.draft_vocab_size, bias=False)
        self.rope = build_rope(config)

    def states(self, aux_hidden: Tensor, final_hidden: Tensor) -> Tensor:
        """Return the aux hidden states."""
        return aux_hidden

    def fuse(self, states_BTF: Tensor) -> Tensor:
        """Return the first feature_BTD from the target's concatenated aux hidden states (ascending layers)."""
        assert states_BTF.shape[-1] == self.config.aux_width, (
            f"aux states are {states_BTF.shape[-1]} wide, this head reads {len(self.config.aux_layers)} layers of "
            f"{self.config.target_hidden_size} = {self.config.aux_width}"
        )
        x = states_BTF
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            chunks = x.split(self.config.target_hidden_size, dim=-1)
            x = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(x)

    def advance(self, feature_BTD: Tensor, token_ids_BT: Tensor, position_ids_BT: Tensor, context: Attend) -> Tensor:
        """Return the last layer's output, normed when the head feeds normed features back (norm_output)."""
        embeds = self.embed(token_ids_BT).to(feature_BTD.dtype)
        cos, sin = self.rope(feature_BTD, position_ids_BT)
        out_BTD = self.midlayer(feature_BTD, embeds, cos, sin, context)
        for layer in self.layers.values():
            out_BTD = layer(out_BTD, cos, sin, context)
        return self.norm(out_BTD) if self.config.norm_output else out_BTD

    def logits(self, feature: Tensor) -> Tensor:
        """Return draft logits of features that `advance` returned."""
        return self.lm_head(self._output_states(feature))

    def score(self, feature_ND: Tensor, scorer: Callable[[Tensor, TargetHead], Scored]) -> Scored:
        """Return `scorer(normed states_ND, lm_head as an output head)`."""
        return self.lm_head.score(
            self._output_states(feature_ND), lambda states, weight: scorer(states, TargetHead(weight, None, 1.0, None))
        )

    def _output_states(self, feature: Tensor) -> Tensor:
        return feature if self.config.norm_output else self.norm(feature)
