"""Counter-based coins: the coin of a request at a position is a pure function of its seed and that position.

No generator has a state, so a coin needs no memory and no order: the token at position t of a request is drawn with the
same coin whether it is drafted, plain, or verified in a batch of 64. Philox4x32-10 (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"): the key is the seed, the counter is (position, stream), 53 bits become a coin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
BLOCK = 256


def coins(seed_B: Tensor, position_BN: Tensor, *, stream: int = 0) -> Tensor:
    """coin_BN, fp64 in [0, 1), for int64 seeds and positions; `stream` tells apart coins of one position (0 to 2**31).

    Errors: ValueError for other shapes or dtypes.
    """
    shapes_fit = seed_B.ndim == 1 and position_BN.ndim == 2 and len(seed_B) == len(position_BN)
    if not shapes_fit or {seed_B.dtype, position_BN.dtype} != {torch.int64} or seed_B.device != position_BN.device:
        raise ValueError(
            f"seed_B is {seed_B.dtype} {tuple(seed_B.shape)} on {seed_B.device}, position_BN {position_BN.dtype} "
            f"{tuple(position_BN.shape)} on {position_BN.device}: give int64 [rows] and [rows, coins] on one device"
        )
    if available(seed_B.device):
        return _launch_coins(seed_B, position_BN, stream)
    return coins_reference(seed_B, position_BN, stream)


def coins_reference(seed_B: Tensor, position_BN: Tensor, stream: int = 0) -> Tensor:
    """The same as `coins`, in 64-bit integers: the definition, and the CPU path."""
    key = [(seed_B & WORD)[:, None], (seed_B >> 32 & WORD)[:, None]]
    zero_BN = torch.zeros_like(position_BN)
    words = [position_BN & WORD, position_BN >> 32 & WORD, zero_BN + stream, zero_BN]
    for _ in range(ROUNDS):
        # The product wraps around, but its 64 bits are those of the unsigned product.
        product_0, product_2 = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [
            (product_2 >> 32 & WORD) ^ words[1] ^ key[0],
            product_2 & WORD,
            (product_0 >> 32 & WORD) ^ words[3] ^ key[1],
            product_0 & WORD,
        ]
        key = [(half + step) & WORD for half, step in zip(key, WEYL, strict=True)]
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def _launch_coins(seed_B: Tensor, position_BN: Tensor, stream: int) -> Tensor:
    coin_BN = torch.empty(position_BN.shape, dtype=torch.float64, device=position_BN.device)
    count = position_BN.numel()
    if count:
        block = min(next_power_of_two(count), BLOCK)
        with on_device(position_BN.device):
            _coins_kernel[(-(-count // block),)](
                seed_B.contiguous(),
                position_BN.contiguous(),
                coin_BN,
                stream,
                position_BN.shape[1],
                count,
                BLOCK=block,
                num_warps=1,
            )
    return coin_BN


@jit
def _coins_kernel(seed_ptr, position_ptr, coin_ptr, stream, per_row, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    position = tl.load(position_ptr + index, mask=inside, other=0)
    seed = tl.load(seed_ptr + index // per_row, mask=inside, other=0)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros([BLOCK], tl.uint32)
    word_0, word_1, _, _ = tl.philox(seed, low, high, (zero + stream).to(tl.uint32), zero)
    bits = (word_0 >> 5).to(tl.int64) * 67108864 + (word_1 >> 6).to(tl.int64)
    tl.store(coin_ptr + index, bits.to(tl.float64) * 1.1102230246251565e-16, mask=inside)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks."""
    return [
        KernelBuild(
            name=f"coins block={block}",
            kernel=_coins_kernel,
            types={
                "seed_ptr": "*i64",
                "position_ptr": "*i64",
                "coin_ptr": "*fp64",
                **dict.fromkeys(("stream", "per_row", "count"), "i32"),
            },
            aligned=frozenset(("seed_ptr", "position_ptr", "coin_ptr")),
            constants={"BLOCK": block},
            options={"num_warps": 1},
        )
        for block in (64, BLOCK)
    ]
