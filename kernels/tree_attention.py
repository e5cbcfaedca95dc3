"""Attention of the nodes of a draft tree over the prefix cache and the tree itself, for a ragged batch.

The cache of a row holds the prefix, then one entry per tree node, then nothing yet written:

    cache position   0 ........ prefix-1 | prefix+0  prefix+1 ... prefix+nodes-1 | (never read)
    node i sees      all of these        | itself and its ancestors

The kernel packs the query heads that share a kv head with the nodes into one block of rows, so that each cache entry is
read once per kv head. It walks the cache with an online softmax in fp32: first the prefix, where every node sees every
entry, then the tree, where the ancestor bits decide. A long prefix is split over several programs that each leave a
normalised partial result and the log of its weight, merged afterwards (flash-decoding).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eyas.kernels.tree_attention_checks import CACHE_DTYPE, MAX_HEAD_DIM, check_inputs, check_values
from eyas.kernels.tree_layout import WORD_BITS, unpack_ancestors
from eyas.kernels.triton_support import KernelBuild, available, jit, next_power_of_two, on_device, tl

# A split shorter than this costs more in the merge than it wins.
MIN_SPLIT_LENGTH = 512


def tree_attention(
    q_BHND: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    *,
    prefix_len_B: Tensor,
    num_nodes_B: Tensor,
    ancestors_BNW: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """out_BHND in q's dtype: attention of every tree node; zeros for padding nodes.

    G kv heads serve H query heads (head h reads kv head h // (H / G)). L is the capacity of the cache; positions from
    prefix_len + num_nodes on may hold anything. The last dimension of q, k and v must have stride 1, other strides are
    free. prefix_len_B and num_nodes_B are int64; ancestors_BNW comes from `pack_ancestors`. dtypes: fp16, bf16, fp32,
    accumulated in fp32; k and v may be float8_e4m3fn instead (a GPU needs sm_89) and are converted as they are read.
    With `window`, a node sees only the last `window` positions up to and with its own, where position = prefix_len +
    depth (the meaning of `sliding_window` in transformers).

    Shapes and dtypes are always checked, the values only on the CPU (a GPU would have to wait); there a length out of
    range is clamped to the cache. No gradient. Errors: ValueError.
    """
    check_inputs(q_BHND, k_BGLD, v_BGLD, prefix_len_B, num_nodes_B, ancestors_BNW, window)
    arguments = (q_BHND, k_BGLD, v_BGLD, prefix_len_B, num_nodes_B, ancestors_BNW, scale, window)
    if available(q_BHND.device):
        return _launch_tree_attention(*arguments, splits=_choose_splits(q_BHND, k_BGLD))
    check_values(prefix_len_B, num_nodes_B, ancestors_BNW, capacity=k_BGLD.shape[2])
    return tree_attention_reference(*arguments)


def tree_attention_reference(
    q_BHND: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    prefix_len_B: Tensor,
    num_nodes_B: Tensor,
    ancestors_BNW: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The same as `tree_attention`, with a dense mask per row: the definition, and the CPU path."""
    out_BHND = torch.zeros_like(q_BHND, memory_format=torch.contiguous_format)
    mask_BNN = unpack_ancestors(ancestors_BNW)
    depth_BN = mask_BNN.sum(-1) - 1
    group = q_BHND.shape[1] // k_BGLD.shape[1]
    for row, (prefix, nodes) in enumerate(zip(prefix_len_B.tolist(), num_nodes_B.tolist(), strict=True)):
        depth_N = depth_BN[row, :nodes]
        tree_NN = mask_BNN[row, :nodes, :nodes]
        visible_NL = torch.cat((tree_NN.new_ones(nodes, prefix), tree_NN), dim=1)
        if window is not None:
            position_L = torch.cat((torch.arange(prefix, device=depth_N.device), prefix + depth_N))
            visible_NL &= (prefix + depth_N)[:, None] - position_L < window
        k_HLD = k_BGLD[row, :, : prefix + nodes].float().repeat_interleave(group, dim=0)
        v_HLD = v_BGLD[row, :, : prefix + nodes].float().repeat_interleave(group, dim=0)
        scores_HNL = q_BHND[row, :, :nodes].float() @ k_HLD.mT * scale
        weights_HNL = scores_HNL.masked_fill(~visible_NL, -torch.inf).softmax(-1)
        out_BHND[row, :, :nodes] = (weights_HNL @ v_HLD).to(out_BHND.dtype)
    return out_BHND


def _choose_splits(q_BHND: Tensor, k_BGLD: Tensor) -> int:
    # From the capacity, not the lengths: reading those would stall the GPU. Two programs per processor keep it busy.
    rows, heads, nodes, head_dim = q_BHND.shape
    kv_heads, capacity = k_BGLD.shape[1:3]
    num_rows = heads // kv_heads * nodes
    block_m = _launch_shape(head_dim, q_BHND.dtype, num_rows, over=k_BGLD.dtype)[0]["BLOCK_M"]
    programs = max(rows * kv_heads * -(-num_rows // block_m), 1)
    on_gpu = q_BHND.device.type == "cuda"
    processors = torch.cuda.get_device_properties(q_BHND.device).multi_processor_count if on_gpu else 1
    return max(1, min(2 * processors // programs, capacity // MIN_SPLIT_LENGTH))


def _launch_shape(
    head_dim: int, dtype: torch.dtype, num_rows: int, *, over: torch.dtype
) -> tuple[dict[str, Any], dict[str, int]]:
    """The block sizes and the options of a launch over keys in a dtype; `eyas.kernels.aot` checks that none spills."""
    exact = dtype == torch.float32
    block_d = max(next_power_of_two(head_dim), 16)
    # What converts keys of 256 spills on sm_90 in blocks of 32 keys and on sm_100 in blocks of 16 rows.
    converts_wide = over == CACHE_DTYPE and not exact and block_d == MAX_HEAD_DIM
    constants = {
        "WORD_BITS": WORD_BITS,
        "HEAD_DIM": head_dim,
        "BLOCK_M": min(max(next_power_of_two(num_rows), 32 if converts_wide else 16), 16 if exact else 64),
        "BLOCK_L": 16 if converts_wide else 32,
        "BLOCK_D": block_d,
        # TF32 would lose 13 bits of every fp32 product, and with them token-by-token equality to plain decoding.
        "PRECISION": "ieee" if exact else "tf32",
    }
    wide, over_fp8 = block_d == MAX_HEAD_DIM, over == CACHE_DTYPE
    if exact and block_d >= 64:  # eight warps spill 64 numbers over fp8 on sm_100, with a window
        return constants, {"num_warps": 4 if over_fp8 and block_d == 64 else 8, "num_stages": 1}
    if constants["BLOCK_M"] == 32 and not over_fp8:  # with a window, sm_80 spills 256 numbers in 8 warps and 128 in 4
        return constants, {"num_warps": 8 if block_d == 128 else 4, "num_stages": 2}
    return constants, {"num_warps": 8 if wide else 4, "num_stages": 2}


def _launch_tree_attention(
    q_BHND: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    prefix_len_B: Tensor,
    num_nodes_B: Tensor,
    ancestors_BNW: Tensor,
    scale: float,
    window: int | None = None,
    *,
    splits: int,
) -> Tensor:
    rows, heads, nodes, head_dim = q_BHND.shape
    kv_heads, capacity = k_BGLD.shape[1:3]
    group = heads // kv_heads
    dtype = q_BHND.dtype if splits == 1 else torch.float32
    out_SBHND = torch.empty((splits, rows, heads, nodes, head_dim), dtype=dtype, device=q_BHND.device)
    log_weight_SBHN = torch.empty((splits, rows, heads, nodes), dtype=torch.float32, device=q_BHND.device)
    ancestors_BNW = ancestors_BNW.contiguous()
    # Only a window needs depths; the kernel does not touch the pointer without one.
    depth_BN = ancestors_BNW if window is None else unpack_ancestors(ancestors_BNW).sum(-1) - 1
    constants, options = _launch_shape(head_dim, q_BHND.dtype, group * nodes, over=k_BGLD.dtype)
    with on_device(q_BHND.device):
        _tree_attention_kernel[(rows * splits, kv_heads, -(-group * nodes // constants["BLOCK_M"]))](
            q_BHND,
            k_BGLD,
            v_BGLD,
            prefix_len_B.contiguous(),
            num_nodes_B.contiguous(),
            ancestors_BNW,
            depth_BN,
            out_SBHND,
            log_weight_SBHN,
            scale,
            *q_BHND.stride()[:3],
            *k_BGLD.stride()[:3],
            *v_BGLD.stride()[:3],
            splits,
            group,
            nodes,
            ancestors_BNW.shape[2],
            capacity,
            WINDOW=window or 0,
            **constants,
            **options,
        )
    return out_SBHND[0] if splits == 1 else _merge_splits(out_SBHND, log_weight_SBHN).to(q_BHND.dtype)


def _merge_splits(out_SBHND: Tensor, log_weight_SBHN: Tensor) -> Tensor:
    weight_SBHN = log_weight_SBHN.softmax(0)
    # A padding node has no weight in any split: 0, where softmax would give NaN.
    weight_SBHN = weight_SBHN.masked_fill(log_weight_SBHN == -torch.inf, 0.0)
    return (weight_SBHN[..., None] * out_SBHND).sum(0)


@jit
def _attend(
    q_MD,
    k_row_ptr,
    v_row_ptr,
    k_stride_l,
    v_stride_l,
    position_L,
    in_range_L,
    visible_ML,
    scale,
    max_M,
    sum_M,
    out_MD,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One step of the online softmax: the running maximum, sum and output of each row after another block of the cache.
    dim_D = tl.arange(0, BLOCK_D)
    mask_LD = in_range_L[:, None] & (dim_D < HEAD_DIM)[None, :]
    offset_L = position_L.to(tl.int64)
    k_LD = tl.load(k_row_ptr + offset_L[:, None] * k_stride_l + dim_D[None, :], mask=mask_LD, other=0.0)
    v_LD = tl.load(v_row_ptr + offset_L[:, None] * v_stride_l + dim_D[None, :], mask=mask_LD, other=0.0)
    k_LD, v_LD = k_LD.to(q_MD.dtype), v_LD.to(q_MD.dtype)  # an fp8 cache becomes numbers to multiply here
    scores_ML = tl.dot(q_MD, tl.trans(k_LD), input_precision=PRECISION) * scale
    scores_ML = tl.where(visible_ML, scores_ML, -float("inf"))
    new_max_M = tl.maximum(max_M, tl.max(scores_ML, 1))
    # A row that has seen nothing yet has maximum -inf; shifting by 0 instead keeps its weights 0 and not NaN.
    shift_M = tl.where(new_max_M == -float("inf"), 0.0, new_max_M)
    weights_ML = tl.exp(scores_ML - shift_M[:, None])
    decay_M = tl.exp(max_M - shift_M)
    sum_M = sum_M * decay_M + tl.sum(weights_ML, 1)
    out_MD = tl.dot(weights_ML.to(v_LD.dtype), v_LD, out_MD * decay_M[:, None], input_precision=PRECISION)
    return new_max_M, sum_M, out_MD


@jit
def _tree_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    prefix_len_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    depth_ptr,
    out_ptr,
    log_weight_ptr,
    scale,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_g,
    k_stride_l,
    v_stride_b,
    v_stride_g,
    v_stride_l,
    splits,
    group,
    num_slots,
    num_words,
    capacity,
    WINDOW: tl.constexpr,
    WORD_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Program (batch row and split, kv head, block of rows); row r of a kv head is node r % N of its query head r // N.
    # Whatever multiplies a stride is int64: a cache can hold more than 2**31 elements.
    batch = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1).to(tl.int64)
    row_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    node_M = row_M % num_slots
    in_rows_M = row_M < group * num_slots
    lane_L = tl.arange(0, BLOCK_L)
    dim_D = tl.arange(0, BLOCK_D)

    # Clamped, so that no length can lead outside the cache.
    prefix = tl.minimum(tl.maximum(tl.load(prefix_len_ptr + batch), 0), capacity).to(tl.int32)
    nodes = tl.minimum(tl.load(num_nodes_ptr + batch), tl.minimum(num_slots, capacity - prefix)).to(tl.int32)
    is_node_M = in_rows_M & (node_M < nodes)

    q_row_M = batch * q_stride_b + (kv_head * group + row_M // num_slots) * q_stride_h + node_M * q_stride_n
    in_head_D = dim_D < HEAD_DIM
    q_mask_MD = is_node_M[:, None] & in_head_D[None, :]
    q_MD = tl.load(q_ptr + q_row_M[:, None] + dim_D[None, :], mask=q_mask_MD, other=0.0)
    k_row_ptr = k_ptr + batch * k_stride_b + kv_head * k_stride_g
    v_row_ptr = v_ptr + batch * v_stride_b + kv_head * v_stride_g
    slot = batch * num_slots
    if WINDOW > 0:
        depth_M = tl.load(depth_ptr + slot + node_M, mask=is_node_M, other=0).to(tl.int32)

    max_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # The prefix: this split's share of it. The root's window reaches furthest back.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(prefix - WINDOW + 1, 0)
    share = tl.cdiv(prefix - first, splits)
    start = first + split * share
    stop = tl.minimum(start + share, prefix)
    for block_start in range(start, stop, BLOCK_L):
        position_L = block_start + lane_L
        in_share_L = position_L < stop
        visible_ML = is_node_M[:, None] & in_share_L[None, :]
        if WINDOW > 0:
            visible_ML &= prefix + depth_M[:, None] - position_L[None, :] < WINDOW
        max_M, sum_M, out_MD = _attend(
            q_MD, k_row_ptr, v_row_ptr, k_stride_l, v_stride_l, position_L, in_share_L, visible_ML, scale,
            max_M, sum_M, out_MD, HEAD_DIM, BLOCK_D, PRECISION,
        )  # fmt: skip

    # The tree: the last split's work. BLOCK_L divides the word length, so a block lies in one word of each row.
    tree_stop = tl.where(split == splits - 1, nodes, 0)
    for block_start in range(0, tree_stop, BLOCK_L):
        other_L = block_start + lane_L
        in_tree_L = other_L < tree_stop
        word_ptr_M = ancestors_ptr + (slot + node_M) * num_words + block_start // WORD_BITS
        word_M = tl.load(word_ptr_M, mask=is_node_M, other=0)
        bit_L = (other_L % WORD_BITS).to(tl.int64)
        visible_ML = (((word_M[:, None] >> bit_L[None, :]) & 1) != 0) & in_tree_L[None, :]
        if WINDOW > 0:
            depth_L = tl.load(depth_ptr + slot + other_L, mask=in_tree_L, other=0).to(tl.int32)
            visible_ML &= depth_M[:, None] - depth_L[None, :] < WINDOW
        max_M, sum_M, out_MD = _attend(
            q_MD, k_row_ptr, v_row_ptr, k_stride_l, v_stride_l, prefix + other_L, in_tree_L, visible_ML, scale,
            max_M, sum_M, out_MD, HEAD_DIM, BLOCK_D, PRECISION,
        )  # fmt: skip

    # A row that saw nothing (a padding node, or a split without a share) leaves zeros of weight exp(-inf).
    safe_sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    num_batches = tl.num_programs(0) // splits
    out_row_M = ((split * num_batches + batch) * tl.num_programs(1) + kv_head) * group * num_slots + row_M
    out_ptr_MD = out_ptr + out_row_M[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(out_ptr_MD, out_MD / safe_sum_M[:, None], mask=in_rows_M[:, None] & in_head_D[None, :])
    tl.store(log_weight_ptr + out_row_M, max_M + tl.log(safe_sum_M), mask=in_rows_M)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: every launch shape, at the usual head dims, fp8 caches first."""
    lengths = ("prefix_len_ptr", "num_nodes_ptr", "ancestors_ptr", "depth_ptr")
    strides = (
        *(f"q_stride_{axis}" for axis in "bhn"),
        *(f"{tensor}_stride_{axis}" for tensor in "kv" for axis in "bgl"),
    )
    counts = ("splits", "group", "num_slots", "num_words", "capacity")
    bf16, fp16, fp32 = ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)
    halves, windows = (fp16, bf16), (0, 1024)
    launches = [
        *((*fp32, head_dim, 16, window) for head_dim in (64, 128, 256) for window in windows),
        *(
            (*half, head_dim, num_rows, window)
            for half in halves
            for head_dim in (64, 128, 256)
            for num_rows in (16, 32, 64)
            for window in windows
        ),
        *((*bf16, head_dim, 64, window) for head_dim in (32, 80, 96, 192) for window in windows),
    ]
    builds = []
    everything = [(is_fp8, launch) for is_fp8 in (True, False) for launch in launches]
    for is_fp8, (element, dtype, head_dim, num_rows, window) in everything:
        pointers = dict.fromkeys(("q_ptr", "out_ptr"), f"*{element}") | dict.fromkeys(lengths, "*i64")
        pointers |= dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv" if is_fp8 else f"*{element}")
        pointers["log_weight_ptr"] = "*fp32"
        constants, options = _launch_shape(head_dim, dtype, num_rows, over=CACHE_DTYPE if is_fp8 else dtype)
        over = " over fp8" if is_fp8 else ""
        builds.append(
            KernelBuild(
                name=f"tree_attention {element}{over} head_dim={head_dim} rows<={num_rows} window={window}",
                kernel=_tree_attention_kernel,
                types={**pointers, "scale": "fp32", **dict.fromkeys((*strides, *counts), "i32")},
                aligned=frozenset((*pointers, *strides)),
                constants={"WINDOW": window, **constants},
                options=options,
                since=90 if is_fp8 else 80,  # the first of ours; sm_89 has fp8 too
            )
        )
    return builds
