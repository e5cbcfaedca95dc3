"""A request's distribution in a few numbers per node: temperature, then top-k, then top-p, without probabilities.

    p(v) = exp((logit_v - top) / temperature) / total        where logit_v >= cut, else 0

top-k keeps the logits that are at least the k-th largest; top-p keeps a token iff the tokens with strictly larger
logits hold less than p of what top-k kept: the Hugging Face order and rule, but that equal logits are kept or cut
together, as its top-k does too (where its top-p leaves it to an unstable sort which of them stay). All sampling of this
package follows this rule. Temperature 0 puts all mass on the first of the largest logits.

How the kernel finds the cuts: logits become integers of the same order, and the cut is found by bisection over them.
The maxima of the blocks of 128 bound it from below first, in registers; only the blocks above that bound are listed and
read again, once per step. A distribution worth truncating has few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.block_statistics import (
    AOT_ELEMENTS,
    BLOCK,
    block_statistics_reference,
    launch_block_statistics,
)
from eyas.kernels.triton_support import KernelBuild, jit, next_power_of_two, on_device, tl

# Listed blocks per step of a pass: 512 logits, the most that no architecture spills registers for.
TILE = 4


@dataclass(frozen=True)
class BatchSampling:
    """How each request samples: temperature_B and top_p_B fp32, top_k_B int64; 0, 1 and 0 are greedy, all and all."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor

    def check(self, rows: int, device: torch.device) -> None:
        """None if shapes and dtypes are right, and on the CPU the values too; ValueError otherwise."""
        expected = {"temperature_B": torch.float32, "top_k_B": torch.int64, "top_p_B": torch.float32}
        for name, dtype in expected.items():
            tensor = getattr(self, name)
            if tensor.shape != (rows,) or tensor.dtype != dtype or tensor.device != device:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {dtype} ({rows},) on "
                    f"{device}"
                )
        if device.type == "cpu":
            wrong_B = ~(self.temperature_B >= 0) | (self.top_k_B < 0) | ~((self.top_p_B > 0) & (self.top_p_B <= 1))
            if wrong_B.any():
                row = int(wrong_B.nonzero()[0])
                raise ValueError(
                    f"row {row} samples with temperature {float(self.temperature_B[row])}, top_k "
                    f"{int(self.top_k_B[row])} and top_p {float(self.top_p_B[row])}: temperature and top_k must be 0 "
                    "or more, top_p in (0, 1]"
                )


@dataclass(frozen=True)
class Truncated:
    """What p(v) above needs, per node; a node with NaN or no finite logits has total NaN and only -1.

    top_BN, cut_BN: fp32. total_BN: fp64. only_BN: int64, the one token of a greedy request, else -1.
    mass_BNC: fp32, the kept exponentials of each block of 128; total is their sum. Padding nodes hold anything.
    """

    logits_BNV: Tensor
    num_nodes_B: Tensor
    temperature_B: Tensor
    top_BN: Tensor
    cut_BN: Tensor
    only_BN: Tensor
    total_BN: Tensor
    mass_BNC: Tensor

    def probabilities(self) -> Tensor:
        """p_BNV in fp64; rows of NaN for nodes without a distribution. For checks: this is what the kernels avoid."""
        logits_BNV = self.logits_BNV.double()
        temperature = torch.where(self.temperature_B == 0, 1.0, self.temperature_B).double()[:, None, None]
        weights = ((logits_BNV - self.top_BN[..., None].double()) / temperature).exp()
        weights = torch.where(logits_BNV >= self.cut_BN[..., None], weights, 0.0)
        token_V = torch.arange(logits_BNV.shape[2], device=logits_BNV.device)
        weights = torch.where(self.only_BN[..., None] >= 0, (token_V == self.only_BN[..., None]).double(), weights)
        total = torch.where(self.only_BN >= 0, 1.0, self.total_BN)
        return weights / total[..., None]


def probabilities_reference(logits_RV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """p_RV in fp64 of one request: the definition above; rows of NaN where there is no distribution."""
    logits = logits_RV.double()
    bad_R1 = logits.isnan().any(-1, keepdim=True) | ~logits.amax(-1, keepdim=True).isfinite()
    if temperature == 0:
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return one_hot.masked_fill(bad_R1, torch.nan)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ranked = logits.sort(descending=True).values
        above = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
        first = torch.searchsorted(-ranked, -logits).clamp(max=logits.shape[-1] - 1)  # the first of its equals
        logits = logits.masked_fill(above.gather(-1, first) >= top_p, -torch.inf)
    return logits.softmax(-1).masked_fill(bad_R1, torch.nan)


def truncate_reference(logits_BNV: Tensor, num_nodes_B: Tensor, sampling: BatchSampling) -> Truncated:
    """The same as `launch_truncate`, row by row from dense probabilities, padding nodes included."""
    B, N, V = logits_BNV.shape
    settings = zip(sampling.temperature_B.tolist(), sampling.top_k_B.tolist(), sampling.top_p_B.tolist(), strict=True)
    p_BNV = torch.stack([probabilities_reference(x, *how) for x, how in zip(logits_BNV, settings, strict=True)])
    top_BN = logits_BNV.float().amax(-1)
    cut_BN = torch.where(p_BNV > 0, logits_BNV.float(), torch.inf).amin(-1)
    greedy_BN = (sampling.temperature_B == 0)[:, None] & ~p_BNV[..., 0].isnan()
    only_BN = torch.where(greedy_BN, p_BNV.argmax(-1), -1)
    scale = torch.where(sampling.temperature_B == 0, 1.0, 1.0 / sampling.temperature_B)[:, None, None]
    mass_BNV = torch.where(p_BNV > 0, ((logits_BNV.float() - top_BN[..., None]) * scale).exp(), 0.0)
    mass_BNV = torch.where(p_BNV.isnan(), torch.nan, mass_BNV)
    C = block_statistics_reference(logits_BNV, num_nodes_B, sampling.temperature_B).max_BNC.shape[2]
    mass_BNC = torch.nn.functional.pad(mass_BNV, (0, C * BLOCK - V)).view(B, N, C, BLOCK).sum(-1)
    total_BN = mass_BNC.double().sum(-1)
    return Truncated(logits_BNV, num_nodes_B, sampling.temperature_B, top_BN, cut_BN, only_BN, total_BN, mass_BNC)


def launch_truncate(logits_BNV: Tensor, num_nodes_B: Tensor, sampling: BatchSampling) -> Truncated:
    """The truncated distribution of nodes 0 .. num_nodes-1 of each row."""
    logits_BNV = logits_BNV.contiguous()
    B, N, V = logits_BNV.shape
    max_BNC, sum_BNC = launch_block_statistics(logits_BNV, num_nodes_B, sampling.temperature_B)
    top_BN = torch.empty((B, N), dtype=torch.float32, device=logits_BNV.device)
    cut_BN = torch.empty_like(top_BN)
    only_BN = torch.empty((B, N), dtype=torch.int64, device=logits_BNV.device)
    total_BN = torch.empty((B, N), dtype=torch.float64, device=logits_BNV.device)
    listed_BNC = torch.empty(max_BNC.shape, dtype=torch.int32, device=logits_BNV.device)
    C = max_BNC.shape[2]
    if B * N:
        with on_device(logits_BNV.device):
            _truncate_kernel[(B * N,)](
                logits_BNV,
                num_nodes_B.contiguous(),
                sampling.temperature_B.contiguous(),
                sampling.top_k_B.contiguous(),
                sampling.top_p_B.contiguous(),
                max_BNC,
                sum_BNC,
                listed_BNC,
                top_BN,
                cut_BN,
                only_BN,
                total_BN,
                N,
                C,
                V,
                BLOCK=BLOCK,
                BLOCK_C=next_power_of_two(C),
                TILE=TILE,
                num_warps=_warps(next_power_of_two(C)),
            )
    # The kernel leaves the kept mass of each block where its sum of exponentials was.
    return Truncated(
        logits_BNV, num_nodes_B, sampling.temperature_B.contiguous(), top_BN, cut_BN, only_BN, total_BN, sum_BNC
    )


@jit
def order_key(x):
    """Integers in the order of the floats x; -0.0 equals 0.0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _float_of(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _list_blocks(listed_ptr, key_C, block_C, in_row_C, least):
    # Writes the numbers of the blocks whose maximum reaches `least`, ascending; returns how many there are.
    is_listed_C = in_row_C & (key_C >= least.to(tl.int32))
    count_C = tl.cumsum(is_listed_C.to(tl.int32), 0)
    tl.debug_barrier()  # nobody reads the previous list any more
    tl.store(listed_ptr + count_C - 1, block_C, mask=is_listed_C)
    tl.debug_barrier()  # everybody sees this one
    return tl.sum(is_listed_C.to(tl.int32))


@jit
def _load_tile(logits_ptr, listed_ptr, start, listed, width, BLOCK: tl.constexpr, TILE: tl.constexpr):
    # The logits of the next TILE listed blocks, -inf beyond the list and the row, and the numbers of the blocks.
    place_T = start + tl.arange(0, TILE)
    block_T = tl.load(listed_ptr + place_T, mask=place_T < listed, other=0)
    token_TL = block_T[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_TL = (place_T < listed)[:, None] & (token_TL < width)
    return tl.load(logits_ptr + token_TL, mask=inside_TL, other=-float("inf")).to(tl.float32), block_T, inside_TL


@jit
def _count_from(least, logits_ptr, listed_ptr, listed, width, BLOCK: tl.constexpr, TILE: tl.constexpr):
    # How many logits in listed blocks are at least `least`.
    count_TL = tl.zeros([TILE, BLOCK], tl.int32)
    for start in range(0, listed, TILE):
        logits_TL, _, inside_TL = _load_tile(logits_ptr, listed_ptr, start, listed, width, BLOCK, TILE)
        count_TL += (inside_TL & (order_key(logits_TL) >= least.to(tl.int32))).to(tl.int32)
    return tl.sum(count_TL)


@jit
def _mass_above(key, top, scale, logits_ptr, listed_ptr, listed, width, BLOCK: tl.constexpr, TILE: tl.constexpr):
    # The exponentials of the logits in listed blocks that are larger than `key`.
    mass_TL = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, listed, TILE):
        logits_TL, _, inside_TL = _load_tile(logits_ptr, listed_ptr, start, listed, width, BLOCK, TILE)
        is_above_TL = inside_TL & (order_key(logits_TL) > key.to(tl.int32))
        mass_TL += tl.where(is_above_TL, tl.exp((logits_TL - top) * scale), 0.0)
    return tl.sum(mass_TL)


@jit
def _truncate_kernel(
    logits_ptr,
    num_nodes_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    max_ptr,
    mass_ptr,
    listed_ptr,
    top_ptr,
    cut_ptr,
    only_ptr,
    total_ptr,
    num_slots,
    num_blocks,
    width,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE: tl.constexpr,
):
    # One program per node. Keys are int32; the bounds of a bisection are int64, so that their sum does not overflow.
    slot = tl.program_id(0).to(tl.int64)
    row = slot // num_slots
    if slot % num_slots < tl.load(num_nodes_ptr + row):
        logits_ptr += slot * width
        max_ptr += slot * num_blocks
        mass_ptr += slot * num_blocks
        listed_ptr += slot * num_blocks
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        block_C = tl.arange(0, BLOCK_C)
        in_row_C = block_C < num_blocks
        max_C = tl.load(max_ptr + block_C, mask=in_row_C, other=-float("inf"))
        sum_C = tl.load(mass_ptr + block_C, mask=in_row_C, other=0.0)
        top = tl.max(max_C)
        usable = (tl.sum((sum_C != sum_C).to(tl.int32)) == 0) & (top > -float("inf")) & (top < float("inf"))
        top = tl.where(usable, top, 0.0)
        sampled = temperature > 0.0
        scale = 1.0 / tl.where(sampled, temperature, 1.0)
        key_C = order_key(max_C)
        peak_C = tl.exp((max_C - top) * scale)
        mass_C = sum_C * peak_C
        top_key = tl.max(tl.where(in_row_C, key_C, -2147483648)).to(tl.int64)
        lowest = tl.full([], -2139095041, tl.int64)  # the key of -inf
        kept = lowest  # logits of at least this key are kept
        listed = 0

        if usable & sampled & (top_k > 0) & (top_k < width):
            # Blocks whose maximum reaches x hold at least one logit of x or more each.
            below = top_key + 1
            while below - kept > 1:
                middle = (below + kept) >> 1
                if tl.sum((in_row_C & (key_C >= middle.to(tl.int32))).to(tl.int32)) >= top_k:
                    kept = middle
                else:
                    below = middle
            listed = _list_blocks(listed_ptr, key_C, block_C, in_row_C, kept)
            below = top_key + 1
            while below - kept > 1:
                middle = (below + kept) >> 1
                if _count_from(middle, logits_ptr, listed_ptr, listed, width, BLOCK, TILE) >= top_k:
                    kept = middle
                else:
                    below = middle

        if usable & sampled & (top_p < 1.0):
            if listed > 0:
                total = _mass_above(kept - 1, top, scale, logits_ptr, listed_ptr, listed, width, BLOCK, TILE)
            else:
                total = tl.sum(mass_C)
            # `cut` is cut because what lies above it holds top_p or more; `kept` is kept.
            cut = kept - 1
            kept = top_key
            while kept - cut > 1:
                middle = (kept + cut) >> 1
                if tl.sum(tl.where(key_C > middle.to(tl.int32), peak_C, 0.0)) >= top_p * total:
                    cut = middle
                else:
                    kept = middle
            listed = _list_blocks(listed_ptr, key_C, block_C, in_row_C, cut + 1)
            kept = top_key
            while kept - cut > 1:
                middle = (kept + cut) >> 1
                above = _mass_above(middle, top, scale, logits_ptr, listed_ptr, listed, width, BLOCK, TILE)
                if above >= top_p * total:
                    cut = middle
                else:
                    kept = middle

        only = tl.full([], -1, tl.int64)
        if usable & (temperature == 0.0):
            first_block = tl.min(tl.where(in_row_C & (max_C == top), block_C, BLOCK_C))
            token_L = first_block * BLOCK + tl.arange(0, BLOCK)
            logits_L = tl.load(logits_ptr + token_L, mask=token_L < width, other=-float("inf")).to(tl.float32)
            only = tl.min(tl.where(logits_L == top, token_L, width)).to(tl.int64)
            kept = top_key

        if listed > 0:
            mass_C = tl.zeros([BLOCK_C], tl.float32)
            tl.store(mass_ptr + block_C, mass_C, mask=in_row_C)
            tl.debug_barrier()
            for start in range(0, listed, TILE):
                logits_TL, block_T, inside_TL = _load_tile(logits_ptr, listed_ptr, start, listed, width, BLOCK, TILE)
                is_kept_TL = inside_TL & (order_key(logits_TL) >= kept.to(tl.int32))
                mass_T = tl.sum(tl.where(is_kept_TL, tl.exp((logits_TL - top) * scale), 0.0), 1)
                tl.store(mass_ptr + block_T, mass_T, mask=start + tl.arange(0, TILE) < listed)
            tl.debug_barrier()
            mass_C = tl.load(mass_ptr + block_C, mask=in_row_C, other=0.0)
        else:
            mass_C = tl.where(usable, mass_C, float("nan"))
            tl.store(mass_ptr + block_C, mass_C, mask=in_row_C)
        tl.store(top_ptr + slot, top)
        tl.store(cut_ptr + slot, _float_of(kept))
        tl.store(only_ptr + slot, only)
        tl.store(total_ptr + slot, tl.sum(tl.where(in_row_C, mass_C, 0.0).to(tl.float64)))


@jit
def probability(logit, token, temperature, top, cut, only, total):
    """p(token) in fp32 for its logit under the numbers of `Truncated`; NaN where there is no distribution."""
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    sampled = tl.where(logit >= cut, tl.exp((logit - top) * scale), 0.0) / total.to(tl.float32)
    return tl.where(only >= 0, tl.where(token == only, 1.0, 0.0), sampled)


def _warps(blocks: int) -> int:
    """How many warps so many blocks of logits take without spilling registers (eyas.kernels.aot)."""
    return 16 if blocks == 512 else 4


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: fp32 and bf16 logits, vocabularies up to 262144."""
    pointers = {
        **dict.fromkeys(("num_nodes_ptr", "top_k_ptr", "only_ptr"), "*i64"),
        **dict.fromkeys(("temperature_ptr", "top_p_ptr", "max_ptr", "mass_ptr", "top_ptr", "cut_ptr"), "*fp32"),
        "listed_ptr": "*i32",
        "total_ptr": "*fp64",
    }
    return [
        KernelBuild(
            name=f"truncate {element} vocabulary<={blocks * BLOCK}",
            kernel=_truncate_kernel,
            types={
                "logits_ptr": f"*{element}",
                **pointers,
                **dict.fromkeys(("num_slots", "num_blocks", "width"), "i32"),
            },
            aligned=frozenset(("logits_ptr", *pointers, "width")),
            constants={"BLOCK": BLOCK, "BLOCK_C": blocks, "TILE": TILE},
            options={"num_warps": _warps(blocks)},
        )
        for element in AOT_ELEMENTS
        for blocks in (1, 512, 1024, 2048)
    ]
