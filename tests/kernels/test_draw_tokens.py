"""Truncation and draws: known distributions, forced coins, the law over 200k coins, and the kernels on odd sizes."""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from eyas.kernels.block_statistics import block_statistics_reference, launch_block_statistics
from eyas.kernels.coins import coins_reference
from eyas.kernels.draw_tokens import _launch_draw_tokens, draw_tokens, draw_tokens_reference
from eyas.kernels.truncate import BatchSampling, launch_truncate, probabilities_reference, truncate_reference

BELOW_ONE = 1 - 2.0**-53
# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16.
DYADIC = torch.tensor([4.0, 3, 2, 1, 1]) * torch.log(torch.tensor(2.0))


def sampling(*settings: tuple[float, int, float], device: torch.device | str = "cpu") -> BatchSampling:
    """The samplings of a batch from (temperature, top_k, top_p) of each row."""
    temperature, top_k, top_p = zip(*settings, strict=True)
    return BatchSampling(
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
    )


def launch(logits_BNV: Tensor, num_nodes_B: Tensor, how: BatchSampling, coins_BNK: Tensor, **block: int) -> Tensor:
    return _launch_draw_tokens(launch_truncate(logits_BNV, num_nodes_B, how), coins_BNK, **block)


DRAWS: dict[str, Callable[..., Tensor]] = {"reference": draw_tokens_reference, "kernel": launch}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(
    ("how", "coins", "tokens"),
    [
        ((1.0, 0, 1.0), [0.0, 0.4999, 0.5001, 0.7499, 0.7501, 0.8751, 0.9376, BELOW_ONE], [0, 0, 1, 1, 2, 3, 4, 4]),
        ((1.0, 2, 1.0), [0.0, 0.666, 0.667, BELOW_ONE], [0, 0, 1, 1]),
        (
            (1.0, 4, 1.0),
            [0.0, 0.5001, 0.8751, 0.9376, BELOW_ONE],
            [0, 1, 3, 4, 4],
        ),  # both logits equal to the 4th are kept
        ((1.0, 0, 0.5), [0.0, BELOW_ONE], [0, 0]),
        ((1.0, 0, 0.51), [0.0, 0.666, 0.667, BELOW_ONE], [0, 0, 1, 1]),
        ((1.0, 0, 0.95), [0.9376, BELOW_ONE], [4, 4]),  # above both last tokens lie 7/8
        ((1.0, 3, 0.6), [0.0, 0.666, 0.667, BELOW_ONE], [0, 0, 1, 1]),  # top-p of what top-k kept: 4/7 < 0.6
        ((0.5, 0, 1.0), [0.0, 0.7440, 0.7443, BELOW_ONE], [0, 0, 1, 4]),  # 256 of 256 + 64 + 16 + 4 + 4
        ((0.0, 0, 1.0), [0.0, BELOW_ONE], [0, 0]),
        ((0.0, 3, 0.2), [0.5], [0]),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_known_tokens_of_known_coins(
    how: tuple[float, int, float],
    coins: list[float],
    tokens: list[int],
    draw: Callable[..., Tensor],
    device: torch.device,
) -> None:
    coins_11K = torch.tensor(coins, dtype=torch.float64, device=device)[None, None]
    one = torch.tensor([1], device=device)
    drawn = draw(DYADIC.to(device)[None, None], one, sampling(how, device=device), coins_11K)
    assert drawn[0, 0].tolist() == tokens


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.usefixtures("poisoned_empty")
def test_tokens_without_probability_are_never_drawn_at_forced_coins(
    draw: Callable[..., Tensor], device: torch.device
) -> None:
    """First, last and middle tokens have none: by -inf, by underflow, by top-k; across the blocks of 128."""
    logits = torch.full((3, 1, 700), -torch.inf)
    logits[0, 0, [130, 131, 500]] = torch.tensor([0.0, 1.0, 0.5])
    logits[1, 0] = -1e4
    logits[1, 0, [1, 698]] = 3.0
    logits[2, 0] = torch.linspace(-1, 1, 700)
    logits[2, 0, 690:] = -2.0
    coins = torch.tensor([0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-24, BELOW_ONE], dtype=torch.float64)
    how = sampling((1.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 1.0), device=device)
    coins_BNK = coins.expand(3, 1, -1).to(device)
    drawn = draw(logits.to(device), torch.ones(3, dtype=torch.int64, device=device), how, coins_BNK).cpu()
    assert set(drawn[0, 0].tolist()) == {130, 131, 500}
    assert set(drawn[1, 0].tolist()) == {1, 698}
    assert set(drawn[2, 0].tolist()) <= set(range(685, 690))
    assert drawn[2, 0, 0] == 685
    assert drawn[2, 0, -1] == 689


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.usefixtures("poisoned_empty")
def test_nan_infinite_and_padded_nodes_draw_nothing(draw: Callable[..., Tensor], device: torch.device) -> None:
    logits = torch.zeros(2, 5, 300)
    logits[0, 0, 299] = torch.nan
    logits[0, 1, 0] = torch.inf
    logits[0, 2] = -torch.inf
    logits[1, 1:] = torch.nan
    how = sampling((1.0, 0, 0.9), (0.0, 0, 1.0), device=device)
    coins = torch.full((2, 5, 1), 0.5, dtype=torch.float64, device=device)
    drawn = draw(logits.to(device), torch.tensor([4, 2], device=device), how, coins).squeeze(-1).tolist()
    assert drawn[0][:3] == [-1, -1, -1]
    assert 0 <= drawn[0][3] < 300
    assert drawn[0][4] == -1
    assert drawn[1] == [0, -1, -1, -1, -1]


# Ties everywhere in bf16; -0.0 beside 0.0; a vocabulary of one token, of one block, of a ragged last block.
SIZES = [
    (1, 1, torch.float32),
    (8, 5, torch.bfloat16),
    (127, 1, torch.float16),
    (130, 3, torch.float32),
    (1000, 1, torch.bfloat16),
    (49152, 1, torch.bfloat16),
]
SETTINGS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 0.9), (1.3, 0, 0.5), (1.0, 300, 0.95), (0.3, 1, 1.0), (2.0, 7, 1.0)]


@pytest.mark.parametrize(("vocabulary", "nodes", "dtype"), SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_kernels_equal_references(vocabulary: int, nodes: int, dtype: torch.dtype, device: torch.device) -> None:
    settings = SETTINGS if vocabulary < 10_000 else SETTINGS[::2]
    B = len(settings)
    logits = (torch.randn(B, nodes, vocabulary) * 3).to(dtype)
    logits[:, :, ::7] = 0.0
    logits[:, :, 3::7] = -0.0
    num_nodes = torch.full((B,), nodes)
    num_nodes[2] = nodes - 1
    how, there = sampling(*settings), sampling(*settings, device=device)
    is_node = torch.arange(nodes) < num_nodes[:, None]
    moved = (logits.to(device), num_nodes.to(device))

    statistics = launch_block_statistics(*moved, there.temperature_B)
    for got, want in zip(statistics, block_statistics_reference(logits, num_nodes, how.temperature_B), strict=True):
        torch.testing.assert_close(got.cpu()[is_node], want[is_node], atol=1e-5, rtol=1e-5)

    truncated, expected = launch_truncate(*moved, there), truncate_reference(logits, num_nodes, how)
    got, want = truncated.probabilities().cpu(), expected.probabilities()
    assert torch.equal((got > 0)[is_node], (want > 0)[is_node])
    torch.testing.assert_close(got[is_node], want[is_node], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(truncated.mass_BNC.cpu()[1:][is_node[1:]], expected.mass_BNC[1:][is_node[1:]])
    assert torch.equal(truncated.only_BN.cpu()[is_node], expected.only_BN[is_node])

    coins = torch.rand(B, nodes, 5, dtype=torch.float64)
    drawn = _launch_draw_tokens(truncated, coins.to(device)).cpu()
    assert drawn[~is_node].eq(-1).all()
    # The sums round differently, so a coin may fall on the other side of a boundary: by no more than that.
    cumulative = want.cumsum(-1)
    token = drawn.clamp(min=0)
    assert want.gather(-1, token)[is_node].gt(0).all()
    above = (cumulative.gather(-1, token) - coins)[is_node]
    below = (coins - (cumulative - want).gather(-1, token))[is_node]
    assert above.min() > -1e-5
    assert below.min() > -1e-5
    agree = (drawn == draw_tokens_reference(logits, num_nodes, how, coins))[is_node].float().mean()
    assert agree >= (1.0 if vocabulary <= 130 else 0.95)


@pytest.mark.parametrize("how", [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.5, 0, 0.8), (0.9, 6, 0.9)])
@pytest.mark.usefixtures("poisoned_empty")
def test_the_law_of_200k_draws(how: tuple[float, int, float], device: torch.device) -> None:
    rows, draws = 5, 40_000
    logits = (torch.randn(8) * 1.5).expand(rows, 1, 8)
    p = probabilities_reference(logits[0], *how)[0]
    coins = coins_reference(torch.arange(rows), torch.arange(draws).expand(rows, -1))[:, None]
    one = torch.ones(rows, dtype=torch.int64, device=device)
    block = {} if device.type == "cuda" else {"block_k": 8192}
    drawn = launch(logits.to(device), one, sampling(*[how] * rows, device=device), coins.to(device), **block)
    counts = drawn.cpu().flatten().bincount(minlength=8)
    assert counts.sum() == rows * draws
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0].numpy(), (p[p > 0] * rows * draws).numpy()).pvalue > 1e-3


def good(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "logits_BNV": torch.randn(2, 3, 5),
        "num_nodes_B": torch.tensor([3, 1]),
        "sampling": sampling((1.0, 0, 1.0), (0.0, 2, 0.5)),
        "coins_BNK": torch.rand(2, 3, 1, dtype=torch.float64),
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_BNV": torch.randn(2, 3, 5).double()}, "logits_BNV is torch.float64"),
        ({"num_nodes_B": torch.tensor([3])}, r"num_nodes_B is torch.int64 \(1,\)"),
        ({"coins_BNK": torch.rand(2, 3, 1)}, "coins are torch.float32"),
        ({"coins_BNK": torch.ones(2, 3, 1, dtype=torch.float64)}, r"coins must lie in \[0, 1\)"),
        ({"sampling": sampling((1.0, 0, 1.0))}, r"temperature_B is torch.float32 \(1,\)"),
        ({"sampling": sampling((1.0, 0, 1.0), (-1.0, 0, 1.0))}, "row 1 samples with temperature -1.0"),
        ({"sampling": sampling((1.0, 0, 0.0), (1.0, 0, 1.0))}, r"row 0 .* top_p in \(0, 1\]"),
    ],
)
def test_the_op_says_what_is_wrong(changes: dict[str, object], message: str) -> None:
    draw_tokens(**good())
    with pytest.raises(ValueError, match=message):
        draw_tokens(**good(**changes))


@pytest.mark.gpu
def test_the_op_runs_the_kernels_on_a_gpu() -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 3, 128256, dtype=torch.bfloat16) * 2
    coins = torch.rand(7, 3, 2, dtype=torch.float64)
    nodes = torch.tensor([3, 3, 0, 1, 2, 3, 3])
    how, there = sampling(*SETTINGS), sampling(*SETTINGS, device="cuda")
    drawn = draw_tokens(logits.cuda(), nodes.cuda(), there, coins.cuda()).cpu()
    assert (drawn == draw_tokens_reference(logits, nodes, how, coins)).float().mean() > 0.9
