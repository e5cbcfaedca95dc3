"""Tokens drawn from every node's distribution with given coins: temperature, top-k and top-p per request.

Inverse CDF in the order of the vocabulary: the token is the first whose cumulative mass exceeds coin * total, among the
tokens that have mass. So a coin in [0, 1) never yields a token of probability zero, however sums round. A node whose
logits hold NaN (or nothing finite) yields -1 and must be treated as a failed forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.block_statistics import AOT_ELEMENTS, BLOCK, check_logits
from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl
from eyas.kernels.truncate import BatchSampling, Truncated, launch_truncate, probabilities_reference

# Registers of a program: coins times blocks, and coins times the logits of a block.
MAX_CELLS = 4096


def draw_tokens(logits_BNV: Tensor, num_nodes_B: Tensor, sampling: BatchSampling, coins_BNK: Tensor) -> Tensor:
    """token_BNK int64: K draws per node, -1 for nodes from num_nodes (int64) on and for nodes with NaN logits.

    coins_BNK: fp64 in [0, 1). logits: fp16, bf16 or fp32. Shapes and dtypes are always checked, values only on the CPU.
    Besides its result a GPU holds 12 bytes per 128 logits. Errors: ValueError.
    """
    check_draw(logits_BNV, num_nodes_B, sampling, coins_BNK)
    if available(logits_BNV.device):
        return _launch_draw_tokens(launch_truncate(logits_BNV, num_nodes_B, sampling), coins_BNK)
    return draw_tokens_reference(logits_BNV, num_nodes_B, sampling, coins_BNK)


def check_draw(logits_BNV: Tensor, num_nodes_B: Tensor, sampling: BatchSampling, coins_BNK: Tensor) -> None:
    """None if the arguments of `draw_tokens` fit together; ValueError otherwise."""
    check_logits(logits_BNV)
    B, N, _ = logits_BNV.shape
    device = logits_BNV.device
    if num_nodes_B.shape != (B,) or num_nodes_B.dtype != torch.int64 or num_nodes_B.device != device:
        raise ValueError(
            f"num_nodes_B is {num_nodes_B.dtype} {tuple(num_nodes_B.shape)} on {num_nodes_B.device}: give torch.int64 "
            f"({B},) on {device}"
        )
    if coins_BNK.shape[:-1] != (B, N) or coins_BNK.dtype != torch.float64 or coins_BNK.device != device:
        raise ValueError(
            f"coins are {coins_BNK.dtype} {tuple(coins_BNK.shape)} on {coins_BNK.device}: give torch.float64 with "
            f"leading dimensions ({B}, {N}) on {device}"
        )
    sampling.check(B, device)
    if device.type == "cpu":
        check_coins(coins_BNK)


def check_coins(coins: Tensor) -> None:
    """None if all coins lie in [0, 1); ValueError otherwise. Reads values: syncs a GPU."""
    if not bool(((coins >= 0) & (coins < 1)).all()):
        raise ValueError("coins must lie in [0, 1): 1 itself would draw nothing")


def draw_tokens_reference(
    logits_BNV: Tensor, num_nodes_B: Tensor, sampling: BatchSampling, coins_BNK: Tensor
) -> Tensor:
    """The same as `draw_tokens`, from dense fp64 probabilities: the definition, and the CPU path."""
    token_BNK = torch.full(coins_BNK.shape, -1, device=logits_BNV.device)
    settings = zip(sampling.temperature_B.tolist(), sampling.top_k_B.tolist(), sampling.top_p_B.tolist(), strict=True)
    for row, (nodes, how) in enumerate(zip(num_nodes_B.tolist(), settings, strict=True)):
        p_NV = probabilities_reference(logits_BNV[row, :nodes], *how)
        token_BNK[row, :nodes] = draw_reference(p_NV, coins_BNK[row, :nodes])
    return token_BNK


def draw_reference(weights_RV: Tensor, coins_RK: Tensor) -> Tensor:
    """token_RK drawn in proportion to fp64 weights; -1 where they hold NaN or have no mass."""
    cumulative = weights_RV.cumsum(-1)
    total = cumulative[:, -1:]
    token_V = torch.arange(weights_RV.shape[-1], device=weights_RV.device)
    last = torch.where(weights_RV > 0, token_V, -1).amax(-1, keepdim=True)
    drawn = torch.searchsorted(cumulative.nan_to_num(), coins_RK * total, right=True)
    return torch.where(total > 0, torch.minimum(drawn, last), -1)


def _launch_draw_tokens(truncated: Truncated, coins_BNK: Tensor, *, block_k: int | None = None) -> Tensor:
    B, N, V = truncated.logits_BNV.shape
    K, C = coins_BNK.shape[2], truncated.mass_BNC.shape[2]
    token_BNK = torch.empty(coins_BNK.shape, dtype=torch.int64, device=coins_BNK.device)
    block_c = next_power_of_two(C)
    block_k = block_k or _coins_per_program(K, block_c)
    if token_BNK.numel():
        with on_device(coins_BNK.device):
            _draw_tokens_kernel[(B * N, -(-K // block_k))](
                truncated.logits_BNV,
                truncated.num_nodes_B.contiguous(),
                truncated.temperature_B,
                truncated.top_BN,
                truncated.cut_BN,
                truncated.only_BN,
                truncated.mass_BNC,
                coins_BNK.contiguous(),
                token_BNK,
                N,
                C,
                V,
                K,
                BLOCK=BLOCK,
                BLOCK_C=block_c,
                BLOCK_K=block_k,
                num_warps=4,
            )
    return token_BNK


def _coins_per_program(coins: int, block_c: int) -> int:
    return max(1, min(next_power_of_two(coins), MAX_CELLS // max(block_c, BLOCK)))


@jit
def pick(mass_KC, target_K, place_KC, END: tl.constexpr):
    """Per row: the first place with mass whose cumulative mass exceeds the target (else the last with mass), and the
    mass before it; END and 0 where no place has mass. fp64."""
    cumulative_KC = tl.cumsum(mass_KC, 1)
    has_mass_KC = mass_KC > 0.0
    first_K = tl.min(tl.where(has_mass_KC & (cumulative_KC > target_K[:, None]), place_KC, END), 1)
    last_K = tl.max(tl.where(has_mass_KC, place_KC, -1), 1)
    place_K = tl.where(first_K < END, first_K, tl.where(last_K >= 0, last_K, END))
    is_picked_KC = place_KC == place_K[:, None]
    before_K = tl.sum(tl.where(is_picked_KC, cumulative_KC - mass_KC, 0.0), 1)
    return place_K, before_K


@jit
def _draw_tokens_kernel(
    logits_ptr,
    num_nodes_ptr,
    temperature_ptr,
    top_ptr,
    cut_ptr,
    only_ptr,
    mass_ptr,
    coins_ptr,
    token_ptr,
    num_slots,
    num_blocks,
    width,
    num_coins,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Program (node of a row, block of coins): first the block of the vocabulary, then the token in it.
    slot = tl.program_id(0).to(tl.int64)
    row = slot // num_slots
    coin_K = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_coins_K = coin_K < num_coins
    token_K = tl.full([BLOCK_K], -1, tl.int64)
    if slot % num_slots < tl.load(num_nodes_ptr + row):
        coins_K = tl.load(coins_ptr + slot * num_coins + coin_K, mask=in_coins_K, other=0.0)
        temperature = tl.load(temperature_ptr + row)
        scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
        top = tl.load(top_ptr + slot)
        cut = tl.load(cut_ptr + slot)
        only = tl.load(only_ptr + slot)
        block_C = tl.arange(0, BLOCK_C)
        mass_C = tl.load(mass_ptr + slot * num_blocks + block_C, mask=block_C < num_blocks, other=0.0).to(tl.float64)
        target_K = coins_K * tl.sum(mass_C)
        block_KC = tl.broadcast_to(block_C[None, :], (BLOCK_K, BLOCK_C))
        mass_KC = tl.broadcast_to(mass_C[None, :], (BLOCK_K, BLOCK_C))
        block_K, before_K = pick(mass_KC, target_K, block_KC, BLOCK_C)

        lane_KL = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (BLOCK_K, BLOCK))
        place_KL = block_K[:, None] * BLOCK + lane_KL
        inside_KL = place_KL < width
        logits_KL = tl.load(logits_ptr + slot * width + place_KL, mask=inside_KL, other=-float("inf")).to(tl.float32)
        is_kept_KL = inside_KL & (logits_KL >= cut)
        mass_KL = tl.where(is_kept_KL, tl.exp((logits_KL - top) * scale), 0.0).to(tl.float64)
        lane_K, _ = pick(mass_KL, target_K - before_K, lane_KL, BLOCK)
        is_drawn_K = (block_K < BLOCK_C) & (lane_K < BLOCK)
        token_K = tl.where(is_drawn_K, block_K.to(tl.int64) * BLOCK + lane_K, -1)
        token_K = tl.where(only >= 0, only, token_K)
    tl.store(token_ptr + slot * num_coins + coin_K, token_K, mask=in_coins_K)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: one coin per node, and many for a small vocabulary."""
    pointers = {
        **dict.fromkeys(("num_nodes_ptr", "only_ptr", "token_ptr"), "*i64"),
        **dict.fromkeys(("temperature_ptr", "top_ptr", "cut_ptr", "mass_ptr"), "*fp32"),
        "coins_ptr": "*fp64",
    }
    return [
        KernelBuild(
            name=f"draw_tokens {element} vocabulary<={blocks * BLOCK} coins={coins}",
            kernel=_draw_tokens_kernel,
            types={
                "logits_ptr": f"*{element}",
                **pointers,
                **dict.fromkeys(("num_slots", "num_blocks", "width", "num_coins"), "i32"),
            },
            aligned=frozenset(("logits_ptr", *pointers, "width")),
            constants={"BLOCK": BLOCK, "BLOCK_C": blocks, "BLOCK_K": _coins_per_program(coins, blocks)},
            options={"num_warps": 4},
        )
        for element in AOT_ELEMENTS
        for blocks, coins in ((1, 1), (512, 1), (1024, 1), (2048, 1), (1, 64))
    ]
