"""CUDA graphs of a round's stages: recorded once, replayed every round; plain launches wherever they cannot be.

A stage can be recorded if it never waits for the device. That is tried first, with torch's own alarm for such waits: a
target that waits (experts that count their tokens on the host, RoPE that grows with the text) is launched plainly, with
one notice, and says the same.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Stage = Callable[[], None]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise RuntimeError wherever the host waits for a CUDA device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(stages: Sequence[Stage], kept: Sequence[Tensor], *, device: torch.device) -> tuple[Stage, ...]:
    """Return the stages as replays of CUDA graphs, or as they are where the device or the target allows none.

    Stages exchange data through tensors of their own that live as long as they do. `kept` are those that a stage both
    reads and writes: they are as they were afterwards.
    """
    if device.type != "cuda":
        return tuple(stages)
    saved = [tensor.clone() for tensor in kept]
    try:
        with torch.cuda.device(device):
            _warm_up(stages, kept, saved)
            replays = _record(stages)
    except RuntimeError as error:
        warnings.warn(f"rounds are launched without CUDA graphs: {error}", stacklevel=2)
        replays = tuple(stages)
    for tensor, value in zip(kept, saved, strict=True):
        tensor.copy_(value)
    return replays


def _warm_up(stages: Sequence[Stage], kept: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Run the stages beside the current stream: kernels are compiled, libraries set up, and waits found out."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for stage in stages:
            stage()
        for tensor, value in zip(kept, saved, strict=True):
            tensor.copy_(value)
        with no_waiting():
            for stage in stages:
                stage()
        for tensor, value in zip(kept, saved, strict=True):
            tensor.copy_(value)
    torch.cuda.current_stream().wait_stream(side)


def _record(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    # One pool for all: they are replayed one after the other, and what passes between them lies outside it.
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for stage in stages:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            stage()
        graphs.append(graph)
    return tuple(graph.replay for graph in graphs)
