"""RMS norms of a target, computed by torch's one operation in place of the library's six: for decoding on a CPU.

Families write their norms themselves, some with another gain (1 + weight) or another order of roundings. So a norm is
replaced only where torch's operation gives what the module gives, in fp32, on numbers of its own.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROBE_ROWS = 4
CLOSE = 1e-6  # of numbers around 1


class FusedRMSNorm(nn.Module):
    """x / rms(x) * weight, statistics and gain in fp32, rounded once."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def fuse_norms(module: nn.Module) -> int:
    """Replace every plain RMS norm below a module on a CPU, in place, and return how many were replaced."""
    count = 0
    for name, child in module.named_children():
        fused = _fused(child)
        if fused is None:
            count += fuse_norms(child)
        else:
            setattr(module, name, fused)
            count += 1
    return count


@torch.inference_mode()
def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """Return what stands for a module, None where it is no plain RMS norm."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if isinstance(module, FusedRMSNorm) or not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if type(weight) is not nn.Parameter or weight.ndim != 1 or weight.device.type != "cpu":
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = torch.randn(PROBE_ROWS, len(weight)) * torch.tensor([[1e-3], [1.0], [10.0], [1e3]])
    fused = FusedRMSNorm(weight, eps)
    ours, theirs = copy.deepcopy(fused).float()(probe), copy.deepcopy(module).float()(probe)
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        return None
    scale = ours.abs().clamp(min=1.0)
    return fused if bool(((ours - theirs).abs() <= CLOSE * scale).all()) else None
