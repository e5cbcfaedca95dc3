"""Training-time test written out slot by slot from the contract: no masks, no batches, one query at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.data.feature_row import FeatureRow
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import Target
from eyas.models.warm_start import vocabulary_of
from eyas.train.draft_loss import draft_loss_reference
from eyas.train.losses import LossMix


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square, times weight."""
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turn(x_Hd: Tensor, position: int, theta: float) -> Tensor:
    """Return vectors rotated to a position, Llama's pairing: dimension i with i + d/2."""
    half = x_Hd.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x_Hd[:, :half], x_Hd[:, half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SlowHead:
    """The head's equations on single vectors."""

    def __init__(self, head: Eagle3Head, target: Target) -> None:
        self.head, self.config = head, head.config
        self.embedding_VD = target.embedding.weight
        self.theta = head.config.rope_parameters["rope_theta"]

    def project(self, feature_D: Tensor, token: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q, k, v) of one slot, q and k rotated."""
        layer, eps, d = self.head.midlayer, self.config.rms_norm_eps, self.config.head_dim
        x = torch.cat((
            rms(self.embedding_VD[token], layer.input_layernorm.weight, eps),
            rms(feature_D, layer.hidden_norm.weight, eps),
        ))  # fmt: skip
        attention = layer.self_attn
        q, k, v = (proj.weight @ x for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        return turn(q.view(-1, d), position, self.theta), turn(k.view(-1, d), position, self.theta), v.view(-1, d)

    def finish(self, feature_D: Tensor, q_Hd: Tensor, seen: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return (next feature, draft logits) of a slot whose query sees the given (key, value) pairs."""
        layer, eps, d = self.head.midlayer, self.config.rms_norm_eps, self.config.head_dim
        per_group = self.config.num_attention_heads // self.config.num_key_value_heads
        parts = []
        for h, q in enumerate(q_Hd):
            scores = torch.stack([q @ k[h // per_group] for k, _ in seen]) / d**0.5
            values = torch.stack([v[h // per_group] for _, v in seen])
            parts.append(scores.softmax(0) @ values)
        x = feature_D + layer.self_attn.o_proj.weight @ torch.cat(parts)
        normed = rms(x, layer.post_attention_layernorm.weight, eps)
        mlp = layer.mlp
        out = x + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ normed) * (mlp.up_proj.weight @ normed))
        return out, self.head.lm_head.weight @ rms(out, self.head.norm.weight, eps)


def slow_logits(head: Eagle3Head, target: Target, row: FeatureRow, steps: int) -> list[list[Tensor]]:
    """Return draft logits by step and slot of one document; a step ends where its tokens do."""
    slow, ids = SlowHead(head, target), row.input_ids_T.tolist()
    features = [head.fc.weight @ aux for aux in row.aux_hidden_TF]
    first_step: list[tuple[Tensor, Tensor]] = []
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ids]
    result = []
    for s in range(steps):
        logits_of_step, next_features = [], []
        for t in range(len(ids) - 1 - s):
            q, k, v = slow.project(features[t], ids[t + 1 + s], t + s)
            if s == 0:
                first_step.append((k, v))
            else:
                own[t].append((k, v))
            feature, logits = slow.finish(features[t], q, [*first_step[: t + 1], *own[t]])
            next_features.append(feature)
            logits_of_step.append(logits)
        features = next_features
        result.append(logits_of_step)
    return result


def trained_slots(row: FeatureRow, step: int, *, drafted: set[int] | None) -> list[int]:
    """Return the slots of a document that a step trains; `drafted` are the tokens the head can draft, None for any."""
    mask, best, T = row.generated_mask_T.tolist(), row.argmax_T.tolist(), len(row)
    slots = [t for t in range(T - 2 - step) if all(mask[t + 1 : t + 3 + step])]
    return [t for t in slots if drafted is None or best[t + 1 + step] in drafted]


def slow_loss(
    head: Eagle3Head, target: Target, rows: list[FeatureRow], *, loss: str, weights: tuple[float, ...], keep_oov: bool
) -> Tensor:
    """Return sum over steps of weight * mean over the trained slots of all rows."""
    ids_U = vocabulary_of(head).token_ids_U
    drafted = None if keep_oov else set(ids_U.tolist())
    losses: list[list[Tensor]] = [[] for _ in weights]
    for row in rows:
        by_step = slow_logits(head, target, row, len(weights))
        for s in range(len(weights)):
            for t in trained_slots(row, s, drafted=drafted):
                p_U = target.head.logits(row.final_hidden_TD[t + 1 + s])[ids_U].softmax(-1)
                losses[s].append(draft_loss_reference(by_step[s][t][None], p_U[None], LossMix(((loss, 1.0),)))[0])
    return torch.stack([w * torch.stack(of).mean() for w, of in zip(weights, losses, strict=True) if of]).sum()
