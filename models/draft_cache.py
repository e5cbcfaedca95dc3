"""The draft head's KV cache: committed slots first, then the nodes of the tree being drafted. One buffer per layer.

`commit` appends slots for good (causal among themselves); `draft` appends tree nodes that see the committed slots and
the nodes named in their mask; `discard_tree` forgets the nodes. After any round the cache equals a fresh pass over the
accepted text, because tree keys are never kept. Rows have their own lengths; a commit of different counts is padded
behind, and the padding lies in slots that the row's next keys overwrite before anything sees them.
"""

import torch
from torch import Tensor

from eyas.kernels.tree_layout import sight_mask
from eyas.models.grouped_attention import grouped_attention


class DraftCache:
    """A draft cache of `batch` rows of fixed capacity (in slots plus tree nodes)."""

    def __init__(
        self, *, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device, batch: int = 1,
        layers: int = 1,
    ) -> None:  # fmt: skip
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = [0] * batch
        self.tree_length = 0
        self._mask_RTL: Tensor | None = None
        self._first = 0
        self._starts: list[int] = []
        self._new = 0

    def commit(self, *counts: int, first: int = 0) -> None:
        """Announce that the next step appends counts[r] committed slots to row first + r, each seeing all up to itself.

        The step takes max(counts) slots per row, the surplus behind.
        """
        assert self.tree_length == 0, "discard the tree before committing slots"
        starts = self.lengths[first : first + len(counts)]
        assert len(starts) == len(counts), "more rows than the cache has"
        self._announce(first, starts, max(counts))
        slots_L = torch.arange(max(starts) + self._new, device=self.keys.device)
        last_RT = torch.tensor(starts, device=slots_L.device)[:, None] + slots_L[: self._new]
        self._mask_RTL = slots_L <= last_RT[:, :, None]
        for r, count in enumerate(counts):
            self.lengths[first + r] += count

    def draft(self, tree_mask_TN: Tensor, *, rows: int = 1) -> None:
        """Announce that the next step appends T tree nodes to the first rows.

        `tree_mask_TN` ([T, N] for every row, or [rows, T, N]) says which of all N tree nodes each sees.
        """
        mask_RTN = tree_mask_TN.expand(rows, -1, -1)
        T, N = mask_RTN.shape[1:]
        assert T + self.tree_length == N, f"mask covers {N} tree nodes, the cache will hold {self.tree_length + T}"
        lengths = self.lengths[:rows]
        self._announce(0, [length + self.tree_length for length in lengths], T)
        if rows == 1:
            prefix = torch.ones(1, T, lengths[0], dtype=torch.bool, device=self.keys.device)
            self._mask_RTL = torch.cat((prefix, mask_RTN), dim=2)
        else:
            lengths_R = torch.tensor(lengths, device=self.keys.device)
            self._mask_RTL = sight_mask(lengths_R, mask_RTN, max(lengths) + N)
        self.tree_length += T

    def discard_tree(self) -> None:
        """Forget all tree nodes."""
        self.tree_length = 0

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another and leave the source empty."""
        for kept in (self.keys, self.values):
            kept[:, destination] = kept[:, source]
        self.lengths[destination], self.lengths[source] = self.lengths[source], 0

    def grow(self, *, batch: int, capacity: int) -> None:
        """Make room for at least `batch` rows of `capacity` slots, keeping what is there."""
        layers, B, G, L, d = self.keys.shape
        if batch <= B and capacity <= L:
            return
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(layers, max(batch, B), G, max(capacity, L), d)
            new[:, :B, :, :L] = old
            setattr(self, name, new)
        self.lengths += [0] * (batch - B)

    def kept(self, x_BTD: Tensor) -> Tensor:
        """Return the layer's rows as they are: every row that comes in goes on."""
        return x_BTD

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, *, layer: int = 0) -> Tensor:
        """Store a layer's announced keys and return its attention output_BHTd under the announced mask."""
        assert self._mask_RTL is not None, "call commit() or draft() before each step"
        keys, values = self.keys[layer], self.values[layer]
        T, R = self._new, len(self._starts)
        assert k_BGTd.shape[2] == T
        end = max(self._starts) + T
        if end > keys.shape[2]:
            raise RuntimeError(f"draft cache of {keys.shape[2]} slots is full at {end}")
        rows = slice(self._first, self._first + R)
        if len(set(self._starts)) == 1:
            keys[rows, :, end - T : end] = k_BGTd
            values[rows, :, end - T : end] = v_BGTd
        else:
            row_R1 = torch.arange(rows.start, rows.stop, device=keys.device)[:, None]
            slots_RT = torch.tensor(self._starts, device=keys.device)[:, None] + torch.arange(T, device=keys.device)
            keys[row_R1, :, slots_RT] = k_BGTd.transpose(1, 2)
            values[row_R1, :, slots_RT] = v_BGTd.transpose(1, 2)
        mask = self._mask_RTL
        if layer + 1 == len(self.keys):
            self._mask_RTL = None  # the step is over
        return grouped_attention(q_BHTd, keys[rows, :, :end], values[rows, :, :end], mask[:, None])

    def _announce(self, first: int, starts: list[int], count: int) -> None:
        self._first, self._starts, self._new = first, starts, count
