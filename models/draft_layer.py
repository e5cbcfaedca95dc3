"""The decoder layer of a draft head: attention over whatever the context shows, and a gated MLP."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.head_config import HeadConfig
from eyas.models.layers import GatedMLP, RMSNorm
from eyas.models.rope import rotate


class Attend(Protocol):
    """What a draft step attends to: a training-time-test context or a draft KV cache."""

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, *, layer: int = 0) -> Tensor:
        """Take this step's queries, keys and values (rotated), keep the keys, return the attention output_BHTd.

        Every layer of a head has keys of its own; a step calls its layers in ascending order.
        """
        ...

    def kept(self, x_BTD: Tensor) -> Tensor:
        """Return those of the layer's rows that the attention of this step had an output for: usually all."""
        ...


class DraftAttention(nn.Module):
    """Grouped-query attention without biases over inputs of any width."""

    def __init__(self, config: HeadConfig, *, width: int, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.layer = layer
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, cos_BTr: Tensor, sin_BTr: Tensor, context: Attend) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in self._project(x_BTE))
        q, k = rotate(q, cos_BTr, sin_BTr), rotate(k, cos_BTr, sin_BTr)
        out_BHTd = context.attend(q, k, v, layer=self.layer)
        return self.o_proj(out_BHTd.transpose(1, 2).flatten(2))

    def _project(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values; in training on a CPU by one product, as narrow ones run at a fifth of it."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if x_BTE.device.type != "cpu" or not torch.is_grad_enabled():
            return tuple(projection(x_BTE) for projection in projections)
        weights = [projection.weight for projection in projections]
        if not all(weight.numel() for weight in weights):  # ZeRO-3 fills a weight for its own module alone
            return tuple(projection(x_BTE) for projection in projections)
        return F.linear(x_BTE, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)


class FirstLayer(nn.Module):
    """EAGLE-3's layer: attention reads [normed embedding ; normed feature], the residual carries the feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(D, eps=eps)
        self.hidden_norm = RMSNorm(D, eps=eps)
        self.self_attn = DraftAttention(config, width=2 * D, layer=0)
        self.post_attention_layernorm = RMSNorm(D, eps=eps)
        self.mlp = GatedMLP(D, config.intermediate_size, activation=config.hidden_act)

    def forward(self, feature_BTD: Tensor, embeds_BTD: Tensor, cos: Tensor, sin: Tensor, context: Attend) -> Tensor:
        normed = self.hidden_norm(feature_BTD)
        residual = normed if self.norm_before_residual else feature_BTD
        x = torch.cat((self.input_layernorm(embeds_BTD), normed), dim=-1)
        attended = self.self_attn(x, cos, sin, context)
        x = context.kept(residual) + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLayer(nn.Module):
    """A Llama layer: EAGLE-1's, the first without a norm before its attention, and EAGLE-3's behind the first."""

    def __init__(self, config: HeadConfig, *, layer: int, input_norm: bool = True) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        if input_norm:
            self.input_layernorm = RMSNorm(D, eps=eps)
        self.input_norm = input_norm
        self.self_attn = DraftAttention(config, width=D, layer=layer)
        self.post_attention_layernorm = RMSNorm(D, eps=eps)
        self.mlp = GatedMLP(D, config.intermediate_size, activation=config.hidden_act)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, context: Attend) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTD) if self.input_norm else x_BTD, cos, sin, context)
        x = context.kept(x_BTD) + attended
        return x + self.mlp(self.post_attention_layernorm(x))
