"""Batched decoding against transformers.generate: the same target, prompts, batch and number of tokens, in turns.

Both write exactly `new_tokens` behind every prompt (nothing stops a reply), so only the time differs. The two take
turns in one process; what counts is the ratio within a turn.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from eyas.data.backends import Request
from eyas.data.batch_decode import BatchDecoder
from eyas.data.styles import AnswerStyle
from eyas.models.target import Target


@dataclass(frozen=True)
class SpeedComparison:
    """Tokens per second of both, one number a turn; `same` rows of `rows` got the same tokens."""

    temperature: float
    top_p: float
    eyas: tuple[float, ...]
    transformers: tuple[float, ...]
    same: int
    rows: int

    @property
    def ratio(self) -> float:
        """How many times faster than transformers: the median over the turns."""
        return median(ours / theirs for ours, theirs in zip(self.eyas, self.transformers, strict=True))


def compare_speed(
    packed: Target, plain: Target, prompts: list[tuple[int, ...]], style: AnswerStyle, *, new_tokens: int, turns: int,
    progress: Callable[[int], None],
) -> SpeedComparison:  # fmt: skip
    """Return the speeds of decoding all prompts as one batch, `turns` times each, after one turn that is not counted.

    `packed` and `plain` are the same target; the first decodes with eyas, the second with transformers.generate.
    """
    longest = max(len(prompt) for prompt in prompts)
    decoder = BatchDecoder(packed, batch=len(prompts), capacity=longest + new_tokens)
    requests = [
        Request(str(n), prompt, new_tokens, frozenset(), style.temperature, style.top_k, style.top_p, seed=n)
        for n, prompt in enumerate(prompts)
    ]
    settings = _settings(style, new_tokens)
    ids_RT, mask_RT = _left_padded(prompts)
    ours, theirs = [], []
    same = 0
    for turn in range(turns + 1):
        started = time.perf_counter()
        replies = {int(reply.request.id): reply.token_ids for reply in decoder.run(requests)}
        between = time.perf_counter()
        written_RT = _generate(plain, ids_RT, mask_RT, settings)
        ended = time.perf_counter()
        assert all(len(reply) == new_tokens for reply in replies.values())
        assert written_RT.shape == (len(prompts), longest + new_tokens)
        same = sum(tuple(written_RT[n, longest:].tolist()) == reply for n, reply in replies.items())
        if turn:
            ours.append(len(prompts) * new_tokens / (between - started))
            theirs.append(len(prompts) * new_tokens / (ended - between))
        progress(turn + 1)
    return SpeedComparison(style.temperature, style.top_p, tuple(ours), tuple(theirs), same, len(prompts))


def _settings(style: AnswerStyle, new_tokens: int) -> GenerationConfig:
    length: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    if style.temperature == 0:
        return GenerationConfig(do_sample=False, **length)
    return GenerationConfig(
        do_sample=True, temperature=style.temperature, top_k=style.top_k, top_p=style.top_p, **length
    )


def _left_padded(prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids_RT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids_RT[row, longest - len(prompt) :] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids_RT, (torch.arange(longest) >= longest - lengths[:, None]).long()


@torch.inference_mode()
def _generate(target: Target, ids_RT: Tensor, mask_RT: Tensor, settings: GenerationConfig) -> Tensor:
    model: Any = target.model
    model.generation_config = settings  # the model's own would end replies and add settings of its own
    written: Tensor = model.generate(ids_RT.to(target.device), attention_mask=mask_RT.to(target.device))
    return written
