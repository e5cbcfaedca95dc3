"""How hidden states are kept on disk or in memory, and what a token costs: whole, halved, or in 8 bits with a scale.

8 bits are e4m3 with one fp32 scale per token and layer (the layers of one token differ in size by orders of magnitude).
Formats without a scale give back exactly what was kept; the 8-bit one gives back fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
TOKEN_BYTES = 5  # int32 id, bool mask
TAUGHT_BYTES = 4  # int32 argmax


@dataclass(frozen=True)
class StateFormat:
    """One way of keeping states; `scaled` adds an fp32 scale per token and layer."""

    name: str
    dtype: torch.dtype
    scaled: bool = False

    def encode(self, states_NF: Tensor, *, layers: int) -> tuple[Tensor, Tensor | None]:
        """Return the kept values [N, F] and, for a scaled format, their scales [N, layers]."""
        if not self.scaled:
            return states_NF.to(self.dtype), None
        states = states_NF.float().unflatten(-1, (layers, -1))
        scales = states.abs().amax(-1).clamp(min=1e-12) / E4M3_MAX
        values = (states / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX)  # beyond it some casts give NaN
        return values.flatten(-2).to(self.dtype), scales

    def decode(self, values_NF: Tensor, scales_NA: Tensor | None) -> Tensor:
        """Return states [N, F] from what `encode` gave."""
        if scales_NA is None:
            return values_NF
        values = values_NF.float().unflatten(-1, (scales_NA.shape[-1], -1))
        return (values * scales_NA[..., None]).flatten(-2)


STATE_FORMATS = {
    "float32": StateFormat("float32", torch.float32),
    "bfloat16": StateFormat("bfloat16", torch.bfloat16),
    "float16": StateFormat("float16", torch.float16),
    "float8_e4m3fn": StateFormat("float8_e4m3fn", torch.float8_e4m3fn, scaled=True),
}


@dataclass(frozen=True)
class TokenBytes:
    """What one token costs: `every` for each token, `taught` on top where it teaches a slot."""

    every: int
    taught: int

    def total(self, *, tokens: int, taught: int) -> int:
        """Return the bytes of a store; the shards' headers add under a hundred bytes per row."""
        return self.every * tokens + self.taught * taught


def bytes_per_token(
    *, hidden_size: int, aux_layers: int, state_dtype: str, final_everywhere: bool = False
) -> TokenBytes:
    """Return the exact bytes per token of a feature store: (A+1) states where a slot is taught, A states elsewhere."""
    state_format = STATE_FORMATS[state_dtype]
    state = hidden_size * state_format.dtype.itemsize + (4 if state_format.scaled else 0)
    if final_everywhere:
        return TokenBytes(every=TOKEN_BYTES + (aux_layers + 1) * state, taught=TAUGHT_BYTES)
    return TokenBytes(every=TOKEN_BYTES + aux_layers * state, taught=TAUGHT_BYTES + state)
