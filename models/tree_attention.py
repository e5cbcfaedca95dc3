"""Attention of a target's layers over draft trees, by the kernel, through transformers' `AttentionInterface`.

`attend` is registered under the name `EYAS_TREE`; a model that is set to it calls it in every layer. While a forward
over trees is under way (`over_trees`) the layers' queries are tree nodes and their keys the whole cache: the kernel
reads ancestor bits and needs no mask. Any other forward of the model goes to the library's own sdpa, mask and all;
on a CPU one with a mask goes to `grouped_attention`, because the library copies every key for each query of its group.

The kernel knows full attention and sliding windows, grouped heads up to 256 wide. A layer that adds something else to
its scores (soft-cap, sinks, position bias) is not served by it: `why_not` says so before anything runs.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from eyas.kernels.tree_attention import tree_attention
from eyas.kernels.tree_attention_checks import DTYPES, MAX_HEAD_DIM
from eyas.kernels.tree_layout import sight_mask, unpack_ancestors
from eyas.models.errors import UserError
from eyas.models.grouped_attention import grouped_attention

EYAS_TREE = "eyas_tree"
ADDED = ("softcap", "s_aux", "position_bias")  # what a layer may hand its attention that the kernel leaves out


@dataclass(frozen=True)
class TreeLayout:
    """Where the trees of a forward lie: row b's node i in cache slot prefix_len_B[b] + i, behind the row's text.

    int64: prefix_len_B, num_nodes_B (0: an idle row) and ancestors_BNW, the bits of `pack_ancestors`.
    """

    prefix_len_B: Tensor
    num_nodes_B: Tensor
    ancestors_BNW: Tensor

    def to(self, device: torch.device) -> "TreeLayout":
        """Return the layout on a device."""
        return TreeLayout(self.prefix_len_B.to(device), self.num_nodes_B.to(device), self.ancestors_BNW.to(device))

    def mask(self, length: int) -> Tensor:
        """Return mask_BNL over `length` cache slots; padding nodes see themselves too, so that no row is empty."""
        tree_BNN = unpack_ancestors(self.ancestors_BNW)
        itself_NN = torch.eye(tree_BNN.shape[1], dtype=torch.bool, device=tree_BNN.device)
        return sight_mask(self.prefix_len_B, tree_BNN | itself_NN, length)

    def key_positions(self, positions_BN: Tensor, length: int) -> Tensor:
        """Return the position of what lies in each cache slot, [B, L]: its number, but for tree nodes."""
        slot_L = torch.arange(length, device=positions_BN.device)
        slots_BN = self.prefix_len_B[:, None] + slot_L[: positions_BN.shape[1]]
        return slot_L.repeat(len(slots_BN), 1).scatter_(1, slots_BN, positions_BN)


@dataclass(frozen=True)
class _Forward:
    """A forward over trees under way: each layer's window (None: full attention), and which layers have attended."""

    layout: TreeLayout
    windows: tuple[int | None, ...]
    attended: set[int] = field(default_factory=set)


_under_way: ContextVar[_Forward | None] = ContextVar("forward over trees", default=None)


@contextmanager
def over_trees(layout: TreeLayout, windows: tuple[int | None, ...]) -> Iterator[None]:
    """Let the layers of one forward attend to trees; raises UserError if some of them did not ask `attend`."""
    forward = _Forward(layout, windows)
    token = _under_way.set(forward)
    try:
        yield
    finally:
        _under_way.reset(token)
    if len(forward.attended) != len(windows):
        raise UserError(
            f"{len(forward.attended)} of this target's {len(windows)} layers attend through transformers' attention "
            "interface, so the others missed the draft trees; load it with attn_implementation eager."
        )


def keys_go_to_the_kernel() -> bool:
    """Whether a forward over trees is under way: its layers' keys are read as they lie in the cache, fp8 or not."""
    return _under_way.get() is not None


# The library hands its layers' settings on by keyword, and which ones differs by family and version.
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Return (attention output [B, T, H, d], None), as the library's attention functions do."""
    forward = _under_way.get()
    if forward is None and _is_plain_on_cpu(query, attention_mask, settings):
        assert attention_mask is not None
        out_BHTd = grouped_attention(query, key, value, attention_mask, scale=settings.get("scaling"))
        return out_BHTd.transpose(1, 2), None
    if forward is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return output
    if found := [name for name in ADDED if settings.get(name) is not None]:
        raise UserError(
            f"this target's attention has {', '.join(found)}, which the tree kernel leaves out; load it with "
            "attn_implementation eager."
        )
    layer: Any = module.layer_idx
    layout = forward.layout if forward.layout.prefix_len_B.device == query.device else forward.layout.to(query.device)
    forward.attended.add(layer)
    out_BHND = tree_attention(
        query if query.stride(-1) == 1 else query.contiguous(),
        key,
        value,
        prefix_len_B=layout.prefix_len_B,
        num_nodes_B=layout.num_nodes_B,
        ancestors_BNW=layout.ancestors_BNW,
        scale=settings.get("scaling") or query.shape[-1] ** -0.5,
        window=forward.windows[layer],
    )
    return out_BHND.transpose(1, 2).contiguous(), None


def _is_plain_on_cpu(query: Tensor, mask: Tensor | None, settings: dict[str, Any]) -> bool:
    """Return whether a forward is attention under a mask and nothing more, on a CPU."""
    if mask is None or query.device.type != "cpu" or settings.get("dropout") or settings.get("output_attentions"):
        return False
    return not any(settings.get(name) is not None for name in ADDED)


AttentionInterface.register(EYAS_TREE, attend)
AttentionMaskInterface.register(EYAS_TREE, sdpa_mask)


def why_not(model: PreTrainedModel, *, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why a model's layers cannot attend to trees by the kernel, None where they can."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if implementation not in ("sdpa", EYAS_TREE):
        return f"it attends by {implementation!r}, as families with a soft-cap or sinks do, which the kernel leaves out"
    if not model._can_set_attn_implementation():
        return "its layers do not attend through transformers' attention interface"
    if head_dim > MAX_HEAD_DIM or dtype not in DTYPES:
        return f"its heads are {head_dim} wide in {dtype}; the kernel takes up to {MAX_HEAD_DIM} in fp32, bf16 or fp16"
    return None


def switch_to_trees(model: PreTrainedModel) -> None:
    """Let the text layers of a model attend through `attend`."""
    config, text = model.config, model.config.get_text_config()
    nested = [name for name in config.sub_configs if getattr(config, name) is text]
    model.set_attn_implementation({nested[0]: EYAS_TREE} if nested else EYAS_TREE)
    assert text._attn_implementation == EYAS_TREE


@cache
def notice(kind: str, reason: str) -> None:
    """Say once, of a family of targets, that its trees are attended to by the plain path."""
    warnings.warn(f"a {kind} target attends to draft trees without the kernel: {reason}", stacklevel=3)
