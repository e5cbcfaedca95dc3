"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

PyTorch's CPU linear takes plain weights apart at every call; with few rows (decoding, tree verification) that costs
more than the arithmetic. oneDNN's packed layout halves the time of products with 1 to 32 rows in fp32 (docs/log.md),
and what is computed is the same product. Layers that read the same input (queries, keys and values; gate and up) are
one product: narrow ones cost more per weight. Elsewhere (GPU, builds without oneDNN) modules are left as they are.
"""

import torch
from torch import Tensor, nn

ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names of siblings that read one input


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


class _OneProduct:
    """The product of several layers with one input: computed when the first is asked, kept until the last was."""

    def __init__(self, linears: list[nn.Linear], *, rows: int) -> None:
        self.packed = pack(torch.cat([linear.weight for linear in linears]), rows=rows)
        self.bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears]).detach()
        self.widths = [linear.out_features for linear in linears]
        self.last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return layer `index` of x; x counts as the same input only as the same tensor."""
        last = self.last
        if index == 0 or last is None or last[0] is not x:
            last = x, packed_product(x, self.packed, self.bias).split(self.widths, dim=-1)
        self.last = None if index == len(self.widths) - 1 else last
        return last[1][index]


class PackedPart(nn.Module):
    """One of several frozen nn.Linear layers that are a single packed product, for inference only."""

    def __init__(self, product: _OneProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.index)


def pack_linears(module: nn.Module, *, rows: int) -> int:
    """Replace every nn.Linear below a module by its packed form, in place, and return how many were replaced."""
    count = 0
    for names in ONE_INPUT:
        count += _pack_together(module, names, rows=rows)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and can_pack(child.weight):
            setattr(module, name, PackedLinear(child, rows=rows))
            count += 1
        else:
            count += pack_linears(child, rows=rows)
    return count


def _pack_together(module: nn.Module, names: tuple[str, ...], *, rows: int) -> int:
    """Replace the layers of these names by parts of one product, if all are there, plain and alike."""
    children = [getattr(module, name, None) for name in names]
    linears = [child for child in children if isinstance(child, nn.Linear) and can_pack(child.weight)]
    if len(linears) < len(names):
        return 0
    if len({(one.weight.dtype, one.in_features, one.bias is None) for one in linears}) > 1:
        return 0
    product = _OneProduct(linears, rows=rows)
    for index, name in enumerate(names):
        setattr(module, name, PackedPart(product, index))
    return len(names)
