"""The plain layers: the gated MLP's gradients are autograd's own, from fewer kept activations."""

import pytest
import torch
from torch import Tensor

from eyas.models.layers import GatedMLP


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_mlp_is_the_plain_formula_and_keeps_three_wide_tensors(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(6, 34, activation=activation).to(dtype)
    inputs = [torch.randn(2, 5, 6, dtype=dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.shape[-1] == 34 and x.numel() == 2 * 5 * 34:
            kept[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ours = mlp(inputs[0])
    plain = mlp.down_proj(mlp.act(mlp.gate_proj(inputs[1])) * mlp.up_proj(inputs[1]))
    assert torch.equal(ours, plain)
    assert len(kept) == 3  # gate, up, and the product, which the last layer's weight needs
    weights = list(mlp.parameters())
    found, expected = (
        torch.autograd.grad(out.square().sum(), [x, *weights]) for out, x in zip((ours, plain), inputs, strict=True)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(mlp(inputs[0]), plain)
