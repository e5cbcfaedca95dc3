"""The target's KV cache: one preallocated buffer per layer, written at named slots, read up to the furthest one.

One class serves all users of the target: the engine (append trees, keep the accepted paths, drop the rest, rows at
their own lengths) and batched synthesis. Who may see what is decided by the mask of the forward, never by the cache:
layers with a sliding window keep everything and are masked (`Target.forward`).
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.kernels.keep_path import keep_path
from eyas.models.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of the two kinds of layers we serve


def attention_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return FULL or SLIDING for each layer of a target; raises UserError for any other kind of layer."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    named = getattr(config, "layer_types", None)
    kinds = tuple(named) if named else (SLIDING if window else FULL,) * config.num_hidden_layers
    local = getattr(config, "attention_layers", None)  # GPT-Neo masks some of its layers by itself
    if set(kinds) - {FULL, SLIDING} or local or (SLIDING in kinds and not window):
        found = ", ".join(sorted({*kinds, *(local or ())}))
        raise UserError(
            f"this target's attention is {found} with sliding window {window}; the bundled runtime serves targets "
            "whose layers are all full attention or sliding windows."
        )
    return kinds


def head_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Return (kv heads, head dim) of a target."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


class _Layer(CacheLayerMixin):
    """One layer's keys and values, each [B, G, capacity, head_dim], in one buffer (`both`: keys, then values)."""

    is_sliding = False
    both: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hold(torch.zeros((2, *shape), dtype=dtype, device=device))
        self.is_initialized = True
        self.rows: slice | Tensor = slice(None)
        self.start: int | None = 0
        self.index_R1: Tensor | None = None
        self.slots_RT: Tensor | None = None
        self.visible = 0

    def hold(self, both: Tensor) -> None:
        self.both = both
        self.keys, self.values = both

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
            self.keys[self.rows, :, span] = key_states
            self.values[self.rows, :, span] = value_states
        else:
            self.keys[self.index_R1, :, self.slots_RT] = key_states.transpose(1, 2)
            self.values[self.index_R1, :, self.slots_RT] = value_states.transpose(1, 2)
        return self.keys[self.rows, :, : self.visible], self.values[self.rows, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return self.start or 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class KVCache(Cache):
    """A preallocated cache for `batch` rows of up to `capacity` tokens."""

    def __init__(
        self, config: PreTrainedConfig, *, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise UserError for targets whose layers are not all standard attention, full or with a sliding window."""
        attention_kinds(config)
        kv_heads, head_dim = head_shape(config)
        shape = (batch, kv_heads, capacity, head_dim)
        self.buffers = [_Layer(shape, dtype, device) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=list(self.buffers))
        self.capacity = capacity

    @property
    def visible(self) -> int:
        """Slots that the announced forward reads."""
        return self.buffers[0].visible

    def write_at(self, start: int, count: int, *, rows: slice = slice(None)) -> None:
        """Send the next forward's keys of some rows (default: every row) to slots start .. start+count-1."""
        self._check(start + count)
        for layer in self.buffers:
            layer.rows, layer.start, layer.visible = rows, start, start + count

    def write_rows_at(self, rows: Tensor | slice | None, slots_RT: Tensor) -> None:
        """Send the next forward's keys to each row's own slots_RT.

        `rows`: row indices (their keys are copied to be read) or a slice (None: all), which is read in place.
        """
        visible = int(slots_RT.max()) + 1
        self._check(visible)
        chosen = slice(None) if rows is None else rows
        index_R = chosen if isinstance(chosen, Tensor) else torch.arange(len(self.buffers[0].keys))[chosen]
        index_R1 = index_R.to(slots_RT.device)[:, None]
        for layer in self.buffers:
            layer.rows, layer.start, layer.visible = chosen, None, visible
            layer.index_R1, layer.slots_RT = index_R1, slots_RT

    def write_fixed(self, slots_RT: Tensor) -> None:
        """Send the next forward's keys of the first R rows to their own slots, and let it read the whole buffers.

        No value is read back and no shape depends on one; slots beyond the capacity are the caller's fault.
        """
        index_R1 = torch.arange(len(slots_RT), device=slots_RT.device)[:, None]
        for layer in self.buffers:
            layer.rows, layer.start, layer.visible = slice(0, len(slots_RT)), None, self.capacity
            layer.index_R1, layer.slots_RT = index_R1, slots_RT

    def keep_paths(self, prefix_len_R: Tensor, path_RN: Tensor, num_accepted_R: Tensor) -> None:
        """Move the accepted nodes' keys of the first R rows to the slots behind each root; see `keep_path`."""
        for layer in self.buffers:
            keep_path(layer.both[:, : len(path_RN)], prefix_len_R, path_RN, num_accepted_R)

    def select_rows(self, rows_R: Tensor) -> None:
        """Keep only the given batch rows, in the given order."""
        for layer in self.buffers:
            layer.hold(layer.both[:, rows_R].contiguous())

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row's keys over another's."""
        for layer in self.buffers:
            layer.both[:, destination] = layer.both[:, source]

    def clear(self, rows: slice) -> None:
        """Set rows to zero: what a mask hides must still be a number."""
        for layer in self.buffers:
            layer.both[:, rows] = 0.0

    def move(self, rows_M: Tensor, sources_M: Tensor, destinations_M: Tensor) -> None:
        """Move keys within their rows, all at once: the accepted paths, in place."""
        for layer in self.buffers:
            layer.keys[rows_M, :, destinations_M] = layer.keys[rows_M, :, sources_M]
            layer.values[rows_M, :, destinations_M] = layer.values[rows_M, :, sources_M]

    def grow(self, *, batch: int, capacity: int) -> None:
        """Make room for at least `batch` rows of `capacity` tokens, keeping what is there."""
        B, G, L, d = self.buffers[0].keys.shape
        if batch <= B and capacity <= L:
            return
        shape = (2, max(batch, B), G, max(capacity, L), d)
        for layer in self.buffers:
            new = layer.both.new_zeros(shape)
            new[:, :B, :, :L] = layer.both
            layer.hold(new)
        self.capacity = shape[3]

    def _check(self, wanted: int) -> None:
        if wanted > self.capacity:
            raise RuntimeError(f"KV cache of {self.capacity} tokens is full: asked for {wanted}")
