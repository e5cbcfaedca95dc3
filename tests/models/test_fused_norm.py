"""Norms are replaced only by what computes the same, and a target's states stay what they were."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.models.fused_norm import FusedRMSNorm, fuse_norms
from eyas.tests.toys import tiny_target


class HalvedRMSNorm(LlamaRMSNorm):
    """A norm that goes by the name and does something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) / 2


def with_weight(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(33) + 0.5)
    return norm.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_norm_becomes_one_operation_and_says_the_same(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(33, 33), nn.Sequential(with_weight(LlamaRMSNorm(33, eps=1e-5)))).to(dtype)
    x = 5 * torch.randn(2, 7, 33, dtype=dtype)
    before = module[1](x)
    assert fuse_norms(module) == 1
    assert isinstance(module[1][0], FusedRMSNorm)
    tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2  # two roundings to 8 bits against one
    torch.testing.assert_close(module[1](x), before, rtol=tolerance, atol=1e-6)
    assert fuse_norms(module) == 0, "once is enough"


@pytest.mark.parametrize("kind", [Gemma2RMSNorm, HalvedRMSNorm, nn.LayerNorm])
def test_other_norms_stay(kind: type[nn.Module]) -> None:
    module = nn.Sequential(with_weight(kind(33)))
    assert fuse_norms(module) == 0
    assert type(module[0]) is kind


def test_the_random_numbers_of_a_run_are_not_touched() -> None:
    module = nn.Sequential(with_weight(LlamaRMSNorm(33)))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert fuse_norms(module) == 1
    assert torch.rand(2).equal(expected)


def test_a_fast_target_has_the_states_it_had() -> None:
    target = tiny_target(layers=3, aux_layers=(0, 2, 3))
    ids = torch.arange(3, 20)[None]
    before = target.forward(ids)
    assert sum(type(module).__name__ == "LlamaRMSNorm" for module in target.model.modules()) == 7
    target.pack(rows=4)
    assert not [module for module in target.model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    after = target.forward(ids)
    torch.testing.assert_close(after.aux_hidden_BTF, before.aux_hidden_BTF, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.final_hidden_BTD, before.final_hidden_BTD, rtol=1e-4, atol=1e-5)
