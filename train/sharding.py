"""Weights and optimizer state of a head that may be sharded over ranks, whole, whatever shards it.

One process and DDP hold whole tensors; FSDP2 shards weights and moments, ZeRO-2 moments, ZeRO-3 both. Checkpoints hold
whole tensors, so a run may go on with another number of processes; DeepSpeed keeps moments in a folder of its own.
Every function here is called on all ranks together.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed runs the optimizer."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def shards_weights(accelerator: Accelerator) -> bool:
    """Return whether a rank holds only its share of the weights."""
    if uses_deepspeed(accelerator):
        return bool(accelerator.state.deepspeed_plugin.zero_stage == 3)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def whole_weights(accelerator: Accelerator, head: nn.Module) -> dict[str, Tensor]:
    """Return the head's state dict with whole tensors."""
    if uses_deepspeed(accelerator) and shards_weights(accelerator):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(head.parameters())):
            return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    return {name: whole(tensor) for name, tensor in head.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from its shards, or itself when it is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return a whole tensor laid out over the ranks as `pattern` is."""
    if not isinstance(pattern, DTensor):
        return tensor.to(pattern.device)
    return distribute_tensor(tensor.to(pattern.device), pattern.device_mesh, pattern.placements)


def whole_moments(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the state of all optimizers by parameter name, with whole tensors."""
    return dict(get_optimizer_state_dict(module, _plain(optimizers), options=WHOLE))


def load_moments(module: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Give prepared optimizers the state that `whole_moments` returned, sharded as this run shards."""
    set_optimizer_state_dict(module, _plain(optimizers), state, options=StateDictOptions(full_state_dict=True))


def save_deepspeed(wrapped: Any, folder: Path, *, step: int) -> None:
    """Save DeepSpeed's own state (moments, sharded) of a step beside the checkpoint of that step."""
    wrapped.save_checkpoint(str(folder / "deepspeed"), tag=f"step-{step:07d}")


def load_deepspeed(wrapped: Any, folder: Path, *, step: int) -> None:
    """Load what `save_deepspeed` saved."""
    path, _ = wrapped.load_checkpoint(str(folder / "deepspeed"), tag=f"step-{step:07d}")
    assert path is not None, f"DeepSpeed finds no state of step {step} in {folder / 'deepspeed'}"


def _plain(optimizers: list[Any]) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers behind accelerate's wrappers."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
