"""The target's KV cache: one preallocated buffer per layer, written at named slots, read up to the furthest one.

One class serves both users of the target: the engine (append a tree, keep the accepted path, drop the rest) and batched
synthesis (every row at its own length). Who may see what is decided by the mask of the forward, never by the cache.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.models.errors import UserError


class _Layer(CacheLayerMixin):
    """One layer's keys and values, [B, G, capacity, head_dim]."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.is_initialized = True
        self.start: int | None = 0
        self.slots_BT: Tensor | None = None
        self.rows_B: Tensor | None = None
        self.visible = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the cache is allocated when it is made")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        expected = (self.keys.shape[1], self.keys.shape[3])
        for states in (key_states, value_states):
            if (states.shape[1], states.shape[3]) != expected:
                raise UserError(
                    f"this target's attention keeps {states.shape[1]} heads of {states.shape[3]} numbers per token, "
                    f"its config says {expected[0]} of {expected[1]} (latent or multi-query attention); the bundled "
                    "runtime serves targets whose layers are all standard attention."
                )
        if self.start is not None:
            span = slice(self.start, self.start + key_states.shape[2])
            self.keys[:, :, span] = key_states
            self.values[:, :, span] = value_states
            return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]
        assert self.slots_BT is not None
        rows = self.rows_B
        index_B1 = torch.arange(len(self.keys), device=self.keys.device)[:, None] if rows is None else rows[:, None]
        self.keys[index_B1, :, self.slots_BT] = key_states.transpose(1, 2)
        self.values[index_B1, :, self.slots_BT] = value_states.transpose(1, 2)
        chosen = slice(None) if rows is None else rows
        return self.keys[chosen, :, : self.visible], self.values[chosen, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return self.start or 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


def check_full_attention(config: PreTrainedConfig) -> None:
    """Raise UserError unless every layer of a target is standard full attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window:
        raise UserError(
            f"this target's attention is {', '.join(sorted(kinds))} with sliding window {window}; the bundled runtime "
            "serves targets whose layers are all full attention."
        )


class KVCache(Cache):
    """A preallocated cache for `batch` rows of up to `capacity` tokens."""

    def __init__(
        self, config: PreTrainedConfig, *, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise UserError for targets whose layers are not all standard full attention."""
        check_full_attention(config)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (batch, kv_heads, capacity, head_dim)
        self.buffers = [_Layer(shape, dtype, device) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=list(self.buffers))
        self.capacity = capacity

    def write_at(self, start: int, count: int) -> None:
        """Send the next forward's keys of every row to slots start .. start+count-1."""
        if start + count > self.capacity:
            raise RuntimeError(f"KV cache of {self.capacity} tokens is full: asked for {start + count}")
        for layer in self.buffers:
            layer.start, layer.visible = start, start + count

    def write_rows_at(self, rows_R: Tensor | None, slots_RT: Tensor) -> None:
        """Send the next forward's keys of rows `rows_R` (None: every row, read in place) to their own slots_RT."""
        visible = int(slots_RT.max()) + 1
        if visible > self.capacity:
            raise RuntimeError(f"KV cache of {self.capacity} tokens is full: asked for {visible}")
        for layer in self.buffers:
            layer.start, layer.rows_B, layer.slots_BT, layer.visible = None, rows_R, slots_RT, visible

    def select_rows(self, rows_R: Tensor) -> None:
        """Keep only the given batch rows, in the given order."""
        for layer in self.buffers:
            layer.keys, layer.values = layer.keys[rows_R].contiguous(), layer.values[rows_R].contiguous()

    def keep_path(self, start: int, path_P: Tensor) -> None:
        """Move the keys at slots start + path (ascending) to start, start+1, ...: the accepted path, in place."""
        if torch.equal(path_P, torch.arange(len(path_P), device=path_P.device)):
            return
        source = start + path_P
        for layer in self.buffers:
            layer.keys[:, :, start : start + len(path_P)] = layer.keys[:, :, source]
            layer.values[:, :, start : start + len(path_P)] = layer.values[:, :, source]
