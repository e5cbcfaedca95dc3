"""The accepted path's cache entries, moved in place: overlapping moves by hand, and the kernel bit by bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.kernels.keep_path import _launch_keep_path, as_bits, keep_path, keep_path_reference

MOVERS = {"reference": keep_path_reference, "kernel": _launch_keep_path}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("move", MOVERS.values(), ids=MOVERS)
def test_hand_worked(move: Callable[..., None], dtype: torch.dtype, device: torch.device) -> None:
    """Entries are named by their position. Row 0 moves into places that are still to be read; row 1 nothing."""
    cache = torch.arange(12.0, device=device).view(1, 1, 1, 12, 1).repeat(2, 2, 3, 1, 5).to(dtype)
    path = torch.tensor([[0, 2, 3, 5, 6, -1], [0, 1, -1, -1, -1, -1]], device=device)
    move(cache, torch.tensor([4, 3], device=device), path, torch.tensor([4, 1], device=device))
    cache = cache.float()
    assert cache[0, 0, 2, :, 4].tolist() == [0, 1, 2, 3, 4, 6, 7, 9, 10, 9, 10, 11]
    assert (cache[:, 0] == cache[:1, 0, :1]).all()
    assert cache[1, 1, 0, :, 0].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("nodes", "kv_heads", "head_dim", "dtype"),
    [
        (1, 1, 32, torch.float32),
        (5, 3, 80, torch.bfloat16),
        (60, 1, 256, torch.float16),
        (63, 9, 33, torch.float32),
        (7, 3, 33, torch.float8_e4m3fn),
    ],
)
def test_kernel_equals_reference(
    nodes: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows = 4
    # [rows, positions, heads, dim] in memory, as some engines lay it out.
    cache = torch.randn(2, rows, nodes + 9, kv_heads, head_dim).to(dtype).transpose(2, 3)
    accepted = torch.tensor([nodes - 1, 0, nodes // 2, nodes // 3])
    path = torch.full((rows, nodes), -1)
    for row, count in enumerate(accepted.tolist()):
        path[row, 0] = 0
        path[row, 1 : count + 1] = 1 + torch.randperm(nodes - 1)[:count].sort().values
    path[1, 0] = -1  # an idle row
    prefix = torch.tensor([9, 0, 4, 7])
    expected, moved = cache.clone(), cache.clone().to(device)
    keep_path_reference(expected, prefix, path, accepted)
    _launch_keep_path(moved, prefix.to(device), path.to(device), accepted.to(device))
    assert torch.equal(as_bits(moved).cpu(), as_bits(expected))


def test_nothing_outside_the_cache_is_touched(device: torch.device) -> None:
    around = torch.full((1, 1, 1, 30, 4), -7.0, device=device)
    cache = around[:, :, :, 10:20]
    cache.copy_(torch.arange(10.0).view(1, 1, 1, 10, 1))
    path = torch.tensor([[0, 1, 900, -900]], device=device)
    for prefix in (9, 7, -3, 10**9):
        _launch_keep_path(cache, torch.tensor([prefix], device=device), path, torch.tensor([10**9], device=device))
    assert around[:, :, :, :10].eq(-7).all()
    assert around[:, :, :, 20:].eq(-7).all()
    assert cache[0, 0, 0, :, 0].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cache_SBGLD", lambda x: x.double(), "the cache is torch.float64"),
        ("cache_SBGLD", lambda x: x.to(torch.float8_e5m2), "the cache is torch.float8_e5m2"),
        ("cache_SBGLD", lambda x: x.transpose(3, 4), "the last stride 1"),
        ("prefix_len_B", lambda x: x + 8, "row 0 has a prefix of 12"),
        ("path_BN", lambda x: x.flip(1), r"the path \[3, 2, 0\]: a path starts at 0, ascends"),
        ("num_accepted_B", lambda x: x + 1, "3 accepted nodes"),
        ("num_accepted_B", lambda x: x.int(), "num_accepted_B is torch.int32"),
    ],
)
def test_the_op_says_what_is_wrong(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    inputs = {
        "cache_SBGLD": torch.zeros(2, 1, 1, 10, 4),
        "prefix_len_B": torch.tensor([4]),
        "path_BN": torch.tensor([[0, 2, 3]]),
        "num_accepted_B": torch.tensor([2]),
    }
    keep_path(**inputs)
    with pytest.raises(ValueError, match=message):
        keep_path(**{**inputs, name: change(inputs[name])})


@pytest.mark.gpu
def test_the_op_runs_the_kernel_on_a_gpu() -> None:
    cache = torch.randn(8, 3, 2, 90, 128).half()
    path = torch.cat((torch.zeros(3, 1), 1 + torch.arange(10).mul(3).expand(3, -1)), 1).long()
    prefix, accepted = torch.tensor([40, 0, 7]), torch.tensor([10, 0, 4])
    expected, moved = cache.clone(), cache.cuda()
    keep_path_reference(expected, prefix, path, accepted)
    keep_path(moved, prefix.cuda(), path.cuda(), accepted.cuda())
    assert torch.equal(moved.cpu(), expected)
