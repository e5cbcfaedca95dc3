"""A draft cache whose shapes never change: the same slots as `DraftCache`, their lengths on the device, read whole.

What `DraftCache` keeps as Python numbers (how long each row is) is a tensor here, masks reach over the whole capacity,
and nothing is read back: every step of a round of fixed shapes launches the same kernels, so that it can be captured.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.tree_layout import sight_mask
from eyas.models.draft_cache import DraftCache


class FixedDraftCache:
    """The first B rows of a draft cache; `length_B` (int64) committed slots in each, which the caller keeps right."""

    def __init__(self, cache: DraftCache, length_B: Tensor) -> None:
        self.keys, self.values = cache.keys[:, : len(length_B)], cache.values[:, : len(length_B)]
        self.length_B = length_B
        self.tree_length = 0
        self._row_B1 = torch.arange(len(length_B), device=length_B.device)[:, None]
        self._mask_BTL: Tensor | None = None
        self._slots_BT: Tensor | None = None

    def commit(self, count: int) -> None:
        """Announce that the next step writes `count` slots behind every row's length, each seeing all up to itself."""
        slot_L = torch.arange(self.keys.shape[3], device=self.length_B.device)
        self._slots_BT = self.length_B[:, None] + slot_L[:count]
        self._mask_BTL = slot_L <= self._slots_BT[:, :, None]

    def draft(self, tree_mask_BTN: Tensor) -> None:
        """Announce that the next step appends T tree nodes; the mask says which of all N so far each sees."""
        T, N = tree_mask_BTN.shape[1:]
        assert T + self.tree_length == N, f"mask covers {N} tree nodes, the cache will hold {self.tree_length + T}"
        node_T = torch.arange(self.tree_length, N, device=self.length_B.device)
        self._slots_BT = self.length_B[:, None] + node_T
        self._mask_BTL = sight_mask(self.length_B, tree_mask_BTN, self.keys.shape[3])
        self.tree_length = N

    def discard_tree(self) -> None:
        """Forget all tree nodes."""
        self.tree_length = 0

    def kept(self, x_BTD: Tensor) -> Tensor:
        """Return the layer's rows as they are: every row that comes in goes on."""
        return x_BTD

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, *, layer: int = 0) -> Tensor:
        """Store a layer's announced keys and return its attention output_BHTd under the announced mask."""
        assert self._mask_BTL is not None, "call commit() or draft() before each step"
        keys, values, mask = self.keys[layer], self.values[layer], self._mask_BTL
        keys[self._row_B1, :, self._slots_BT] = k_BGTd.transpose(1, 2)
        values[self._row_B1, :, self._slots_BT] = v_BGTd.transpose(1, 2)
        if layer + 1 == len(self.keys):
            self._mask_BTL = None  # the step is over
        return F.scaled_dot_product_attention(q_BHTd, keys, values, attn_mask=mask[:, None], enable_gqa=True)
