"""Verification: which drafted nodes the target accepts, and the token it adds, for a ragged batch of trees.

greedy     walk from the root to the child that equals the target's argmax; the bonus is the argmax at the last one.
sampling   draw X from the target's distribution at the node; accept the child X if there is one, else X is the bonus.
           Lossless for deterministic trees without any draft probability, and the best possible for them.
leviathan  drawn chains: accept token x while u < p(x) / q(x); after a rejection the bonus comes from relu(p - q)
           (Leviathan et al. 2023, arXiv 2211.17192).
block      drawn chains: accept the longest prefix whose joint ratio passes (Sun et al. 2024, arXiv 2403.10444).
           Lossless too, and accepts at least as much on average.

p is the target's distribution after the request's penalties, processors, temperature, top-k and top-p. NaN logits are
never accepted: every verifier raises. `verify_reference.py` says the same in plain Python, one row at a time; where the
device has kernels, rows without penalties and processors are verified by them (`verify_kernels.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.inference.sampling import Sampling, draw_tokens, probabilities
from eyas.inference.tree import DraftTree, TreeBatch
from eyas.inference.verify_kernels import Found, chain_paths, greedy_paths, sampled_paths
from eyas.kernels.block_statistics import ELEMENTS
from eyas.kernels.triton_support import available
from eyas.models.draw import draw

NAN = "the target produced NaN logits; nothing of this round is accepted"
NOTHING = (
    "the target's logits, after penalties and processors, allow no token at all; nothing of this round is accepted"
)

Rule = Callable[[list[int], Tensor], Tensor]  # (draft tokens down to a node, its logits_V) -> logits_V


@dataclass(frozen=True)
class Verification:
    """`path`: accepted nodes from the root (0) down; `bonus_token`: the target's token after the last of them."""

    path: tuple[int, ...]
    bonus_token: int


@dataclass(frozen=True)
class VerifyBatch:
    """R trees with the target's logits at their nodes and how each request chooses.

    `coins_RC` (fp64): coin i decides the i-th token that the round emits; drawn chains of K tokens use coins 0..K-1 for
    acceptance and coin K for the bonus. `rules` are the requests' penalties and processors (None: none).
    """

    trees: TreeBatch
    logits_RNV: Tensor
    samplings: list[Sampling]
    coins_RC: Tensor
    rules: list[Rule | None]
    drawn: list[Tensor]

    @classmethod
    def of(
        cls,
        trees: list[DraftTree],
        logits_RNV: Tensor,
        samplings: list[Sampling],
        coins_RC: Tensor,
        rules: list[Rule | None] | None = None,
    ) -> "VerifyBatch":
        """Return the batch of some trees; all of them deterministic or all drawn."""
        drawn = [tree.drawn_KV for tree in trees if tree.drawn_KV is not None]
        assert len(drawn) in (0, len(trees)), "deterministic and drawn trees are verified by different rules"
        return cls(TreeBatch.of(trees), logits_RNV, samplings, coins_RC, rules or [None] * len(trees), drawn)

    @property
    def by_kernel(self) -> bool:
        """Whether kernels can verify the batch: on its device, and with nothing to apply to logits path by path."""
        logits_RNV = self.logits_RNV
        return (
            available(logits_RNV.device) and logits_RNV.dtype in ELEMENTS and all(rule is None for rule in self.rules)
        )

    def logits_at(self, rows_A: Tensor, nodes_A: Tensor) -> Tensor:
        """Return the requests' own logits at one node of each named row, [A, V]; raises on NaN."""
        logits_AV = self.logits_RNV[rows_A, nodes_A]
        if any(rule is not None for rule in self.rules):
            ruled = []
            for row, node, logits_V in zip(rows_A.tolist(), nodes_A.tolist(), logits_AV, strict=True):
                rule = self.rules[row]
                ruled.append(logits_V if rule is None else rule(self.tokens_above(row, node), logits_V))
            logits_AV = torch.stack(ruled)
        if bool(logits_AV.amax(-1).isnan().any()):  # a NaN is the largest
            raise FloatingPointError(NAN)
        return logits_AV

    def tokens_above(self, row: int, node: int) -> list[int]:
        """Return the draft tokens from the root's child down to a node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(int(self.trees.tokens_RN[row, node]))
            node = int(self.trees.parents_RN[row, node])
        return tokens[::-1]


def verify_greedy(batch: VerifyBatch) -> list[Verification]:
    """Return the greedy verification of every row."""
    if any(rule is not None for rule in batch.rules):
        return _walk(batch, lambda logits_AV, _rows, _level: logits_AV.argmax(-1).cpu())
    return _accepted(batch, greedy_paths(batch.trees, batch.logits_RNV))


def verify_by_sampling(batch: VerifyBatch) -> list[Verification]:
    """Return a lossless random verification of every row; the trees are deterministic."""
    if batch.by_kernel:
        return _accepted(batch, sampled_paths(batch.trees, batch.logits_RNV, batch.samplings, batch.coins_RC))

    def choose(logits_AV: Tensor, rows_A: Tensor, level: int) -> Tensor:
        return draw_tokens(logits_AV, [batch.samplings[row] for row in rows_A.tolist()], batch.coins_RC[rows_A, level])

    return _walk(batch, choose)


def _accepted(batch: VerifyBatch, found: Found) -> list[Verification]:
    """Return what the kernels found; raises where a bonus of -1 says that the logits were none."""
    for row, (path, bonus) in enumerate(found):
        if bonus < 0:
            reached = range(int(batch.trees.num_nodes_R[row])) if batch.drawn else path[-1:]
            batch.logits_at(torch.tensor([row]).expand(len(reached)), torch.tensor(reached))  # raises on NaN
            raise FloatingPointError(NOTHING)
    return [Verification(path, bonus) for path, bonus in found]


def _chain_by_kernel(batch: VerifyBatch, rule: str) -> list[Verification]:
    trees, logits_RNV, coins_RC = batch.trees, batch.logits_RNV, batch.coins_RC
    return _accepted(batch, chain_paths(trees, logits_RNV, batch.samplings, coins_RC, batch.drawn, rule=rule))


def _refuse_nothing(possible_A: Tensor) -> None:
    if not bool(possible_A.all()):
        raise FloatingPointError(NOTHING)


def _walk(batch: VerifyBatch, choose: Callable[[Tensor, Tensor, int], Tensor]) -> list[Verification]:
    """Walk all trees level by level: the target's token leads to the child that equals it, or is the bonus."""
    tokens_RN, parents_RN = batch.trees.tokens_RN, batch.trees.parents_RN
    nodes_N = torch.arange(tokens_RN.shape[1])
    is_node_RN = nodes_N < batch.trees.num_nodes_R[:, None]
    paths = [[0] for _ in tokens_RN]
    bonus = [-1] * len(paths)
    rows_A = torch.arange(len(paths))
    at_A = torch.zeros_like(rows_A)
    for level in range(len(nodes_N)):
        logits_AV = batch.logits_at(rows_A, at_A)
        _refuse_nothing(logits_AV.amax(-1) > float("-inf"))
        token_A = choose(logits_AV, rows_A, level)
        # A child lies behind its parent, so the walk ends whatever the parents say.
        is_child_AN = (parents_RN[rows_A] == at_A[:, None]) & is_node_RN[rows_A] & (nodes_N > at_A[:, None])
        matches_AN = is_child_AN & (tokens_RN[rows_A] == token_A[:, None])
        found_A, child_A = matches_AN.any(-1), matches_AN.to(torch.int8).argmax(-1)
        for row, token, found, child in zip(
            rows_A.tolist(), token_A.tolist(), found_A.tolist(), child_A.tolist(), strict=True
        ):
            if found:
                paths[row].append(child)
            else:
                bonus[row] = token
        rows_A, at_A = rows_A[found_A], child_A[found_A]
        if len(rows_A) == 0:
            break
    assert min(bonus) >= 0
    return [Verification(tuple(path), token) for path, token in zip(paths, bonus, strict=True)]


def _chain_probabilities(batch: VerifyBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return p_RNV of every node, q_RKV of every draft token (both fp64, zero behind a row's end) and K_R."""
    R, N, V = batch.logits_RNV.shape
    num_drafts_R = batch.trees.num_nodes_R - 1
    rows_M, nodes_M = (torch.arange(N) < batch.trees.num_nodes_R[:, None]).nonzero(as_tuple=True)
    logits_MV = batch.logits_at(rows_M, nodes_M)
    dead_M1 = (logits_MV == float("-inf")).all(
        -1, keepdim=True
    )  # behind drafts that a processor forbids: never reached
    p_MV = probabilities(logits_MV.masked_fill(dead_M1, 0.0), [batch.samplings[row] for row in rows_M.tolist()])
    p_RNV = torch.zeros(R, N, V, dtype=torch.float64)
    p_RNV[rows_M, nodes_M] = p_MV.masked_fill(dead_M1, 0.0).cpu()
    q_RKV = torch.zeros(R, N - 1, V, dtype=torch.float64)
    for row, drawn_KV in enumerate(batch.drawn):
        q_RKV[row, : len(drawn_KV)] = drawn_KV
    return p_RNV, q_RKV, num_drafts_R


def _at_drafts(batch: VerifyBatch, p_RNV: Tensor, q_RKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return p_RK and q_RK of the drafted tokens themselves."""
    tokens_RK1 = batch.trees.tokens_RN[:, 1:, None]
    return p_RNV[:, :-1].gather(2, tokens_RK1).squeeze(2), q_RKV.gather(2, tokens_RK1).squeeze(2)


def _finish(batch: VerifyBatch, accepted_R: Tensor, weights_RV: Tensor) -> list[Verification]:
    """Return the verifications whose bonus is drawn in proportion to weights with each row's last coin."""
    _refuse_nothing(weights_RV.sum(-1) > 0)
    coins_R = batch.coins_RC.gather(1, batch.trees.num_nodes_R[:, None] - 1).squeeze(1)
    bonus = draw(weights_RV, coins_R).tolist()
    return [
        Verification(tuple(range(accepted + 1)), token)
        for accepted, token in zip(accepted_R.tolist(), bonus, strict=True)
    ]


def _residual(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    """Return relu(p - q); where rounding leaves nothing of it (p equals q), p itself."""
    left = (p_RV - q_RV).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p_RV)


def verify_leviathan(batch: VerifyBatch) -> list[Verification]:
    """Return the token-wise verification of every drawn chain."""
    if batch.by_kernel:
        return _chain_by_kernel(batch, "token")
    p_RNV, q_RKV, num_drafts_R = _chain_probabilities(batch)
    p_RK, q_RK = _at_drafts(batch, p_RNV, q_RKV)
    K = q_RK.shape[1]
    # u q < p: never for p = 0, not even with the coin 0.
    passed_RK = (batch.coins_RC[:, :K] * q_RK < p_RK) & (torch.arange(K) < num_drafts_R[:, None])
    accepted_R = passed_RK.long().cumprod(-1).sum(-1)
    rows = torch.arange(len(accepted_R))
    p_RV = p_RNV[rows, accepted_R]
    q_RV = torch.cat((q_RKV, torch.zeros_like(q_RKV[:, :1])), dim=1)[rows, accepted_R] if K else torch.zeros_like(p_RV)
    return _finish(batch, accepted_R, _residual(p_RV, q_RV))


def verify_block(batch: VerifyBatch) -> list[Verification]:
    """Return the block verification of every drawn chain.

    P_i = min(P_{i-1} p/q, 1) is the joint ratio of the first i tokens and S_i the mass of relu(P_i p - q) behind them;
    prefix i is accepted when its coin is below S_i / (S_i + 1 - P_i), the whole chain when it is below P_K.
    """
    if batch.by_kernel:
        return _chain_by_kernel(batch, "block")
    p_RNV, q_RKV, num_drafts_R = _chain_probabilities(batch)
    p_RK, q_RK = _at_drafts(batch, p_RNV, q_RKV)
    R, K = q_RK.shape
    joint_RN = torch.ones(R, K + 1, dtype=torch.float64)
    for i in range(K):
        ratio_R = p_RK[:, i] / q_RK[:, i].clamp(min=torch.finfo(torch.float64).tiny)
        joint_RN[:, i + 1] = (joint_RN[:, i] * ratio_R).clamp(max=1.0)
    q_RNV = torch.cat((q_RKV, torch.zeros_like(p_RNV[:, :1])), dim=1)
    left_RNV = (joint_RN[..., None] * p_RNV - q_RNV).clamp(min=0)
    mass_RN = left_RNV.sum(-1)
    rest_RN = mass_RN + 1 - joint_RN
    bar_RN = torch.where(rest_RN > 0, mass_RN / rest_RN.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    is_last_RN = torch.arange(K + 1) == num_drafts_R[:, None]
    bar_RN = torch.where(is_last_RN, joint_RN, bar_RN)
    within_RK = torch.arange(1, K + 1) <= num_drafts_R[:, None]
    passed_RK = (batch.coins_RC[:, :K] < bar_RN[:, 1:]) & within_RK
    accepted_R = (passed_RK * torch.arange(1, K + 1)).amax(-1) if K else torch.zeros(R, dtype=torch.int64)
    rows = torch.arange(R)
    whole_RV = p_RNV[rows, accepted_R]
    part_RV = left_RNV[rows, accepted_R]
    is_whole_R1 = (accepted_R == num_drafts_R)[:, None] | (part_RV.sum(-1, keepdim=True) <= 0)
    return _finish(batch, accepted_R, torch.where(is_whole_R1, whole_RV, part_RV))


Verifier = Callable[[VerifyBatch], list[Verification]]
VERIFIERS: dict[str, Verifier] = {
    "greedy": verify_greedy,
    "sampling": verify_by_sampling,
    "leviathan": verify_leviathan,
    "block": verify_block,
}
DRAWN = ("leviathan", "block")  # those that read the distributions a chain was drawn from
