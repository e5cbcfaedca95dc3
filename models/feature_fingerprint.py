"""A small sample of a target's own states on one fixed prompt: enough to tell whether a head meets the states it knows.

A head is trained on one target's features. A fine-tune, a rotated or a coarsely quantised copy has the same shape and
tokenizer and loads without a word, and acceptance falls; comparing a few hundred numbers finds it in one forward.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.models.errors import UserError
from eyas.models.target import Target

TEXT = (
    "A river rises in the hills, gathers 17 streams, and reaches the sea after 240 kilometres. Write a function that "
    "adds two numbers, then say in one sentence why the sky looks blue at noon and red at dusk."
)
MAX_TOKENS = 64
SKIPPED = 4  # the first tokens carry attention sinks, states far larger than all others
SAMPLES = 128
TOLERANCE = 0.1  # relative; bf16 against fp32 is about 0.01, a rotation of the states about 1.4


def fixed_prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of the fixed text, without special tokens."""
    ids: list[int] = tokenizer(TEXT, add_special_tokens=False).input_ids
    return ids[:MAX_TOKENS]


def feature_fingerprint(target: Target, prompt_ids: list[int]) -> dict[str, Any]:
    """Return sampled aux states (pre-norm) per layer and final states (post-norm) of the prompt."""
    blocks = _blocks(target, prompt_ids)
    values = {name: [float(f"{value:.5g}") for value in block.tolist()] for name, block in blocks.items()}
    return {"prompt_ids": prompt_ids, "dtype": str(target.dtype).removeprefix("torch."), "values": values}


def feature_distances(fingerprint: dict[str, Any], target: Target) -> dict[str, float]:
    """Return, per block of a fingerprint, how far this target's states are off: |a - b| / |a|.

    Raises UserError when the prompt's tokens do not exist in this target.
    """
    ids = fingerprint["prompt_ids"]
    if max(ids) >= target.vocab_size:
        raise UserError(f"the fingerprint's prompt has token {max(ids)}, this target has {target.vocab_size} tokens.")
    here = _blocks(target, ids)
    distances = {}
    for name, values in fingerprint["values"].items():
        there = torch.tensor(values)
        found = here.get(name)
        same = found is not None and found.shape == there.shape
        distances[name] = float((found - there).norm() / there.norm()) if same else float("inf")  # type: ignore[operator]
    return distances


def _blocks(target: Target, prompt_ids: list[int]) -> dict[str, Tensor]:
    out = target.forward(torch.tensor([prompt_ids], device=target.device))
    states = dict(zip((f"aux {k}" for k in target.aux_layers), _chunks(target, out.aux_hidden_BTF), strict=True))
    return {name: _sample(block[0]) for name, block in {**states, "final": out.final_hidden_BTD}.items()}


def _chunks(target: Target, aux_hidden_BTF: Tensor) -> tuple[Tensor, ...]:
    return aux_hidden_BTF.chunk(len(target.aux_layers), dim=-1) if target.aux_layers else ()


def _sample(states_TD: Tensor) -> Tensor:
    flat = states_TD[min(SKIPPED, len(states_TD) - 1) :].float().flatten().cpu()
    return flat[torch.linspace(0, len(flat) - 1, min(SAMPLES, len(flat))).long()]
