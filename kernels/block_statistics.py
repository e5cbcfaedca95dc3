"""Maximum and sum of exponentials of every block of 128 logits: one read of the logits, by all processors at once.

Everything that follows needs few of the logits again. A softmax sum is the sum over blocks; the k largest logits lie in
the k blocks with the largest maxima; a token is drawn by finding its block first. 8 bytes are kept for 128 logits, and
probabilities never.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, jit, next_power_of_two, on_device, tl

BLOCK = 128
# Blocks per program: 4096 logits keep four warps busy and need few registers.
MAX_TILE = 32
ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Compiled ahead of time: where logits are only loaded and widened, fp16 differs from bf16 by one instruction.
AOT_ELEMENTS = ("fp32", "bf16")


class BlockStatistics(NamedTuple):
    """fp32, C blocks of 128 logits per node.

    max_BNC: largest logit. sum_BNC: sum of exp((logit - max) / temperature); NaN if a logit is NaN or +inf, 0 if all
    are -inf. A temperature of 0 counts as 1. Padding nodes hold anything.
    """

    max_BNC: Tensor
    sum_BNC: Tensor


def num_blocks(width: int) -> int:
    """How many blocks `width` logits make."""
    return -(-width // BLOCK)


def check_logits(logits_BNV: Tensor, name: str = "logits_BNV") -> None:
    """None if a kernel can read the logits; ValueError otherwise."""
    if logits_BNV.ndim != 3 or logits_BNV.dtype not in ELEMENTS or logits_BNV.shape[2] == 0:
        raise ValueError(
            f"{name} is {logits_BNV.dtype} {tuple(logits_BNV.shape)}: give [rows, nodes, vocabulary] with at least one "
            f"token, in {tuple(ELEMENTS)}"
        )


def block_statistics_reference(logits_BNV: Tensor, num_nodes_B: Tensor, temperature_B: Tensor) -> BlockStatistics:
    """The same as `launch_block_statistics`, with padding nodes computed too."""
    B, N, V = logits_BNV.shape
    C = num_blocks(V)
    padded = torch.nn.functional.pad(logits_BNV.float(), (0, C * BLOCK - V), value=-torch.inf)
    blocks = padded.view(B, N, C, BLOCK)
    max_BNC = blocks.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)
    shift = torch.where(max_BNC == -torch.inf, 0.0, max_BNC)
    scale = torch.where(temperature_B == 0, 1.0, 1.0 / temperature_B)[:, None, None, None]
    return BlockStatistics(max_BNC, ((blocks - shift[..., None]) * scale).exp().sum(-1))


def launch_block_statistics(logits_BNV: Tensor, num_nodes_B: Tensor, temperature_B: Tensor) -> BlockStatistics:
    """The statistics of nodes 0 .. num_nodes-1 of each row, at the row's temperature (fp32)."""
    B, N, V = logits_BNV.shape
    C = num_blocks(V)
    max_BNC = torch.empty((B, N, C), dtype=torch.float32, device=logits_BNV.device)
    sum_BNC = torch.empty_like(max_BNC)
    tile = _tile(C)
    if B * N:
        with on_device(logits_BNV.device):
            _block_statistics_kernel[(B * N, -(-C // tile))](
                logits_BNV.contiguous(),
                num_nodes_B.contiguous(),
                temperature_B.contiguous(),
                max_BNC,
                sum_BNC,
                N,
                C,
                V,
                BLOCK=BLOCK,
                TILE=tile,
                num_warps=4,
            )
    return BlockStatistics(max_BNC, sum_BNC)


def _tile(blocks: int) -> int:
    return min(next_power_of_two(blocks), MAX_TILE)


@jit
def _block_statistics_kernel(
    logits_ptr,
    num_nodes_ptr,
    temperature_ptr,
    max_ptr,
    sum_ptr,
    num_slots,
    num_blocks,
    width,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    # Program (node of a row, tile of blocks).
    slot = tl.program_id(0).to(tl.int64)
    row = slot // num_slots
    if slot % num_slots < tl.load(num_nodes_ptr + row):
        temperature = tl.load(temperature_ptr + row)
        scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
        block_T = tl.program_id(1) * TILE + tl.arange(0, TILE)
        token_TL = block_T[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        logits_TL = tl.load(logits_ptr + slot * width + token_TL, mask=token_TL < width, other=-float("inf"))
        logits_TL = logits_TL.to(tl.float32)
        max_T = tl.max(tl.where(logits_TL == logits_TL, logits_TL, -float("inf")), 1)
        shift_T = tl.where(max_T == -float("inf"), 0.0, max_T)
        sum_T = tl.sum(tl.exp((logits_TL - shift_T[:, None]) * scale), 1)
        offset_T = slot * num_blocks + block_T
        tl.store(max_ptr + offset_T, max_T, mask=block_T < num_blocks)
        tl.store(sum_ptr + offset_T, sum_T, mask=block_T < num_blocks)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: every element type, a vocabulary of one tile and of many."""
    pointers = {"num_nodes_ptr": "*i64", **dict.fromkeys(("temperature_ptr", "max_ptr", "sum_ptr"), "*fp32")}
    return [
        KernelBuild(
            name=f"block_statistics {element} tile={tile}",
            kernel=_block_statistics_kernel,
            types={
                "logits_ptr": f"*{element}",
                **pointers,
                **dict.fromkeys(("num_slots", "num_blocks", "width"), "i32"),
            },
            aligned=frozenset(("logits_ptr", *pointers, "width")),
            constants={"BLOCK": BLOCK, "TILE": tile},
            options={"num_warps": 4},
        )
        for element in ELEMENTS.values()
        for tile in (1, MAX_TILE)
    ]
