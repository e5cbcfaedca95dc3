"""BatchSampling verification of trees: walks worked by hand, the law of the emitted tokens, memory, malformed input."""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from eyas.kernels import block_statistics, draw_tokens, truncate, verify_tree_greedy
from eyas.kernels import verify_tree_sampling as module
from eyas.kernels.coins import coins_reference
from eyas.kernels.draw_tokens import _launch_draw_tokens
from eyas.kernels.triton_support import interpreted
from eyas.kernels.truncate import BatchSampling, launch_truncate, probabilities_reference
from eyas.kernels.verify_tree_greedy import TreeVerification, verify_tree_greedy_reference
from eyas.kernels.verify_tree_sampling import (
    _launch_verify_tree_sampling,
    verify_tree_sampling,
    verify_tree_sampling_reference,
)

VERIFIERS = {"reference": verify_tree_sampling_reference, "kernel": _launch_verify_tree_sampling}
BELOW_ONE = 1 - 2.0**-53
# 0 -> 1 (token 1), 2 (token 2); 2 -> 3 (token 0), 4 (token 3)
TOKENS, PARENTS, DEPTHS = [9, 1, 2, 0, 3], [-1, 0, 0, 2, 2], [0, 1, 1, 2, 2]


def same(sampling: tuple[float, int, float], rows: int, device: torch.device | str = "cpu") -> BatchSampling:
    temperature, top_k, top_p = sampling
    return BatchSampling(
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, device=device),
        torch.full((rows,), top_p, device=device),
    )


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
@pytest.mark.parametrize(
    ("coins_by_depth", "path", "bonus"),
    [
        ([0.0, 0.0, 0.0], [0], 0),  # token 0 is no child of the root, though it is one of node 2
        ([0.25, 0.0, 0.0], [0, 1], 0),
        ([0.5, 0.0, 0.5], [0, 2, 3], 2),
        ([0.5, 0.75, BELOW_ONE], [0, 2, 4], 3),
        ([0.5, 0.3, 0.0], [0, 2], 1),
        ([BELOW_ONE, 0.0, 0.0], [0], 3),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_hand_worked(
    coins_by_depth: list[float],
    path: list[int],
    bonus: int,
    verifier: Callable[..., TreeVerification],
    device: torch.device,
) -> None:
    """Four equally likely tokens: the coin times four, rounded down, is the token."""
    inputs = [torch.tensor([x], device=device) for x in (TOKENS, PARENTS)]
    coins = torch.tensor([[coins_by_depth[d] for d in DEPTHS]], dtype=torch.float64, device=device)
    logits = torch.zeros(1, 5, 4, device=device)
    result = verifier(logits, *inputs, torch.tensor([5], device=device), same((1.0, 0, 1.0), 1, device), coins)
    assert result.path_BN.tolist() == [path + [-1] * (5 - len(path))]
    assert result.num_accepted_B.tolist() == [len(path) - 1]
    assert result.bonus_B.tolist() == [bonus]


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
@pytest.mark.usefixtures("poisoned_empty")
def test_nan_is_never_accepted_and_idle_rows_emit_nothing(
    verifier: Callable[..., TreeVerification], device: torch.device
) -> None:
    logits = torch.zeros(4, 5, 4)
    logits[0, 0, 1] = torch.nan
    logits[1, 2, 3] = torch.nan
    logits[2, 1] = torch.nan  # off the path
    tokens, parents = (torch.tensor([x] * 4, device=device) for x in (TOKENS, PARENTS))
    coins = torch.full((4, 5), 0.5, dtype=torch.float64, device=device)
    nodes = torch.tensor([5, 5, 5, 0], device=device)
    result = verifier(logits.to(device), tokens, parents, nodes, same((1.0, 0, 1.0), 4, device), coins)
    assert result.path_BN.tolist() == [[0, -1, -1, -1, -1], [0, 2, -1, -1, -1], [0, 2, -1, -1, -1], [-1] * 5]
    assert result.bonus_B.tolist() == [-1, -1, 2, -1]


@pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 8), (5, 49152), (7, 130), (60, 8), (63, 300)])
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(
    nodes: int, vocabulary: int, random_parents: Callable[[int, int], Tensor], device: torch.device
) -> None:
    B = 5
    num_nodes = torch.tensor([min(nodes, 10), nodes, 1, 0, min(nodes, 3)])
    parents = random_parents(B, nodes)
    tokens = torch.randint(0, min(vocabulary, 8), (B, nodes))
    logits = torch.randn(B, nodes, vocabulary)
    logits[..., :8] += 8.0  # so that walks are long whatever the vocabulary
    how = BatchSampling(
        torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0]), torch.tensor([0, 0, 3, 0, 6]), torch.tensor([1.0, 1, 0.9, 1, 0.8])
    )
    there = BatchSampling(*(x.to(device) for x in vars(how).values()))
    coins = torch.rand(B, nodes, dtype=torch.float64)
    inputs = (logits, tokens, parents, num_nodes)
    expected = verify_tree_sampling_reference(*inputs, how, coins)
    result = _launch_verify_tree_sampling(*(x.to(device) for x in inputs), there, coins.to(device))
    for got, want in zip(result, expected, strict=True):
        assert torch.equal(got.cpu(), want)
    greedy = verify_tree_greedy_reference(tokens, parents, num_nodes, logits.argmax(-1))
    for got, want in zip(result, greedy, strict=True):
        assert torch.equal(got[1].cpu(), want[1])  # the request of temperature 0


@pytest.mark.parametrize("how", [(1.0, 0, 1.0), (1.2, 3, 0.9)])
def test_emitted_tokens_follow_the_target(how: tuple[float, int, float], device: torch.device) -> None:
    """Every pair of first two emitted tokens against the product of the target's probabilities, over 20k rounds.

    A round that accepts nothing is continued by a plain draw after the token it emitted, as the next round would.
    The draws of all rounds come from the kernel at once, the walk is the greedy one: the two halves of the op.
    """
    rounds = 20_000
    torch.manual_seed(3)
    logits_NV = torch.randn(5, 4)
    # What follows a token depends on the token alone, so nodes 1 and 2 say what follows tokens 1 and 2.
    after_token = torch.stack((torch.randn(4), logits_NV[1], logits_NV[2], torch.randn(4)))
    coins_DR = coins_reference(torch.arange(3), torch.arange(rounds).expand(3, -1))
    one_row = torch.tensor([5], device=device)
    truncated = launch_truncate(logits_NV[None].to(device), one_row, same(how, 1, device))
    block = {} if device.type == "cuda" else {"block_k": 4096}
    drawn_NR = _launch_draw_tokens(truncated, coins_DR[DEPTHS][None].to(device), **block)[0].cpu()
    tokens, parents = (torch.tensor([x] * rounds) for x in (TOKENS, PARENTS))
    result = verify_tree_greedy_reference(tokens, parents, torch.full((rounds,), 5), drawn_NR.T.contiguous())
    assert result.num_accepted_B.bincount().min() > 500

    second = probabilities_reference(after_token, *how).cumsum(-1)
    plain_RV = (second[None] <= coins_DR[1][:, None, None]).sum(-1)
    first_R = torch.where(result.num_accepted_B > 0, tokens.gather(1, result.path_BN[:, 1:2].clamp(min=0))[:, 0], -1)
    deeper_R = tokens.gather(1, result.path_BN[:, 2:3].clamp(min=0))[:, 0]
    second_R = torch.where(result.num_accepted_B == 2, deeper_R, result.bonus_B)
    first_R, second_R = (
        torch.where(first_R < 0, result.bonus_B, first_R),
        torch.where(first_R < 0, plain_RV.gather(1, result.bonus_B[:, None])[:, 0], second_R),
    )
    joint = probabilities_reference(logits_NV[:1], *how)[0][:, None] * probabilities_reference(after_token, *how)
    counts = (first_R * 4 + second_R).bincount(minlength=16).view(4, 4)
    kept = joint > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].numpy(), (joint[kept] * rounds).numpy()).pvalue > 1e-3


def test_memory_at_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """B=32, N=64, V=128256: what the launchers allocate beside the logits, counted on tensors without storage."""

    class Nothing:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    for kernels, name in (
        (block_statistics, "_block_statistics_kernel"),
        (truncate, "_truncate_kernel"),
        (draw_tokens, "_draw_tokens_kernel"),
        (verify_tree_greedy, "_verify_tree_greedy_kernel"),
    ):
        monkeypatch.setattr(kernels, name, Nothing())
    B, N, V = 32, 64, 128256
    with torch.device("meta"):
        logits = torch.zeros(B, N, V, dtype=torch.bfloat16)
        ids, num_nodes = torch.zeros(B, N, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
        how, coins = BatchSampling(torch.ones(B), num_nodes, torch.ones(B)), torch.zeros(B, N, dtype=torch.float64)

    allocated = 0
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def counting(*args: object, allocate: Callable[..., Tensor] = allocate, **kwargs: object) -> Tensor:
            nonlocal allocated
            tensor = allocate(*args, **kwargs)
            allocated += tensor.numel() * tensor.element_size()
            return tensor

        monkeypatch.setattr(torch, name, counting)
    _launch_verify_tree_sampling(logits, ids, ids, num_nodes, how, coins)
    assert 23 * 2**20 < allocated < 64 * 2**20, f"{allocated / 2**20:.1f} MiB"


def arguments() -> dict[str, object]:
    return {
        "logits_BNV": torch.zeros(1, 5, 4),
        "tokens_BN": torch.tensor([TOKENS]),
        "parents_BN": torch.tensor([PARENTS]),
        "num_nodes_B": torch.tensor([5]),
        "sampling": same((1.0, 0, 1.0), 1),
        "coins_BN": torch.full((1, 5), 0.5, dtype=torch.float64),
    }


def test_the_op_is_the_reference_on_the_cpu_and_the_kernel_where_it_is_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = verify_tree_sampling(**arguments())
    launched: list[bool] = []
    launch = module._launch_verify_tree_sampling
    monkeypatch.setattr(module, "_launch_verify_tree_sampling", lambda *x: launched.append(True) or launch(*x))
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off on a machine with a GPU")
    with interpreted():
        inside = verify_tree_sampling(**arguments())
    assert launched == [True]
    assert plain.path_BN.tolist() == inside.path_BN.tolist() == [[0, 2, -1, -1, -1]]
    verify_tree_sampling(**arguments())
    assert launched == [True]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens_BN", torch.zeros(1, 4, dtype=torch.int64), r"tokens_BN is torch.int64 \(1, 4\)"),
        ("parents_BN", torch.tensor([[-1, 0, 0, 9, 2]]), r"parents_BN\[0, 3\] is 9"),
        ("coins_BN", torch.ones(1, 5, dtype=torch.float64), r"\[0, 1\)"),
    ],
)
def test_the_op_says_what_is_wrong(name: str, value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_tree_sampling(**{**arguments(), name: value})


@pytest.mark.gpu
def test_the_op_runs_without_a_synchronisation_on_a_gpu(random_parents: Callable[[int, int], Tensor]) -> None:
    B, N, V = 8, 60, 128256
    parents, tokens = random_parents(B, N).cuda(), torch.randint(0, 8, (B, N)).cuda()
    logits = torch.randn(B, N, V, dtype=torch.bfloat16, device="cuda")
    logits[..., :8] += 10
    coins = torch.rand(B, N, dtype=torch.float64).cuda()
    nodes, how = torch.randint(0, N + 1, (B,)).cuda(), same((0.8, 50, 0.95), B, "cuda")
    inputs = {"tokens_BN": tokens, "parents_BN": parents, "num_nodes_B": nodes, "sampling": how, "coins_BN": coins}
    verify_tree_sampling(logits, **inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = verify_tree_sampling(logits, **inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = verify_tree_sampling_reference(
        logits.cpu(), tokens.cpu(), parents.cpu(), nodes.cpu(), same((0.8, 50, 0.95), B), coins.cpu()
    )
    rows = [torch.equal(got, want) for got, want in zip(result.path_BN.cpu(), expected.path_BN, strict=True)]
    assert sum(rows) >= B - 1  # a coin within rounding of a boundary may differ
