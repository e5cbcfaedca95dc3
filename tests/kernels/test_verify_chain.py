"""Chain verification: both rules against exact enumeration, forced coins, NaN, and kernels against the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.kernels.truncate import BatchSampling
from eyas.kernels.verify_chain import (
    RULES,
    Chains,
    ChainVerification,
    _launch_verify_chain,
    verify_chain,
    verify_chain_reference,
)

VERIFIERS = {"reference": verify_chain_reference, "kernel": _launch_verify_chain}
BELOW_ONE = 1 - 2.0**-53


def same(rows: int, how: tuple[float, int, float] = (1.0, 0, 1.0)) -> BatchSampling:
    temperature, top_k, top_p = how
    return BatchSampling(torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p))


def moved(device: torch.device, *inputs: object) -> list[object]:
    def move(x: object) -> object:
        if isinstance(x, Tensor):
            return x.to(device)
        if isinstance(x, Chains):
            return Chains(*(move(y) for y in x))
        return BatchSampling(*(move(y) for y in vars(x).values())) if isinstance(x, BatchSampling) else x

    return [move(x) for x in inputs]


def run(
    verifier: Callable[..., ChainVerification], device: torch.device, *inputs: object
) -> tuple[list[int], list[int]]:
    result = verifier(*moved(device, *inputs))
    return result.num_accepted_B.tolist(), result.bonus_B.tolist()


def logits_of(*p: list[float]) -> Tensor:
    return torch.tensor(p).log()


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
@pytest.mark.parametrize(
    ("rule", "coins", "bonus_coin", "accepted", "bonus"),
    [
        # p_1/q_1 of token 0 is 1/2, p_2/q_2 of token 1 is 3/2; left over at place 1: token 1, at 2: token 1.
        ("token", [0.49, 0.9], 0.0, 2, 0),
        ("token", [0.49, BELOW_ONE], BELOW_ONE, 2, 1),
        ("token", [0.5, 0.0], 0.0, 0, 1),
        ("token", [0.5, 0.0], BELOW_ONE, 0, 1),
        # P_1 = 1/2, P_2 = 3/4; S_1 = relu(1/8 - 1/2) + relu(3/8 - 1/2) = 0, so h_1 = 0 and h_2 = 3/4.
        ("block", [0.0, 0.74], 0.0, 2, 0),
        ("block", [0.0, 0.76], 0.0, 0, 1),
        ("block", [0.9, 0.74], BELOW_ONE, 2, 1),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_hand_worked(
    rule: str,
    coins: list[float],
    bonus_coin: float,
    accepted: int,
    bonus: int,
    verifier: Callable[..., ChainVerification],
    device: torch.device,
) -> None:
    target = logits_of([0.25, 0.75], [0.25, 0.75], [0.5, 0.5])[None]
    draft = logits_of([0.5, 0.5], [0.5, 0.5])[None]
    chains = Chains(torch.tensor([[0, 1]]), torch.tensor([2]), target, draft, None)
    given = (torch.tensor([coins], dtype=torch.float64), torch.tensor([bonus_coin], dtype=torch.float64))
    assert run(verifier, device, chains, rule, same(1), same(1), *given) == ([accepted], [bonus])


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("poisoned_empty")
def test_edges(rule: str, verifier: Callable[..., ChainVerification], device: torch.device) -> None:
    """Rows: an idle one, no draft, p = q, a draft outside top-k, NaN at the root, NaN further on, a greedy request."""
    B = 7
    target, draft = torch.zeros(B, 3, 6), torch.zeros(B, 2, 6)
    target[3, 0, 5] = -9.0
    target[4, 0] = torch.nan
    target[5, 1] = torch.nan
    target[6, :, 2] = 1.0
    tokens = torch.tensor([[5, 5]] * 6 + [[2, 1]])
    drafted = torch.tensor([-1, 0, 2, 2, 2, 2, 2])
    chains = Chains(tokens, drafted, target, draft, None)
    how = BatchSampling(torch.tensor([1.0, 1, 1, 1, 1, 1, 0]), torch.tensor([0, 0, 0, 5, 0, 0, 0]), torch.ones(B))
    coins, half = torch.full((B, 2), 0.5, dtype=torch.float64), torch.full((B,), 0.55, dtype=torch.float64)
    accepted, bonus = run(verifier, device, chains, rule, how, same(B), coins, half)
    assert accepted[:5] == [0, 0, 2, 0, 0]
    assert bonus[:2] == [-1, 3]
    assert bonus[2] == 3
    assert bonus[3] in range(5)
    assert bonus[4] == -1
    assert (accepted[5], bonus[5]) == ((1, -1) if rule == "token" else (0, 3))
    assert (accepted[6], bonus[6]) == (1, 2)


def thresholds(rule: str, p_NV: Tensor, q_KV: Tensor, drafts_M2: Tensor) -> Tensor:
    """h_M2: the coin up to which draft i of each chain passes, found by bisection with the other coin held fixed.

    Token by token the first draft must have passed (its coin 0); in a block the later one must not (its coin near 1).
    """
    M = len(drafts_M2)
    p, q = p_NV.log().expand(M, -1, -1), q_KV.log().expand(M, -1, -1)
    chains = Chains(drafts_M2, torch.full((M,), 2), p, q, None)
    half = torch.full((M,), 0.5, dtype=torch.float64)
    columns = []
    for i in (0, 1):
        low, high = torch.zeros(M, dtype=torch.float64), torch.ones(M, dtype=torch.float64)
        for _ in range(15):
            middle = (low + high) / 2
            other = torch.full_like(middle, 0.0 if i == 1 else BELOW_ONE)
            coins = torch.stack((middle, other) if i == 0 else (other, middle), dim=1)
            passed = verify_chain_reference(chains, rule, same(M), same(M), coins, half).num_accepted_B > i
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        columns.append(low)
    return torch.stack(columns, dim=1)


def emitted_law(rule: str, p_NV: Tensor, q_KV: Tensor) -> Tensor:
    """Exact law of the first two emitted tokens: all drafts, the passing coins found above, residuals by hand."""
    p_NV, q_KV = p_NV.double(), q_KV.double()
    V = p_NV.shape[1]
    drafts = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    joint = torch.zeros(V, V, dtype=torch.float64)
    for (a, b), (first, second) in zip(
        drafts.tolist(), thresholds(rule, p_NV.float(), q_KV.float(), drafts), strict=True
    ):
        weight = q_KV[0, a] * q_KV[1, b]
        both = first * second if rule == "token" else second
        one = first * (1 - second)
        ratio = (p_NV[0, a] / q_KV[0, a]).clamp(max=1) if rule == "block" else 1.0
        rest = [(p_NV[0] - q_KV[0]).clamp(min=0), (ratio * p_NV[1] - q_KV[1]).clamp(min=0)]
        rest = [r / r.sum() if r.sum() > 0 else r for r in rest]
        joint[a, b] += weight * both
        joint[a] += weight * one * rest[1]
        joint += weight * (1 - both - one) * rest[0][:, None] * p_NV[1]  # the next round's first token
    return joint


@pytest.mark.parametrize("rule", RULES)
def test_emitted_tokens_follow_the_target(rule: str) -> None:
    """Distributions that do not depend on the tokens before, so that the law of two tokens is a plain product."""
    p_NV = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.4, 0.2]])
    q_KV = torch.tensor([[0.2, 0.3, 0.5], [0.3, 0.4, 0.3]])
    law = emitted_law(rule, p_NV, q_KV)
    torch.testing.assert_close(law, p_NV[0, :, None].double() * p_NV[1].double(), atol=1e-4, rtol=0)


def test_block_verification_accepts_more() -> None:
    torch.manual_seed(5)
    B, K, V = 2000, 4, 5
    target, draft = torch.randn(B, K + 1, V), torch.randn(B, K, V)
    tokens = torch.distributions.Categorical(logits=draft).sample()
    chains = Chains(tokens, torch.full((B,), K), target, draft, None)
    coins, half = torch.rand(B, K, dtype=torch.float64), torch.full((B,), 0.5, dtype=torch.float64)
    accepted = {
        rule: verify_chain_reference(chains, rule, same(B), same(B), coins, half).num_accepted_B.double().mean()
        for rule in RULES
    }
    assert accepted["block"] > 1.02 * accepted["token"] > 0.5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("chain", "vocabulary", "draft_vocabulary", "dtype"),
    [
        (1, 8, None, torch.float32),
        (5, 130, 60, torch.bfloat16),
        (7, 3000, 1000, torch.float32),
        (2, 49152, None, torch.float16),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(
    chain: int,
    vocabulary: int,
    draft_vocabulary: int | None,
    dtype: torch.dtype,
    rule: str,
    device: torch.device,
) -> None:
    B, U = 6, draft_vocabulary or vocabulary
    target = torch.randn(B, chain + 1, vocabulary)
    ids, kept = None, torch.arange(vocabulary)
    if draft_vocabulary:
        kept = torch.randperm(vocabulary)[:U].sort().values
        ids = torch.full((vocabulary,), -1)
        ids[kept] = torch.arange(U)
    draft = (target[:, :-1, kept] + 0.3 * torch.randn(B, chain, U)).to(dtype)
    target = target.to(dtype)
    how = BatchSampling(
        torch.tensor([1.0, 0.7, 1.3, 1.0, 0.0, 1.0]),
        torch.tensor([0, 5, 0, 50, 0, 0]),
        torch.tensor([1.0, 1, 0.9, 0.8, 1, 1]),
    )
    if vocabulary > 10_000:  # filters that keep half of so many tokens take long in the interpreter
        how = same(B, (1.1, 0, 1.0))
    of_draft = same(B, (0.9, 0, 1.0))
    tokens = kept[torch.distributions.Categorical(logits=draft.float() / 0.9).sample()]
    drafted = torch.tensor([chain, 1, 1, chain // 2, min(chain, 2), -1])
    coins, bonus = torch.rand(B, chain, dtype=torch.float64), torch.rand(B, dtype=torch.float64)
    inputs = (Chains(tokens, drafted, target, draft, ids), rule, how, of_draft, coins, bonus)
    expected = verify_chain_reference(*inputs)
    result = _launch_verify_chain(*moved(device, *inputs))
    assert torch.equal(result.num_accepted_B.cpu(), expected.num_accepted_B)
    assert torch.equal(result.bonus_B.cpu(), expected.bonus_B)
    assert expected.bonus_B[:-1].min() >= 0
    assert expected.bonus_B[-1] == -1


def good(**changes: object) -> dict[str, object]:
    chains = Chains(torch.tensor([[1, 2]]), torch.tensor([2]), torch.zeros(1, 3, 4), torch.zeros(1, 2, 4), None)
    arguments: dict[str, object] = {
        "chains": chains,
        "rule": "token",
        "target_sampling": same(1),
        "draft_sampling": same(1),
        "coins_BK": torch.zeros(1, 2, dtype=torch.float64),
        "bonus_coins_B": torch.zeros(1, dtype=torch.float64),
    }
    arguments["chains"] = chains._replace(**{k: v for k, v in changes.items() if k in Chains._fields})
    return {**arguments, **{k: v for k, v in changes.items() if k not in Chains._fields}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "typical"}, "rule is 'typical': give one of token, block"),
        ({"tokens_BK": torch.tensor([[1, 4]])}, "target ids, 0 to 3"),
        ({"num_drafted_B": torch.tensor([3])}, r"give -1 \(idle row\) to 2"),
        ({"draft_logits_BKU": torch.zeros(1, 2, 3)}, "give draft_ids_V"),
        ({"draft_ids_V": torch.zeros(3, dtype=torch.int64)}, r"draft_ids_V is torch.int64 \(3,\)"),
        ({"coins_BK": torch.ones(1, 2, dtype=torch.float64)}, r"\[0, 1\)"),
        ({"bonus_coins_B": torch.zeros(1)}, "bonus_coins_B is torch.float32"),
    ],
)
def test_the_op_says_what_is_wrong(changes: dict[str, object], message: str) -> None:
    assert verify_chain(**good()).num_accepted_B.tolist() == [2]
    with pytest.raises(ValueError, match=message):
        verify_chain(**good(**changes))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_the_op_runs_the_kernel_on_a_gpu(rule: str) -> None:
    B, K, V = 16, 5, 32000
    target = torch.randn(B, K + 1, V)
    draft = target[:, :-1] + 0.3 * torch.randn(B, K, V)
    chains = Chains(torch.distributions.Categorical(logits=draft).sample(), torch.full((B,), K), target, draft, None)
    coins, bonus = torch.rand(B, K, dtype=torch.float64), torch.rand(B, dtype=torch.float64)
    inputs = (chains, rule, same(B), same(B), coins, bonus)
    expected = verify_chain_reference(*inputs)
    there = moved(torch.device("cuda"), *inputs)
    names = ("chains", "rule", "target_sampling", "draft_sampling", "coins_BK", "bonus_coins_B")
    result = verify_chain(**dict(zip(names, there, strict=True)))
    assert (result.num_accepted_B.cpu() == expected.num_accepted_B).sum() >= B - 1
    assert (result.bonus_B.cpu() == expected.bonus_B).sum() >= B - 1
