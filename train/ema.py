"""An exponential moving average of the trained weights, which is what is validated and kept when it is on.

The decay is warmed up, min(decay, (1 + t) / (10 + t)) after t updates, so the random start is forgotten.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eyas.train.sharding import sharded_like, whole


class WeightAverage:
    """The average of a module's trainable weights, in fp32 on their device (and sharded as they are)."""

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        assert 0.0 < decay < 1.0
        self.decay = decay
        self.updates = 0
        self.average = {name: p.detach().clone() for name, p in _trained(module).items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's present weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, parameter in _trained(module).items():
            self.average[name].lerp_(parameter.detach(), 1.0 - decay)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Give the module the averaged weights for the duration of the block."""
        own = {name: p.detach().clone() for name, p in _trained(module).items()}
        _copy(self.average, module)
        try:
            yield
        finally:
            _copy(own, module)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Return the average, whole where it is sharded, and the number of updates."""
        return {"updates": self.updates, **{f"average.{name}": whole(tensor) for name, tensor in self.average.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Take over what `state_dict` returned."""
        self.updates = int(state["updates"])
        for name, tensor in self.average.items():
            saved = state[f"average.{name}"]
            assert isinstance(saved, Tensor)
            tensor.copy_(sharded_like(saved, tensor))


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def _copy(weights: dict[str, Tensor], module: nn.Module) -> None:
    for name, parameter in _trained(module).items():
        parameter.copy_(weights[name])
