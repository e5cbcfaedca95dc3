"""The two plain layers a Llama-like draft head is made of besides attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in fp32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
