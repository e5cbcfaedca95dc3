"""Packed weights compute the same products, whatever the number of rows, and leave the engine's text as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eyas.inference.draft import DynamicTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.packed_linear import PackedLinear, can_pack, pack_linears
from eyas.tests.toys import tiny_head, tiny_target


@pytest.mark.parametrize("rows", [1, 5, 7, 60, 63])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_packed_linear_is_the_linear(rows: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(40, 97, bias=bias).to(dtype).requires_grad_(False)
    packed = PackedLinear(linear, rows=25)
    x = torch.randn(2, rows, 40, dtype=dtype)
    torch.testing.assert_close(packed(x), F.linear(x, linear.weight, linear.bias), rtol=tolerance, atol=tolerance)


def test_every_linear_below_a_module_is_packed_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.LayerNorm(8))
    assert pack_linears(module, rows=4) == 2
    assert pack_linears(module, rows=4) == 0
    assert not [m for m in module.modules() if isinstance(m, nn.Linear)]


def test_only_cpu_floats_are_packed() -> None:
    assert can_pack(torch.zeros(4, 4))
    assert can_pack(torch.zeros(4, 4, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not can_pack(torch.zeros(4, 4, device="meta"))


def test_a_packed_target_and_head_write_the_same_text() -> None:
    request = GenerationRequest(tuple(range(3, 12)), 48)
    target = tiny_target()
    head = tiny_head(target)
    plain = Engine(target).generate(request)
    speculative = Engine(target, head, DynamicTree(4, 3, 10)).generate(request)
    target.pack(rows=11)
    pack_linears(head, rows=3)
    assert target.head.packed is not None
    assert target.self_check(torch.arange(3, 20)) < 1e-5
    assert Engine(target).generate(request).token_ids == plain.token_ids
    packed = Engine(target, head, DynamicTree(4, 3, 10)).generate(request)
    assert packed.token_ids == plain.token_ids
    assert packed.stats == speculative.stats
