"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

PyTorch's CPU linear takes plain weights apart at every call; with few rows (decoding, tree verification) that costs
more than the arithmetic. oneDNN's packed layout halves the time of products with 1 to 32 rows in fp32 (docs/log.md),
and what is computed is the same product. Elsewhere (GPU, builds without oneDNN) modules are left as they are.
"""

import torch
from torch import Tensor, nn


def can_pack(weight: Tensor) -> bool:
    """Return whether this build of PyTorch packs weights of this dtype on this device; quantised ones it does not."""
    if type(weight) not in (Tensor, nn.Parameter):
        return False
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(known) and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def pack(weight_OI: Tensor, *, rows: int) -> Tensor:
    """Return a weight in the layout that suits inputs of about `rows` rows (any number works)."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), rows)


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for a packed weight, any leading dimensions."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """A frozen nn.Linear with a packed weight, for inference only."""

    def __init__(self, linear: nn.Linear, *, rows: int) -> None:
        super().__init__()
        self.packed = pack(linear.weight, rows=rows)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return packed_product(x, self.packed, self.bias)


def pack_linears(module: nn.Module, *, rows: int) -> int:
    """Replace every nn.Linear below a module by its packed form, in place, and return how many were replaced."""
    count = 0
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and can_pack(child.weight):
            setattr(module, name, PackedLinear(child, rows=rows))
            count += 1
        else:
            count += pack_linears(child, rows=rows)
    return count
