"""Verification of drawn chains: drafts that were sampled from the draft head, token by token or as a block.

Draft x_1 .. x_K with x_i ~ q_i; p_i is the target's distribution for the same place (p_{K+1} for the token after the
last). Both rules emit exactly the target's distribution.

    token by token   accept x_i if u_i < p_i(x_i) / q_i(x_i); at the first refusal draw from relu(p_i - q_i)
    block            P_0 = 1,  P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)),  S_i = sum relu(P_i p_{i+1} - q_{i+1})
                     accept the longest prefix i with u_i < h_i = S_i / (S_i + 1 - P_i), h_K = P_K;
                     then draw from relu(P_i p_{i+1} - q_{i+1}), or from p_{K+1} behind the whole chain

Block verification never accepts less in expectation. Sources: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1;
Sun et al. 2024 (arXiv 2403.10444), algorithm 2.

The draft logits stand over the draft vocabulary; draft_ids_V says which draft id a target token has (-1: none, q = 0).
Residuals are summed over chunks of the vocabulary in parallel and never stored token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.block_statistics import check_logits
from eyas.kernels.draw_tokens import check_coins, draw_reference
from eyas.kernels.triton_support import available
from eyas.kernels.truncate import BatchSampling, launch_truncate, probabilities_reference
from eyas.kernels.verify_chain_kernels import launch_verify_chain

RULES = ("token", "block")


class ChainVerification(NamedTuple):
    """int64. num_accepted_B: accepted drafts. bonus_B: the token after them; -1 for NaN logits or an idle row."""

    num_accepted_B: Tensor
    bonus_B: Tensor


class Chains(NamedTuple):
    """A ragged batch of drafted chains.

    tokens_BK: int64 target ids. num_drafted_B: int64, 0 to K, or -1 for an idle row. target_logits_BNV: N = K + 1,
    entry i predicts the token after i drafts. draft_logits_BKU: what x_{i+1} was drawn from. draft_ids_V: int64, or
    None if the draft vocabulary is the target's.
    """

    tokens_BK: Tensor
    num_drafted_B: Tensor
    target_logits_BNV: Tensor
    draft_logits_BKU: Tensor
    draft_ids_V: Tensor | None


def verify_chain(
    chains: Chains,
    *,
    rule: str,
    target_sampling: BatchSampling,
    draft_sampling: BatchSampling,
    coins_BK: Tensor,
    bonus_coins_B: Tensor,
) -> ChainVerification:
    """How many drafts of each row stand, and the token after them.

    rule: "token" or "block". The samplings are those of target and draft (greedy ones, temperature 0, included). Coins:
    fp64 in [0, 1), K per row for the tests and one for the bonus. Shapes and dtypes are always checked, the values only
    on the CPU. Errors: ValueError.
    """
    _check(chains, rule, target_sampling, draft_sampling, coins_BK, bonus_coins_B)
    arguments = (chains, rule, target_sampling, draft_sampling, coins_BK, bonus_coins_B)
    if available(chains.tokens_BK.device):
        return _launch_verify_chain(*arguments)
    return verify_chain_reference(*arguments)


def verify_chain_reference(
    chains: Chains,
    rule: str,
    target_sampling: BatchSampling,
    draft_sampling: BatchSampling,
    coins_BK: Tensor,
    bonus_coins_B: Tensor,
) -> ChainVerification:
    """The same as `verify_chain`, row by row in fp64: the definition, and the CPU path."""
    accepted_B, bonus_B = [], []
    for row, drafted in enumerate(chains.num_drafted_B.tolist()):
        if drafted < 0:
            accepted_B.append(0)
            bonus_B.append(-1)
            continue
        p_NV = probabilities_reference(chains.target_logits_BNV[row, : drafted + 1], *_settings(target_sampling, row))
        q_KU = probabilities_reference(chains.draft_logits_BKU[row, :drafted], *_settings(draft_sampling, row))
        q_KV = q_KU
        if chains.draft_ids_V is not None:
            q_KV = torch.where(chains.draft_ids_V >= 0, q_KU[:, chains.draft_ids_V.clamp(min=0)], 0.0)
        tokens, coins = chains.tokens_BK[row, :drafted], coins_BK[row, :drafted].tolist()
        p_K = p_NV[:drafted].gather(1, tokens[:, None]).squeeze(1).tolist()
        q_K = q_KV.gather(1, tokens[:, None]).squeeze(1).tolist()
        prefix = [1.0]
        for p, q in zip(p_K, q_K, strict=True):
            product = prefix[-1] * p / q if q > 0 else prefix[-1] * float(p > 0)
            prefix.append(1.0 if product > 1 else product)  # NaN stays NaN
        if rule == "token":
            refused = [not coin * q < p for p, q, coin in zip(p_K, q_K, coins, strict=True)]
            accepted = [*refused, True].index(True)
            residual_V = p_NV[accepted]
            if accepted < drafted:
                residual_V = (p_NV[accepted] - q_KV[accepted]).clamp(min=0)
        else:
            chance = []
            for i in range(1, drafted + 1):
                mass = float((prefix[i] * p_NV[i] - q_KV[i]).clamp(min=0).sum()) if i < drafted else 0.0
                whole = mass + 1 - prefix[i]
                chance.append(prefix[i] if i == drafted else mass / whole if whole > 0 else float(whole == 0))
            accepted = max((i + 1 for i in range(drafted) if coins[i] < chance[i]), default=0)
            residual_V = p_NV[accepted]
            if accepted < drafted:
                residual_V = (prefix[accepted] * p_NV[accepted] - q_KV[accepted]).clamp(min=0)
        if not bool(residual_V.sum() > 0):  # p = q up to rounding, or NaN
            residual_V = p_NV[accepted]
        accepted_B.append(accepted)
        bonus_B.append(int(draw_reference(residual_V[None], bonus_coins_B[row].view(1, 1))))
    device = chains.tokens_BK.device
    return ChainVerification(torch.tensor(accepted_B, device=device), torch.tensor(bonus_B, device=device))


def _launch_verify_chain(
    chains: Chains,
    rule: str,
    target_sampling: BatchSampling,
    draft_sampling: BatchSampling,
    coins_BK: Tensor,
    bonus_coins_B: Tensor,
) -> ChainVerification:
    drafted_B = chains.num_drafted_B
    target = launch_truncate(chains.target_logits_BNV, drafted_B + 1, target_sampling)
    draft = launch_truncate(chains.draft_logits_BKU, drafted_B, draft_sampling)
    return ChainVerification(
        *launch_verify_chain(
            target, draft, chains.tokens_BK, chains.draft_ids_V, coins_BK, bonus_coins_B, block=rule == "block"
        )
    )


def _settings(sampling: BatchSampling, row: int) -> tuple[float, int, float]:
    return float(sampling.temperature_B[row]), int(sampling.top_k_B[row]), float(sampling.top_p_B[row])


def _check(
    chains: Chains,
    rule: str,
    target_sampling: BatchSampling,
    draft_sampling: BatchSampling,
    coins_BK: Tensor,
    bonus_coins_B: Tensor,
) -> None:
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}: give one of {', '.join(RULES)}")
    check_logits(chains.target_logits_BNV, "target_logits_BNV")
    check_logits(chains.draft_logits_BKU, "draft_logits_BKU")
    (B, N, V), U = chains.target_logits_BNV.shape, chains.draft_logits_BKU.shape[2]
    device = chains.target_logits_BNV.device
    if chains.draft_ids_V is None and U != V:
        raise ValueError(f"the draft logits stand over {U} tokens, the target's over {V}: give draft_ids_V")
    expected = {
        "tokens_BK": (chains.tokens_BK, (B, N - 1), torch.int64),
        "num_drafted_B": (chains.num_drafted_B, (B,), torch.int64),
        "draft_logits_BKU": (chains.draft_logits_BKU, (B, N - 1, U), chains.draft_logits_BKU.dtype),
        "draft_ids_V": (chains.draft_ids_V, (V,), torch.int64),
        "coins_BK": (coins_BK, (B, N - 1), torch.float64),
        "bonus_coins_B": (bonus_coins_B, (B,), torch.float64),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or tensor.device != device):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {dtype} {shape} on {device}"
            )
    target_sampling.check(B, device)
    draft_sampling.check(B, device)
    if device.type == "cpu":
        check_coins(coins_BK)
        check_coins(bonus_coins_B)
        drafted_B, tokens_BK = chains.num_drafted_B, chains.tokens_BK
        if bool(((drafted_B < -1) | (drafted_B > N - 1)).any()):
            raise ValueError(f"num_drafted_B is {drafted_B.tolist()}: give -1 (idle row) to {N - 1}")
        is_drafted_BK = torch.arange(N - 1) < drafted_B[:, None]
        if bool((((tokens_BK < 0) | (tokens_BK >= V)) & is_drafted_BK).any()):
            raise ValueError(f"tokens_BK must be target ids, 0 to {V - 1}, where a token is drafted")
