"""Lossless sampling verification of deterministic draft trees, from logits alone.

Walk from the root; at each node draw X from the target's distribution there and step to the child X if there is one; if
not, X is the bonus token. That is exact for trees whose children are not random (top-k proposals): the emitted tokens
are the target's own draws, whatever was drafted, and no draft probability is needed. It is also the best possible for
such trees, since a draft is accepted whenever it is what the target says.

The coin of a node decides the token *after* it, so the draws at all nodes are made at once and the walk is the greedy
one, with draws in the place of argmaxes. Nodes of one depth may (and should) share a coin, as only one is walked: with
coins by position (`eyas.kernels.coins`) a request emits the same text with and without speculation.

Memory: 12 bytes per 128 logits beside the logits: 24 MiB at 32 rows of 64 nodes over 128256 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.draw_tokens import _launch_draw_tokens, check_draw, draw_reference
from eyas.kernels.tree_layout import check_trees
from eyas.kernels.triton_support import available
from eyas.kernels.truncate import BatchSampling, launch_truncate, probabilities_reference
from eyas.kernels.verify_tree_greedy import TreeVerification, _launch_verify_tree_greedy


def verify_tree_sampling(
    logits_BNV: Tensor,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    num_nodes_B: Tensor,
    *,
    sampling: BatchSampling,
    coins_BN: Tensor,
) -> TreeVerification:
    """The accepted path, its length and the bonus token of each row; -1 as bonus says NaN logits or an idle row.

    Trees as for `verify_tree_greedy`; logits (fp16, bf16, fp32) of each node predict the token after it. coins_BN: fp64
    in [0, 1); coins on one path must be independent. Requests of temperature 0 are verified greedily. Shapes and dtypes
    are always checked, the values only on the CPU (a GPU would have to wait). Errors: ValueError.
    """
    check_draw(logits_BNV, num_nodes_B, sampling, coins_BN[..., None])
    for name, tensor in (("tokens_BN", tokens_BN), ("parents_BN", parents_BN)):
        if tensor.shape != logits_BNV.shape[:2] or tensor.dtype != torch.int64 or tensor.device != logits_BNV.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give torch.int64 "
                f"{tuple(logits_BNV.shape[:2])} on {logits_BNV.device}, one per row of logits"
            )
    if available(logits_BNV.device):
        return _launch_verify_tree_sampling(logits_BNV, tokens_BN, parents_BN, num_nodes_B, sampling, coins_BN)
    check_trees(parents_BN, num_nodes_B)
    return verify_tree_sampling_reference(logits_BNV, tokens_BN, parents_BN, num_nodes_B, sampling, coins_BN)


def verify_tree_sampling_reference(
    logits_BNV: Tensor,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    num_nodes_B: Tensor,
    sampling: BatchSampling,
    coins_BN: Tensor,
) -> TreeVerification:
    """The same as `verify_tree_sampling`, walking row by row in fp64: the definition, and the CPU path."""
    path_BN = torch.full_like(tokens_BN, -1)
    num_accepted_B = torch.zeros_like(num_nodes_B)
    bonus_B = torch.full_like(num_nodes_B, -1)
    settings = zip(sampling.temperature_B.tolist(), sampling.top_k_B.tolist(), sampling.top_p_B.tolist(), strict=True)
    for row, (num_nodes, how) in enumerate(zip(num_nodes_B.tolist(), settings, strict=True)):
        if num_nodes == 0:
            continue
        tokens, parents = tokens_BN[row].tolist(), parents_BN[row].tolist()
        path: list[int] = []
        child: int | None = 0
        while child is not None:
            path.append(child)
            p_1V = probabilities_reference(logits_BNV[row, child][None], *how)
            drawn = int(draw_reference(p_1V, coins_BN[row, child].view(1, 1)))
            children = (i for i in range(child + 1, num_nodes) if parents[i] == child and tokens[i] == drawn)
            child = next(children, None) if drawn >= 0 else None
        path_BN[row, : len(path)] = torch.tensor(path)
        num_accepted_B[row] = len(path) - 1
        bonus_B[row] = drawn
    return TreeVerification(path_BN, num_accepted_B, bonus_B)


def _launch_verify_tree_sampling(
    logits_BNV: Tensor,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    num_nodes_B: Tensor,
    sampling: BatchSampling,
    coins_BN: Tensor,
) -> TreeVerification:
    truncated = launch_truncate(logits_BNV, num_nodes_B, sampling)
    drawn_BN = _launch_draw_tokens(truncated, coins_BN[..., None]).squeeze(-1)
    return _launch_verify_tree_greedy(tokens_BN, parents_BN, num_nodes_B, drawn_BN)
