"""The target of the extract stage: in this process, or served by vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eyas.models.target import Target
from eyas.models.vllm_target import VllmTarget
from eyas.train.context import RunContext


@contextmanager
def extraction_target(context: RunContext) -> Iterator[Target]:
    """Yield the target that computes features as the recipe says; an engine is stopped at the end."""
    section = context.recipe.extract
    if section.backend == "hf":
        yield context.load_target(section.dtype, tapped=True)
        return
    assert section.vllm_python is not None
    context.reporter.say("  starting vLLM")
    target = VllmTarget(
        context.recipe.target.model,
        dtype=getattr(torch, section.dtype),
        aux_layers=context.aux_layers,
        python=section.vllm_python,
        max_length=context.recipe.train.line_length,
        tensor_parallel=section.vllm_tensor_parallel,
    )
    try:
        yield target
    finally:
        target.close()
