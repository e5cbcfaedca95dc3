"""The draft head's KV cache: committed slots first, then the nodes of the tree being drafted.

`commit` appends slots for good (causal among themselves); `draft` appends tree nodes that see the committed slots and
the nodes named in their mask; `discard_tree` forgets the nodes. After any round the cache equals a fresh pass over the
accepted text, because tree keys are never kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class DraftCache:
    """A batch-1 draft cache of fixed capacity (in slots plus tree nodes)."""

    def __init__(
        self, *, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.zeros(1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.length = 0
        self.tree_length = 0
        self._mask_TL: Tensor | None = None
        self._new = 0

    def commit(self, count: int) -> None:
        """Announce that the next step appends `count` committed slots, each seeing all slots up to itself."""
        assert self.tree_length == 0, "discard the tree before committing slots"
        slots = torch.arange(self.length + count, device=self.keys.device)
        self._mask_TL = slots[None, :] <= slots[self.length :, None]
        self._new = count
        self.length += count

    def draft(self, tree_mask_TN: Tensor) -> None:
        """Announce that the next step appends T tree nodes; `tree_mask_TN` says which of all N tree nodes each sees."""
        T, N = tree_mask_TN.shape
        assert T + self.tree_length == N, f"mask covers {N} tree nodes, the cache will hold {self.tree_length + T}"
        prefix = torch.ones(T, self.length, dtype=torch.bool, device=self.keys.device)
        self._mask_TL = torch.cat((prefix, tree_mask_TN), dim=1)
        self._new = T
        self.tree_length += T

    def discard_tree(self) -> None:
        """Forget all tree nodes."""
        self.tree_length = 0

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        """Store the announced keys and return the attention output_BHTd under the announced mask."""
        assert self._mask_TL is not None, "call commit() or draft() before each step"
        assert k_BGTd.shape[2] == self._new
        end = self.length + self.tree_length
        if end > self.keys.shape[2]:
            raise RuntimeError(f"draft cache of {self.keys.shape[2]} slots is full at {end}")
        self.keys[:, :, end - self._new : end] = k_BGTd
        self.values[:, :, end - self._new : end] = v_BGTd
        mask, self._mask_TL = self._mask_TL, None
        return F.scaled_dot_product_attention(
            q_BHTd, self.keys[:, :, :end], self.values[:, :, :end], attn_mask=mask, enable_gqa=True
        )
