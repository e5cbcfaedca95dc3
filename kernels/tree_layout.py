"""Draft trees as batched tensors: the check of their shape, and who is whose ancestor.

A tree is its parents: node 0 is the root (parent -1) and every parent has a lower index than its children. A row of a
batch uses its first `num_nodes` nodes, the rest is padding; 0 nodes is an idle row. Attention needs the ancestors,
stored as bits: bit j % 64 of word j // 64 of row i says that node j is node i or one of its ancestors.

        0            node   parent   ancestors and self (one word)
       / \\            0       -1     0b00001
      1   2           1        0     0b00011
         / \\          2        0     0b00101
        3   4         3        2     0b01101
                      4        2     0b10101
"""

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 64


def check_trees(parents_BN: Tensor, num_nodes_B: Tensor) -> None:
    """None if every row is a tree; ValueError naming the first row and node that is not. Reads values: syncs a GPU."""
    parents, num_nodes = parents_BN.cpu().numpy(), num_nodes_B.cpu().numpy()
    num_slots = parents.shape[1]
    outside = (num_nodes < 0) | (num_nodes > num_slots)
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(
            f"num_nodes_B[{row}] is {num_nodes[row]}, but the tree tensors have {num_slots} nodes per row: "
            f"give 0 (idle row) to {num_slots}"
        )
    node = np.arange(num_slots)
    is_right = (parents < node) & (parents >= np.minimum(node, 1) - 1)  # node 0: -1; the others: 0 to themselves - 1
    wrong = ~is_right & (node < num_nodes[:, None])
    if wrong.any():
        row, place = np.argwhere(wrong)[0]
        allowed = (
            "-1, because node 0 is the root" if place == 0 else f"0 to {place - 1}: parents precede their children"
        )
        raise ValueError(f"parents_BN[{row}, {place}] is {parents[row, place]}, but must be {allowed}")


def ancestor_mask(parents_BN: Tensor, num_nodes_B: Tensor) -> Tensor:
    """Bool mask_BNN: [b, i, j] is True iff node j is node i or an ancestor of it; rows of padding nodes are False.

    Runs without reading values back, in log2(N) steps: squaring "is me or my parent" doubles the reach each time.
    """
    num_slots = parents_BN.shape[1]
    node_N = torch.arange(num_slots, device=parents_BN.device)
    is_node_BN = node_N < num_nodes_B[:, None]
    is_parent_BNN = (parents_BN[:, :, None] == node_N) & is_node_BN[:, :, None]
    reach_BNN = is_parent_BNN | torch.diag_embed(is_node_BN)
    for _ in range((num_slots - 1).bit_length()):
        # Counts of paths up to N are exact in fp32, and integer matrix products do not exist on a GPU.
        reach_BNN = reach_BNN.float() @ reach_BNN.float() > 0
    return reach_BNN


def pack_ancestors(mask_BNN: Tensor) -> Tensor:
    """int64 ancestors_BNW, W = ceil(N / 64): the bits of a bool mask_BNN, lowest bit first."""
    num_slots = mask_BNN.shape[-1]
    num_words = -(-num_slots // WORD_BITS)
    padded = torch.nn.functional.pad(mask_BNN.long(), (0, num_words * WORD_BITS - num_slots))
    bit = torch.arange(WORD_BITS, device=mask_BNN.device)
    # Distinct bits add without a carry, so the sum is their union, the sign bit included.
    return (padded.unflatten(-1, (num_words, WORD_BITS)) << bit).sum(-1)


def unpack_ancestors(ancestors_BNW: Tensor) -> Tensor:
    """Bool mask_BNN, the inverse of `pack_ancestors`; N is the number of rows."""
    bit = torch.arange(WORD_BITS, device=ancestors_BNW.device)
    bits = (ancestors_BNW[..., None] >> bit) & 1
    return bits.flatten(-2)[..., : ancestors_BNW.shape[1]].bool()


def sight_mask(prefix_len_B: Tensor, tree_BTN: Tensor, length: int) -> Tensor:
    """Bool mask_BTL over cache slots: the row's prefix, and behind it what tree_BTN says of its N nodes.

    Every row needs N slots behind its prefix. Reads nothing back.
    """
    T, N = tree_BTN.shape[1:]
    slot_L = torch.arange(length, device=prefix_len_B.device)
    mask_BTL = (slot_L < prefix_len_B[:, None])[:, None].repeat(1, T, 1)
    node_BN = prefix_len_B[:, None] + slot_L[:N]
    return mask_BTL.scatter_(2, node_BN[:, None].expand(-1, T, -1), tree_BTN)
