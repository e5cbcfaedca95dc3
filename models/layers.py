"""The plain layers a Llama-like draft head is made of besides attention."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

Scored = TypeVar("Scored")


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight with its gradient written out: half the passes over memory that autograd would take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        accurate = torch.promote_types(x.dtype, torch.float32)
        x_accurate = x.to(accurate)
        inverse = (torch.linalg.vecdot(x_accurate, x_accurate) / x.shape[-1] + eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, inverse)
        return (x_accurate * inverse).mul_(weight.to(accurate)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        g = grads[0].to(inverse.dtype)
        normed = x.to(inverse.dtype) * inverse
        g_weight = (g * normed).flatten(0, -2).sum(0).to(weight.dtype)
        g = g * weight.to(inverse.dtype)
        along = torch.linalg.vecdot(g, normed)[..., None] / x.shape[-1]
        return g.addcmul_(normed, along, value=-1.0).mul_(inverse).to(x.dtype), g_weight, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in fp32 or better."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _Gated(torch.autograd.Function):
    """act(gate) * up that keeps gate and up alone: the activation is made again for its gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = ctx.act(gate)
        (g_gate,) = torch.autograd.grad(active, gate, grads[0] * up)
        return g_gate, grads[0] * active.detach(), None


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not torch.is_grad_enabled():
            return self.down_proj(self.act(gate) * up)
        return self.down_proj(_Gated.apply(gate, up, self.act))  # type: ignore[no-untyped-call]


class _TakeRows(torch.autograd.Function):
    """Rows at distinct indices: unlike autograd's own, the gradient is an assignment, not a sum over repeats."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, index_M: Tensor) -> Tensor:
        ctx.save_for_backward(index_M)
        ctx.rows = len(x_ND)
        return x_ND[index_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index_M,) = ctx.saved_tensors
        g_ND = grads[0].new_zeros(ctx.rows, grads[0].shape[1])
        g_ND[index_M] = grads[0]
        return g_ND, None


def take_rows(x_ND: Tensor, index_M: Tensor) -> Tensor:
    """Return the rows of x at indices that must not repeat, [M, D]."""
    out: Tensor = _TakeRows.apply(x_ND, index_M)  # type: ignore[no-untyped-call]
    return out


class OutputLinear(nn.Linear):
    """A linear layer that can hand its weight to a scorer in place of returning logits.

    So the objective never needs the logits of all slots at once, and what gathers sharded weights around a module's
    forward still finds the weight used inside it.
    """

    def score(self, states_ND: Tensor, scorer: Callable[[Tensor, Tensor], Scored]) -> Scored:
        """Return `scorer(states, weight)`, called as this module's forward."""
        return self(states_ND, scorer)

    def forward(self, states: Tensor, scorer: Callable[[Tensor, Tensor], Scored] | None = None) -> Any:
        """Return logits of the states, or what the scorer makes of states and weight."""
        return F.linear(states, self.weight, self.bias) if scorer is None else scorer(states, self.weight)
