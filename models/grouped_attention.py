"""Attention under a mask with grouped heads: several heads of queries read one head of keys.

On a CPU the queries of a group are laid side by side as rows of one head, so every key is read once instead of once
per query head, which is what the few rows of a round cost.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 32  # queries per head up to which laying them side by side is the faster way


def grouped_attention(
    q_BHTd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1TL: Tensor, *, scale: float | None = None
) -> Tensor:
    """Return softmax(scale q k^T under the mask) v, [B, H, T, d]; the mask is boolean, or added to the scores.

    H is a multiple of G; head h reads keys of head h // (H // G). `scale` is 1 / sqrt(d) if not given.
    """
    B, H, T, d = q_BHTd.shape
    G = k_BGLd.shape[1]
    if q_BHTd.device.type != "cpu" or H == G or T > MOST_ROWS:
        return F.scaled_dot_product_attention(
            q_BHTd, k_BGLd, v_BGLd, attn_mask=mask_B1TL, scale=scale, enable_gqa=H != G
        )
    mask = mask_B1TL if T == 1 else torch.cat([mask_B1TL] * (H // G), dim=2)  # repeat copies more slowly
    q_BGRd = q_BHTd.reshape(B, G, H // G * T, d)
    out_BGRd = F.scaled_dot_product_attention(q_BGRd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale)
    return out_BGRd.reshape(B, H, T, -1)
