"""Packed weights compute the same products, whatever the number of rows, and leave the engine's text as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eyas.inference.draft import DynamicTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.packed_linear import PackedLinear, PackedPart, can_pack, pack_linears
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


class Three(nn.Module):
    """Siblings that read one input by the names of attention layers."""

    def __init__(self, *, biases: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        for name, width, bias in zip(("q_proj", "k_proj", "v_proj"), (24, 8, 16), biases, strict=True):
            setattr(self, name, nn.Linear(40, width, bias=bias).requires_grad_(False))


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_one_product_in_whatever_order_they_are_asked(bias: bool) -> None:
    torch.manual_seed(0)
    plain = Three(biases=(bias, bias, bias))
    packed = copy.deepcopy(plain)
    assert pack_linears(packed, rows=5) == 3
    assert {type(child) for child in packed.children()} == {PackedPart}
    assert len({id(child.product) for child in packed.children()}) == 1
    first, second = torch.randn(2, 3, 5, 40)
    for x, names in (
        (first, ("q_proj", "k_proj", "v_proj")),
        (second, ("v_proj", "q_proj", "k_proj")),
        (first, ("k_proj",)),
        (second, ("v_proj", "v_proj")),
        (first, ("q_proj", "k_proj", "v_proj")),
    ):
        for name in names:
            torch.testing.assert_close(getattr(packed, name)(x), getattr(plain, name)(x), rtol=1e-5, atol=1e-5)
    first += 1.0  # the same tensor with other numbers
    torch.testing.assert_close(packed.q_proj(first), plain.q_proj(first), rtol=1e-5, atol=1e-5)
    assert packed.v_proj(first).shape == (3, 5, 16)
    assert packed.q_proj.product.last is None, "no input is kept once all were asked"


def test_layers_that_are_not_alike_are_packed_one_by_one() -> None:
    assert pack_linears(mixed := Three(biases=(True, True, False)), rows=5) == 3
    assert {type(child) for child in mixed.children()} == {PackedLinear}
    (odd := Three()).k_proj = nn.Identity()
    assert pack_linears(odd, rows=5) == 2
    assert {type(child) for child in odd.children()} == {PackedLinear, nn.Identity}


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
