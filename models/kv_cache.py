"""The target's KV cache: one preallocated buffer per layer, written at named slots, read up to the furthest one.

One class serves all users of the target: the engine (append trees, keep the accepted paths, drop the rest, rows at
their own lengths) and batched synthesis. Who may see what is decided by the mask of the forward, never by the cache:
layers with a sliding window keep everything and are masked (`Target.forward`).

Keys and values lie in the target's dtype, or in 8 bits: e4m3 without a scale, clamped to its range. A layer is given
them in its own dtype again; only the tree kernel reads the 8 bits themselves.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.kernels.keep_path import as_bits, keep_path
from eyas.models.errors import UserError
from eyas.models.tree_attention import keys_go_to_the_kernel

FP8 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)  # of NVIDIA cards, the first that converts e4m3
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


def check_kv_dtype(dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise UserError for a dtype (None: the target's own) that no cache on this device may have."""
    if dtype not in (None, FP8):
        raise UserError(f"a KV cache is kept in the dtype of its target (give None) or in {FP8}, not in {dtype}.")
    if dtype is None or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < FP8_CAPABILITY:
        raise UserError(
            f"{torch.cuda.get_device_name(device)} (compute capability {'.'.join(map(str, capability))}) has no {FP8}; "
            f"such a KV cache needs a CUDA card of {'.'.join(map(str, FP8_CAPABILITY))} or later, or a CPU. Keep the "
            "target's dtype here (None, on the command line no --kv-dtype)."
        )


def to_cache(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return states in a cache's dtype; in fp8 clamped to its largest number, 448, and NaN where they are not finite.

    A cast alone gives NaN or 448 for all of these, by device and version. A target whose own states are not finite must
    stay one that the runtime refuses.
    """
    if dtype == FP8:
        most = torch.finfo(FP8).max
        states = states.clamp(-most, most).where(states.isfinite(), torch.nan)
    return states.to(dtype)


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
        if self.start is not None and isinstance(self.rows, slice) and self.keys.dtype == key_states.dtype:
            held = self.both[:, self.rows]
            keys, values = held.narrow(3, self.start, key_states.shape[2]).unbind(0)
            keys.copy_(key_states)
            values.copy_(value_states)
            seen_keys, seen_values = held.narrow(3, 0, self.visible).unbind(0)
            return seen_keys, seen_values
        read = []
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            bits, new = as_bits(held), as_bits(to_cache(states, held.dtype))
            if self.start is not None:
                bits[self.rows, :, self.start : self.start + new.shape[2]] = new
            else:
                bits[self.index_R1, :, self.slots_RT] = new.transpose(1, 2)
            seen = bits[self.rows, :, : self.visible].view(held.dtype)
            read.append(seen if keys_go_to_the_kernel() else seen.to(states.dtype))
        return read[0], read[1]

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
        self.dtype = dtype

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
            layer.hold(as_bits(layer.both)[:, rows_R].contiguous().view(self.dtype))

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row's keys over another's."""
        for layer in self.buffers:
            bits = as_bits(layer.both)
            bits[:, destination] = bits[:, source]

    def clear(self, rows: slice) -> None:
        """Set rows to zero: what a mask hides must still be a number."""
        for layer in self.buffers:
            as_bits(layer.both)[:, rows] = 0

    def move(self, rows_M: Tensor, sources_M: Tensor, destinations_M: Tensor) -> None:
        """Move keys within their rows, all at once: the accepted paths, in place."""
        for layer in self.buffers:
            bits = as_bits(layer.both)
            bits[:, rows_M, :, destinations_M] = bits[:, rows_M, :, sources_M]

    def grow(self, *, batch: int, capacity: int) -> None:
        """Make room for at least `batch` rows of `capacity` tokens, keeping what is there."""
        B, G, L, d = self.buffers[0].keys.shape
        if batch <= B and capacity <= L:
            return
        shape = (2, max(batch, B), G, max(capacity, L), d)
        for layer in self.buffers:
            bits = as_bits(layer.both)
            new = bits.new_zeros(shape)
            new[:, :B, :, :L] = bits
            layer.hold(new.view(self.dtype))
        self.capacity = shape[3]

    def _check(self, wanted: int) -> None:
        if wanted > self.capacity:
            raise RuntimeError(f"KV cache of {self.capacity} tokens is full: asked for {wanted}")
