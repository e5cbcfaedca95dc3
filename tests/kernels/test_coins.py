"""Coins against the published Philox vectors, their law, and the kernel bit by bit."""

import pytest
import torch
from scipy import stats

from eyas.kernels.coins import _launch_coins, coins, coins_reference


def words_to_coin(first: int, second: int) -> float:
    return ((first >> 5) * 2**26 + (second >> 6)) * 2.0**-53


def test_the_published_vector_of_zeros() -> None:
    """Philox4x32-10 of an all-zero key and counter starts 6627e8d5 e169c58d (Random123's known answers)."""
    coin = coins_reference(torch.tensor([0]), torch.tensor([[0]]))
    assert coin.dtype == torch.float64
    assert coin.item() == words_to_coin(0x6627E8D5, 0xE169C58D)


def test_the_published_vector_of_ones() -> None:
    """All bits set in key and counter give 408f276d 41c83b0e; the last counter word is always 0 here, so by hand."""
    from eyas.kernels import coins as module

    words, key = [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2
    for _ in range(module.ROUNDS):
        high = [(a * b) >> 32 for a, b in zip((words[0], words[2]), module.MULTIPLIERS, strict=True)]
        low = [(a * b) & module.WORD for a, b in zip((words[0], words[2]), module.MULTIPLIERS, strict=True)]
        words = [high[1] ^ words[1] ^ key[0], low[1], high[0] ^ words[3] ^ key[1], low[0]]
        key = [(k + w) & module.WORD for k, w in zip(key, module.WEYL, strict=True)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("stream", [0, 1, 7])
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(stream: int, device: torch.device) -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    positions = torch.randint(0, 2**40, (5, 63))
    positions[:, 0] = torch.tensor([0, 2**31 - 1, 2**31, 2**32, 2**63 - 1])
    expected = coins_reference(seeds, positions, stream)
    assert torch.equal(_launch_coins(seeds.to(device), positions.to(device), stream).cpu(), expected)
    assert torch.equal(coins(seeds, positions, stream=stream), expected)


def test_coins_are_uniform_and_distinct_by_seed_position_and_stream(device: torch.device) -> None:
    seeds, positions = torch.arange(50), torch.arange(1000).expand(50, -1)
    drawn = _launch_coins(seeds.to(device), positions.to(device), 0).cpu()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.unique().numel() == 50_000
    assert stats.kstest(drawn.flatten().numpy(), "uniform").pvalue > 1e-3
    other = coins_reference(seeds, positions, 1)
    for a, b in ((drawn, other), (drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.02


def test_the_op_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"position_BN torch.int64 \(3, 2\)"):
        coins(torch.tensor([1, 2]), torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"seed_B is torch\.int32"):
        coins(torch.tensor([1], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.gpu
def test_the_op_runs_the_kernel_on_a_gpu() -> None:
    seeds, positions = torch.randint(-(2**62), 2**62, (64,)), torch.randint(0, 2**40, (64, 61))
    assert torch.equal(coins(seeds.cuda(), positions.cuda()).cpu(), coins_reference(seeds, positions))
