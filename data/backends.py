"""Backends: whoever continues a prompt with the target's own tokens.

One protocol, two of them: `BatchDecoder` (data/batch_decode.py) runs the target in this process, `OpenAIBackend`
(data/openai_backend.py) asks a server that does. Both are handed token ids and hand back token ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """One text to continue: `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """The generated ids (the stop token included) and why they ended: "stop" or "length".

    `exact` is false where the ids were encoded again from a text. A reply that cannot be used has no ids, the finish
    reason "dropped" and its `fault` in words.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: str
    exact: bool = True
    fault: str = ""


class Backend(Protocol):
    """Continues requests. Replies come as they finish, in no fixed order, one for every request."""

    def run(self, requests: list[Request]) -> Iterator[Reply]:
        """Yield the replies; raises UserError for requests that cannot be met, before any work where it can."""
        ...
