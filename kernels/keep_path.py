"""The accepted path's keys and values, moved in place from where the tree lay to where the text goes on.

    before   ... prefix | root  a  b  c  d  e      accepted: root, b, d
    after    ... prefix | root  b  d  c  d  e      (what follows is overwritten by the next round)

A path ascends, so entry i comes from position path[i] >= i and never from a place already written; but it may lie where
an earlier entry still has to be read, so one program moves the entries of a kv head one after the other.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl

ELEMENTS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def as_bits(x: Tensor) -> Tensor:
    """`x` as every device can index and copy it: fp8 as its bytes, anything else as it is. The same memory."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def keep_path(cache_SBGLD: Tensor, prefix_len_B: Tensor, path_BN: Tensor, num_accepted_B: Tensor) -> None:
    """None: moves the entries of path_BN (1 .. num_accepted of it) of every row to prefix_len + 1, prefix_len + 2, ...

    S buffers of one shape (keys and values of all layers, stacked) are moved in one launch; the last dimension must
    have stride 1. Paths as `verify_tree_greedy` returns them: int64, ascending, 0 first (an idle row: -1 and nothing
    accepted). Shapes and dtypes are always checked, the values only on the CPU; elsewhere a position outside the cache
    is not read and not written. Errors: ValueError.
    """
    if cache_SBGLD.ndim != 5 or cache_SBGLD.dtype not in ELEMENTS or cache_SBGLD.stride(-1) != 1:
        raise ValueError(
            f"the cache is {cache_SBGLD.dtype} {tuple(cache_SBGLD.shape)} with strides {cache_SBGLD.stride()}: give "
            f"[buffers, rows, kv heads, capacity, head dim] in {ELEMENTS}, the last stride 1"
        )
    rows, capacity = cache_SBGLD.shape[1], cache_SBGLD.shape[3]
    nodes = path_BN.shape[-1]
    for name, tensor, shape in (
        ("prefix_len_B", prefix_len_B, (rows,)),
        ("path_BN", path_BN, (rows, nodes)),
        ("num_accepted_B", num_accepted_B, (rows,)),
    ):
        if tensor.shape != shape or tensor.dtype != torch.int64 or tensor.device != cache_SBGLD.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give torch.int64 {shape} on "
                f"{cache_SBGLD.device}"
            )
    if available(cache_SBGLD.device):
        _launch_keep_path(cache_SBGLD, prefix_len_B, path_BN, num_accepted_B)
        return
    for row, (prefix, accepted) in enumerate(zip(prefix_len_B.tolist(), num_accepted_B.tolist(), strict=True)):
        path = path_BN[row, : accepted + 1].tolist()
        ascends = all(a < b for a, b in pairwise(path)) and (path[:1] in ([], [0]) or path == [-1])
        if not 0 <= accepted < max(nodes, 1) or prefix < 0 or not ascends or (path and prefix + path[-1] >= capacity):
            raise ValueError(
                f"row {row} has a prefix of {prefix}, {accepted} accepted nodes and the path {path}: a path starts at "
                f"0, ascends, and lies within the cache of {capacity} positions"
            )
    keep_path_reference(cache_SBGLD, prefix_len_B, path_BN, num_accepted_B)


def keep_path_reference(cache_SBGLD: Tensor, prefix_len_B: Tensor, path_BN: Tensor, num_accepted_B: Tensor) -> None:
    """The same as `keep_path`, row by row: the definition, and the CPU path."""
    cache_SBGLD = as_bits(cache_SBGLD)
    for row, (prefix, accepted) in enumerate(zip(prefix_len_B.tolist(), num_accepted_B.tolist(), strict=True)):
        source = prefix + path_BN[row, 1 : accepted + 1]
        cache_SBGLD[:, row, :, prefix + 1 : prefix + 1 + accepted] = cache_SBGLD[:, row, :, source]


def _launch_keep_path(cache_SBGLD: Tensor, prefix_len_B: Tensor, path_BN: Tensor, num_accepted_B: Tensor) -> None:
    cache_SBGLD = as_bits(cache_SBGLD)
    buffers, rows, kv_heads, capacity, head_dim = cache_SBGLD.shape
    if cache_SBGLD.numel() == 0 or path_BN.shape[1] == 0:
        return
    with on_device(cache_SBGLD.device):
        _keep_path_kernel[(buffers * kv_heads, rows)](
            cache_SBGLD,
            prefix_len_B.contiguous(),
            path_BN.contiguous(),
            num_accepted_B.contiguous(),
            *cache_SBGLD.stride()[:4],
            kv_heads,
            path_BN.shape[1],
            capacity,
            HEAD_DIM=head_dim,
            BLOCK_D=next_power_of_two(head_dim),
            num_warps=1,
        )


@jit
def _keep_path_kernel(
    cache_ptr,
    prefix_len_ptr,
    path_ptr,
    num_accepted_ptr,
    stride_s,
    stride_b,
    stride_g,
    stride_l,
    kv_heads,
    num_slots,
    capacity,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Program (buffer and kv head, row). Whatever multiplies a stride is int64: a cache can exceed 2**31 elements.
    buffer = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    prefix = tl.load(prefix_len_ptr + row)
    accepted = tl.minimum(tl.load(num_accepted_ptr + row), num_slots - 1)
    dim_D = tl.arange(0, BLOCK_D)
    head_ptr = cache_ptr + buffer * stride_s + row * stride_b + kv_head * stride_g + dim_D
    for i in range(1, accepted + 1):
        source = prefix + tl.load(path_ptr + row * num_slots + i)
        is_inside = (prefix >= 0) & (source >= 0) & (source < capacity) & (prefix + i < capacity)
        in_head_D = dim_D < tl.where(is_inside, HEAD_DIM, 0)
        entry_D = tl.load(head_ptr + source * stride_l, mask=in_head_D)
        tl.debug_barrier()  # read by every thread before a later entry is written here
        tl.store(head_ptr + (prefix + i) * stride_l, entry_D, mask=in_head_D)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: 4, 2 and 1 bytes per element at the usual head dims."""
    lengths = ("prefix_len_ptr", "path_ptr", "num_accepted_ptr")
    strides = ("stride_s", "stride_b", "stride_g", "stride_l")
    return [
        KernelBuild(
            name=f"keep_path {element} head_dim={head_dim}",
            kernel=_keep_path_kernel,
            types={
                "cache_ptr": pointer,
                **dict.fromkeys(lengths, "*i64"),
                **dict.fromkeys(strides, "i32"),
                "stride_s": "i64",
                **dict.fromkeys(("kv_heads", "num_slots", "capacity"), "i32"),
            },
            aligned=frozenset(("cache_ptr", *lengths, *strides)),
            constants={"HEAD_DIM": head_dim, "BLOCK_D": next_power_of_two(head_dim)},
            options={"num_warps": 1},
        )
        for element, pointer in (("fp32", "*fp32"), ("bf16", "*bf16"), ("fp8", "*u8"))
        for head_dim in (64, 80, 128, 256)
    ]
