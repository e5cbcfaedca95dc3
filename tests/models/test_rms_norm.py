"""A head's norm says the same with and without gradients, in every dtype, and keeps the dtype of what it is given."""

import pytest
import torch

from eyas.models.layers import RMSNorm


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("error")
def test_the_norm_of_training_is_the_norm_of_decoding(given: torch.dtype, kept: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(33, eps=1e-5).to(kept)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(33) + 0.5)
    x = (3 * torch.randn(2, 5, 33)).to(given)
    trained = norm(x)
    with torch.no_grad():
        decoded = norm(x)
    assert trained.dtype == decoded.dtype == given
    assert trained.equal(decoded)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    tolerance = 1e-2 if torch.bfloat16 in (given, kept) else 1e-6
    torch.testing.assert_close(decoded.double(), exact.detach(), rtol=tolerance, atol=tolerance)
