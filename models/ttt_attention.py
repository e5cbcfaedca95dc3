"""What a training-time-test step may see: step-0 keys up to its slot, and its own later keys (one diagonal per step).

    query (t, s) sees   keys (j, 0) for j <= t in the same document     and     keys (t, 1) .. (t, s)

That is exactly what the draft cache shows a node of depth s when decoding. The step-0 mask never shifts with s.
Memory is one score matrix of T x T per step plus s numbers per slot: nothing of T x (T*S) is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class TTTContext:
    """The attention context of one training batch, alive for the S steps of one forward pass."""

    def __init__(self, document_BT: Tensor) -> None:
        """`document_BT`: document number of every slot; padding slots carry -1 and see themselves only."""
        T = document_BT.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()
        same = (document_BT[:, :, None] == document_BT[:, None, :]) & (document_BT >= 0)[:, :, None]
        own = torch.eye(T, dtype=torch.bool, device=document_BT.device)
        self.mask_B1TT = ((same & causal) | own).unsqueeze(1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        """Return the attention output of the next step; the first call is step 0."""
        groups = q_BHTd.shape[1] // k_BGTd.shape[1]
        k, v = k_BGTd.repeat_interleave(groups, dim=1), v_BGTd.repeat_interleave(groups, dim=1)
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q_BHTd, k, v, attn_mask=self.mask_B1TT)
        q = q_BHTd * q_BHTd.shape[-1] ** -0.5
        T = q.shape[2]
        prefix = (q @ self.keys[0].transpose(-1, -2)).float().masked_fill(~self.mask_B1TT, float("-inf"))
        own = torch.stack([(q * key).sum(-1).float() for key in self.keys[1:]], dim=-1)
        weights = torch.cat((prefix, own), dim=-1).softmax(-1).to(v.dtype)
        out = weights[..., :T] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., T + step].unsqueeze(-1) * value
        return out
