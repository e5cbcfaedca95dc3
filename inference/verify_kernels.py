"""Verification by the kernels: where they can run, a round's trees are verified on the device and read back once.

The rules, the coins and their order are those of `verify.py`. Masses are summed in fp32 there and in fp64 here, so a
sampled token differs only where a coin, or the border of a top-p, lies within that rounding (about 1e-6 of the mass).
"""

import torch
from torch import Tensor

from eyas.inference.sampling import Sampling
from eyas.inference.tree import TreeBatch
from eyas.kernels.truncate import BatchSampling
from eyas.kernels.verify_chain import Chains, verify_chain
from eyas.kernels.verify_tree_greedy import TreeVerification, verify_tree_greedy
from eyas.kernels.verify_tree_sampling import verify_tree_sampling

Found = list[tuple[tuple[int, ...], int]]  # (accepted nodes from the root down, bonus token or -1) of each row


def batch_sampling(samplings: list[Sampling], device: torch.device) -> BatchSampling:
    """Return the settings of some requests as tensors."""
    return BatchSampling(
        torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32, device=device),
        torch.tensor([sampling.top_k for sampling in samplings], dtype=torch.int64, device=device),
        torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float32, device=device),
    )


def greedy_paths(trees: TreeBatch, logits_RNV: Tensor) -> Found:
    """Return the greedy verification of every row; -1 where the logits are NaN or allow nothing."""
    trees = trees.to(logits_RNV.device)
    best = logits_RNV.max(-1)  # a NaN is the largest
    argmax_RN = torch.where(best.values > float("-inf"), best.indices, -1)
    return _read(verify_tree_greedy(trees.tokens_RN, trees.parents_RN, trees.num_nodes_R, argmax_RN))


def sampled_paths(trees: TreeBatch, logits_RNV: Tensor, samplings: list[Sampling], coins_RC: Tensor) -> Found:
    """Return a lossless random verification of deterministic trees; coin c of a row decides at its depth c."""
    device = logits_RNV.device
    trees = trees.to(device)
    return _read(
        verify_tree_sampling(
            logits_RNV,
            trees.tokens_RN,
            trees.parents_RN,
            trees.num_nodes_R,
            sampling=batch_sampling(samplings, device),
            coins_BN=coins_RC.to(device).gather(1, trees.depths_RN),
        )
    )


def chain_paths(
    trees: TreeBatch, logits_RNV: Tensor, samplings: list[Sampling], coins_RC: Tensor, drawn: list[Tensor], *, rule: str
) -> Found:
    """Return the verification of drawn chains by a rule of `verify_chain`; `drawn` holds each draft's distribution."""
    device = logits_RNV.device
    R, N, V = logits_RNV.shape
    # The logarithm of a distribution is its logits, at temperature 1 and untruncated.
    log_q_RKV = torch.zeros(R, N - 1, V, device=device)
    for row, q_KV in enumerate(drawn):
        log_q_RKV[row, : len(q_KV)] = q_KV.log().to(device, torch.float32)
    coins_RC = coins_RC.to(device)
    num_drafted_R = trees.num_nodes_R.to(device) - 1
    found = verify_chain(
        Chains(trees.tokens_RN[:, 1:].to(device), num_drafted_R, logits_RNV, log_q_RKV, None),
        rule=rule,
        target_sampling=batch_sampling(samplings, device),
        draft_sampling=batch_sampling([Sampling(1.0)] * R, device),
        coins_BK=coins_RC[:, : N - 1],
        bonus_coins_B=coins_RC.gather(1, num_drafted_R[:, None]).squeeze(1),
    )
    accepted, bonus = torch.stack(found).tolist()
    return [(tuple(range(count + 1)), token) for count, token in zip(accepted, bonus, strict=True)]


def _read(found: TreeVerification) -> Found:
    columns = (found.path_BN, found.num_accepted_B[:, None], found.bonus_B[:, None])
    rows = torch.cat(columns, dim=1).tolist()  # the one wait of a round
    return [(tuple(path[: accepted + 1]), bonus) for *path, accepted, bonus in rows]
