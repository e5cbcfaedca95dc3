"""The target's output head with everything it does to a state: weight, bias, logit scale, logit soft-cap.

Teacher logits are rebuilt from stored final states through this class alone, so a family whose logits it cannot
rebuild is found by `Target.self_check` before anything is trained on them.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eyas.models.packed_linear import can_pack, pack, packed_product
from eyas.models.target_loading import plain_weight


@dataclass(frozen=True)
class TargetHead:
    """logits = softcap(scale * (W h + b)); h is the target's state after its final norm."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    packed: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TargetHead":
        """Return the head of a causal LM, tied or not."""
        layer = model.get_output_embeddings()
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return cls(
            weight_VD=plain_weight(layer),
            bias_V=None if getattr(layer, "bias", None) is None else layer.bias.detach(),
            scale=scale / divisor,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def rows(self, token_ids: Tensor) -> "TargetHead":
        """Return the head restricted to the given token ids, in their order."""
        bias = None if self.bias_V is None else self.bias_V[token_ids]
        return TargetHead(self.weight_VD[token_ids].contiguous(), bias, self.scale, self.softcap)

    def to(self, *, dtype: torch.dtype, device: torch.device | str) -> "TargetHead":
        """Return the head in another dtype or on another device."""
        bias = None if self.bias_V is None else self.bias_V.to(device, dtype)
        return TargetHead(self.weight_VD.to(device, dtype), bias, self.scale, self.softcap)

    def pack(self, *, rows: int) -> "TargetHead":
        """Return the head with its weight also packed for inputs of about `rows` rows, where the machine can."""
        return replace(self, packed=pack(self.weight_VD, rows=rows)) if can_pack(self.weight_VD) else self

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the head's rows of final states, [..., D] -> [..., rows]."""
        hidden = hidden.to(self.weight_VD.device, self.weight_VD.dtype)
        if self.packed is None:
            logits = F.linear(hidden, self.weight_VD, self.bias_V)
        else:
            logits = packed_product(hidden, self.packed, self.bias_V)
        return self._shaped(logits)

    def logits_at(self, hidden_ND: Tensor, rows_N: Tensor) -> Tensor:
        """Return the logit of one row of the head for each final state, [N]."""
        logits_N = torch.linalg.vecdot(
            hidden_ND.to(self.weight_VD.device, self.weight_VD.dtype), self.weight_VD[rows_N]
        )
        return self._shaped(logits_N if self.bias_V is None else logits_N + self.bias_V[rows_N])

    def _shaped(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
