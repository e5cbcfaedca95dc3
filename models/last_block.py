"""The target's last block in the parts of a draft layer: its matrices, and the norms that stand before its two halves.

Names do not tell where a norm stands: `post_attention_layernorm` precedes the MLP in Llama, follows the attention in
Gemma 2 and OLMo 2. So the block is watched at work, with attention and MLP stubbed out: the norm before the MLP is the
one whose very output the MLP is given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.models.target import Target


@dataclass(frozen=True)
class LastBlock:
    """Weights of a block in a draft layer's terms; matrices as stored, norms as fp32 factors ([D], ones for none).

    `attention` holds q_proj, k_proj, v_proj and o_proj, `mlp` gate_proj, up_proj and down_proj. `notes` say what the
    draft layer cannot hold of the block.
    """

    attention: dict[str, Tensor]
    mlp: dict[str, Tensor]
    attention_norm_D: Tensor
    mlp_norm_D: Tensor
    notes: tuple[str, ...]


def last_block(target: Target) -> LastBlock:
    """Return the target's last block; raises AttributeError or RuntimeError, with a reason, for one unlike Llama's."""
    block: Any = target.layers[-1]
    attention, mlp = _attention(block.self_attn, target.config), _mlp(block.mlp)
    names = _norms_before(block, target.config.hidden_size)
    norms = [norm_factor(getattr(block, name)) if name else torch.ones_like(mlp["down_proj"][:, 0]) for name in names]
    return LastBlock(attention, mlp, norms[0].float(), norms[1].float(), tuple(_notes(block, *names)))


def norm_factor(norm: Any) -> Tensor:
    """Return what an RMSNorm multiplies by, in fp32: its weight, or 1 + weight where the family stores it so (Gemma).

    Raises RuntimeError for a norm of another kind.
    """
    weight: Tensor = norm.weight
    probe = torch.full_like(weight, 1024.0)  # large, so that eps does not show
    found = norm(probe)
    fits = [factor for factor in (weight.float(), weight.float() + 1) if _close(found, factor)]
    if not fits or getattr(norm, "bias", None) is not None:
        raise RuntimeError(f"its {type(norm).__name__} is no RMSNorm")
    return min(fits, key=lambda factor: float((found.float() - factor).abs().max()))


def _close(found: Tensor, factor: Tensor) -> bool:
    return torch.allclose(found.float(), factor, rtol=1e-2, atol=1e-2)


def _attention(attention: Any, config: Any) -> dict[str, Tensor]:
    """Return the projections of an attention, those stored in one matrix (Phi-3) taken apart."""
    names = ("q_proj", "k_proj", "v_proj")
    if isinstance(fused := getattr(attention, "qkv_proj", None), nn.Linear):
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        width = len(fused.weight) // (heads + 2 * groups)
        split = fused.weight.split([heads * width, groups * width, groups * width])
        parts = dict(zip(names, split, strict=True))
    else:
        parts = {name: getattr(attention, name).weight for name in names}
    return {**parts, "o_proj": attention.o_proj.weight}


def _mlp(mlp: Any) -> dict[str, Tensor]:
    """Return the matrices of a gated MLP, gate and up taken apart where they are one (Phi-3, GLM-4)."""
    names = ("gate_proj", "up_proj")
    if isinstance(fused := getattr(mlp, "gate_up_proj", None), nn.Linear):
        parts = dict(zip(names, fused.weight.chunk(2), strict=True))
    else:
        parts = {name: getattr(mlp, name).weight for name in names}
    return {**parts, "down_proj": mlp.down_proj.weight}


def _norms_before(block: Any, width: int) -> tuple[str, str]:
    """Return the names of the norms before the attention and before the MLP of a block, "" for none."""
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: outputs.update({name: output})

    hooks = [child.register_forward_hook(keep(name)) for name, child in _norms(block)]
    parameter = next(block.parameters())
    x_1TD = torch.ones(1, 2, width, dtype=parameter.dtype, device=parameter.device)
    try:
        with (
            _replaced(block.self_attn, lambda x: inputs.update(attention=x), lambda x: (torch.ones_like(x), None)),
            _replaced(block.mlp, lambda x: inputs.update(mlp=x), torch.ones_like),
        ):
            block(x_1TD, attention_mask=None, position_embeddings=None)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise RuntimeError(f"it cannot be run on its own: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    of = {id(output): name for name, output in outputs.items()}  # kept alive above, so ids are distinct
    return of.get(id(inputs["attention"]), ""), of.get(id(inputs["mlp"]), "")


def _norms(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the direct children of a block that look like norms: no children of their own, one vector of weights."""
    for name, child in block.named_children():
        if not list(child.children()) and getattr(getattr(child, "weight", None), "ndim", 0) == 1:
            yield name, child


@contextmanager
def _replaced(module: Any, see: Callable[[Tensor], None], answer: Callable[[Tensor], Any]) -> Iterator[None]:
    """Let a module hand its states to `see` and return `answer` of them instead of computing, for a while."""
    own = module.__dict__.get("forward")

    def forward(hidden_states: Tensor, *_others: Any, **_named: Any) -> Any:
        see(hidden_states)
        return answer(hidden_states)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _notes(block: nn.Module, before_attention: str, before_mlp: str) -> Iterator[str]:
    for part, name in (("attention", before_attention), ("MLP", before_mlp)):
        if not name:
            yield f"no norm stands before the {part} of the target's last block; the draft layer's begins at ones"
    others = [name for name, _ in _norms(block) if name not in (before_attention, before_mlp)]
    if others:
        yield f"the last block's {', '.join(others)} norm what its halves return, which no draft layer does: left out"
