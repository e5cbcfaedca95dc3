"""The EAGLE-3 draft head: one decoder layer that reads target features and token embeddings and predicts two ahead.

    feature_t ──hidden_norm──┐
                             ├─ [emb ; feature] ─ attention ─ (+ feature) ─ MLP ─> o_t ── norm ── lm_head ──> x_{t+2}
    emb(x_{t+1}) ─input_norm─┘                                                    └────> the next step's feature

`step` is the only forward: training unrolls it over training-time-test steps, decoding calls it per tree level. What
differs between the two is only which keys a query may see, and that is the job of the `Attend` object handed in.
Source: EAGLE-3 (arXiv 2503.01840); 3.1 flags `fc_norm` and `norm_output` as vLLM reads them.
Module names equal the tensor names of the cross-engine checkpoint.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.models.head_config import HeadConfig
from eyas.models.layers import GatedMLP, RMSNorm
from eyas.models.rope import build_rope, rotate


class Attend(Protocol):
    """What a draft step attends to: a training-time-test context or a draft KV cache."""

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        """Take this step's queries, keys and values (rotated), keep the keys, return the attention output_BHTd."""
        ...


class DraftAttention(nn.Module):
    """Attention whose inputs are twice the hidden size wide: [normed embedding ; normed feature]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, context: Attend) -> Tensor:
        B, T, _ = x_BTE.shape
        q, k, v = (
            proj(x_BTE).view(B, T, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BHTd = context.attend(rotate(q, cos_BTd, sin_BTd), rotate(k, cos_BTd, sin_BTd), v)
        return self.o_proj(out_BHTd.transpose(1, 2).reshape(B, T, -1))


class DraftLayer(nn.Module):
    """The single decoder layer of the head."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(D, eps=eps)
        self.hidden_norm = RMSNorm(D, eps=eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(D, eps=eps)
        self.mlp = GatedMLP(D, config.intermediate_size, activation=config.hidden_act)

    def forward(self, feature_BTD: Tensor, embeds_BTD: Tensor, cos: Tensor, sin: Tensor, context: Attend) -> Tensor:
        normed = self.hidden_norm(feature_BTD)
        residual = normed if self.norm_before_residual else feature_BTD
        x = torch.cat((self.input_layernorm(embeds_BTD), normed), dim=-1)
        x = residual + self.self_attn(x, cos, sin, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head. Token embeddings are the frozen target's, lent by `use_embedding`, never saved here."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        D, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.aux_width, D, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.aux_width, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in config.aux_layers)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(D, eps=eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size, bias=False)
        self.rope = build_rope(config)
        self._embedding: list[nn.Module] = []
        if not config.full_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def use_embedding(self, embedding: nn.Module) -> None:
        """Lend the target's input embedding module (kept in a list, so that it is neither trained nor saved)."""
        self._embedding = [embedding.requires_grad_(False)]

    def embed(self, token_ids_BT: Tensor) -> Tensor:
        """Return the target's own embeddings of target token ids, [B, T, D]."""
        assert self._embedding, "call use_embedding(target.embedding) before drafting or training"
        return self._embedding[0](token_ids_BT)

    def fuse(self, aux_hidden_BTF: Tensor) -> Tensor:
        """Return the first feature_BTD from the target's concatenated aux hidden states (ascending layers)."""
        assert aux_hidden_BTF.shape[-1] == self.config.aux_width, (
            f"aux states are {aux_hidden_BTF.shape[-1]} wide, this head reads {len(self.config.aux_layers)} layers of "
            f"{self.config.target_hidden_size} = {self.config.aux_width}"
        )
        x = aux_hidden_BTF
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            chunks = x.split(self.config.target_hidden_size, dim=-1)
            x = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(x)

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

        Slot t takes the feature at t and the embedding of token t+1, sits at RoPE position t (+ step) and predicts
        token t+2. `logits_at` are flat indices into B*T for which logits are wanted: the logits are then [n, U]
        instead of [B, T, U]. Logits are over draft ids; `to_target_ids` maps them.
        """
        embeds = self.embed(token_ids_BT).to(feature_BTD.dtype)
        cos, sin = self.rope(feature_BTD, position_ids_BT)
        out_BTD = self.midlayer(feature_BTD, embeds, cos, sin, context)
        if self.config.norm_output:
            feature_out = self.norm(out_BTD)
            chosen = feature_out if logits_at is None else feature_out.flatten(0, 1)[logits_at]
        else:
            feature_out = out_BTD
            chosen = self.norm(out_BTD if logits_at is None else out_BTD.flatten(0, 1)[logits_at])
        return feature_out, self.lm_head(chosen)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return target token ids of draft ids, any shape."""
        return draft_ids if self.config.full_vocabulary else draft_ids + self.d2t[draft_ids]
