"""What `tree_attention` asks of its inputs, said in full when it is not so."""

import torch
from torch import Tensor

from eyas.kernels.tree_layout import WORD_BITS, unpack_ancestors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPE = torch.float8_e4m3fn  # what keys and values may be in besides the dtype of q
MAX_HEAD_DIM = 256


def check_inputs(
    q_BHND: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    prefix_len_B: Tensor,
    num_nodes_B: Tensor,
    ancestors_BNW: Tensor,
    window: int | None,
) -> None:
    """None if shapes, dtypes, devices and strides fit together; ValueError otherwise. Reads no values."""
    if q_BHND.ndim != 4 or k_BGLD.ndim != 4 or q_BHND.dtype not in DTYPES or not 1 <= q_BHND.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(
            f"q is {q_BHND.dtype} {tuple(q_BHND.shape)} and k has {k_BGLD.ndim} dimensions: give q [rows, heads, "
            f"nodes, head dim] and k [rows, kv heads, capacity, head dim], head dim 1 to {MAX_HEAD_DIM}, in {DTYPES}"
        )
    rows, heads, nodes, head_dim = q_BHND.shape
    kv_heads, capacity = k_BGLD.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} kv heads: give a multiple of the kv heads")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: give at least 1 (a node sees itself), or None for no window")
    kept = CACHE_DTYPE if k_BGLD.dtype == CACHE_DTYPE else q_BHND.dtype
    expected = {
        "k": (k_BGLD, (rows, kv_heads, capacity, head_dim), kept),
        "v": (v_BGLD, (rows, kv_heads, capacity, head_dim), kept),
        "prefix_len_B": (prefix_len_B, (rows,), torch.int64),
        "num_nodes_B": (num_nodes_B, (rows,), torch.int64),
        "ancestors_BNW": (ancestors_BNW, (rows, nodes, -(-nodes // WORD_BITS)), torch.int64),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != q_BHND.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {dtype} {shape} on "
                f"{q_BHND.device}, to match q {tuple(q_BHND.shape)}"
            )
    for name, tensor in (("q", q_BHND), ("k", k_BGLD), ("v", v_BGLD)):
        if head_dim > 1 and tensor.stride(3) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last one must be 1, call .contiguous() first")


def check_values(prefix_len_B: Tensor, num_nodes_B: Tensor, ancestors_BNW: Tensor, *, capacity: int) -> None:
    """None if lengths fit the cache and bits name earlier nodes; ValueError otherwise. Reads values: syncs a GPU."""
    num_slots = ancestors_BNW.shape[1]
    for row, (prefix, nodes) in enumerate(zip(prefix_len_B.tolist(), num_nodes_B.tolist(), strict=True)):
        if not 0 <= nodes <= num_slots or prefix < 0 or prefix + nodes > capacity:
            raise ValueError(
                f"row {row} has a prefix of {prefix} and {nodes} nodes: q holds 0 to {num_slots} nodes per row, and "
                f"prefix + nodes must fit the cache of {capacity} positions"
            )
    mask_BNN = unpack_ancestors(ancestors_BNW)
    node_N = torch.arange(num_slots, device=mask_BNN.device)
    is_node_BN = node_N < num_nodes_B[:, None]
    sees_itself_BN = mask_BNN.diagonal(dim1=1, dim2=2)
    sees_later_BN = (mask_BNN & (node_N > node_N[:, None])).any(-1)
    wrong_BN = is_node_BN & (~sees_itself_BN | sees_later_BN)
    if wrong_BN.any():
        row, node = wrong_BN.nonzero()[0].tolist()
        raise ValueError(
            f"ancestors_BNW[{row}, {node}] must hold node {node} itself and earlier nodes only: build it with "
            f"ancestor_mask and pack_ancestors from the parents of the tree"
        )
