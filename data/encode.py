"""Token ids and the mask of what the target itself generated, on the template that is served.

For every assistant turn i the generated tokens are exactly
    render(messages[:i+1]) minus render(messages[:i], add_generation_prompt=True),
cut after its end-of-turn token. No regular expression, no second template. Where a template rewrites history (drops
earlier reasoning), a turn's prefix no longer leads into the full conversation: such turns are not marked, and counted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.data.conversation import Messages
from eyas.models.errors import UserError


@dataclass(frozen=True)
class TokenizedExample:
    """input_ids_T (int64) and generated_mask_T (bool): true on tokens the target generates, end-of-turn included."""

    input_ids_T: Tensor
    generated_mask_T: Tensor

    def __post_init__(self) -> None:
        assert self.input_ids_T.shape == self.generated_mask_T.shape
        assert self.generated_mask_T.dtype == torch.bool

    def __len__(self) -> int:
        return len(self.input_ids_T)


class ChatTemplate:
    """The served chat template with the arguments of serving (for example enable_thinking=False)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.end_of_turn = self._find_end_of_turn()

    def text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Return the rendered text of messages."""
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self.arguments
            )
        )

    def ids(self, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
        """Return the token ids of rendered messages; the template's own special tokens, none added."""
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def user_prefix(self, system: str | None = None) -> list[int]:
        """Return the ids of the bare chat prefix: everything up to where a user's first message begins."""
        marker = "\u241fEYAS\u241f"
        messages: Messages = [{"role": "system", "content": system}] if system else []
        text = self.text([*messages, {"role": "user", "content": marker}], add_generation_prompt=False)
        return self.tokenizer(text[: text.index(marker)], add_special_tokens=False).input_ids

    def _find_end_of_turn(self) -> int:
        """Return the token that ends an assistant turn: the first special token rendered after its content."""
        marker = "\u241fEYAS\u241f"
        turns: Messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": marker}]
        text = self.text(turns, add_generation_prompt=False)
        after = self.tokenizer(text[text.index(marker) + len(marker) :], add_special_tokens=False).input_ids
        specials = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token in after:
            if token in specials:
                return int(token)
        raise UserError(
            "the chat template renders no special token after an assistant message, so replies would have no end; "
            "fix the template of the target's tokenizer."
        )


@dataclass(frozen=True)
class EncodingReport:
    """How many assistant turns were marked and how many the template had rewritten (left unmarked)."""

    marked_turns: int
    rewritten_turns: int


def encode_conversation(template: ChatTemplate, messages: Messages) -> tuple[TokenizedExample, EncodingReport]:
    """Return the ids of a whole conversation with the generated tokens of every assistant turn marked."""
    ids = template.ids(messages, add_generation_prompt=False)
    mask = [False] * len(ids)
    marked = rewritten = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.ids(messages[:i], add_generation_prompt=True)
        through = template.ids(messages[: i + 1], add_generation_prompt=False)
        end = _end_of_turn_after(through, start=len(before), token=template.end_of_turn)
        if end is None or through[: len(before)] != before or ids[:end] != through[:end]:
            rewritten += 1
            continue
        mask[len(before) : end] = [True] * (end - len(before))
        marked += 1
    example = TokenizedExample(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool))
    return example, EncodingReport(marked, rewritten)


def _end_of_turn_after(ids: list[int], *, start: int, token: int) -> int | None:
    """Return the index just past the last end-of-turn token at or after `start`, None when there is none.

    The last one, because a reply may quote the token's text; everything a template adds behind it is not generated.
    """
    for index in range(len(ids) - 1, start - 1, -1):
        if ids[index] == token:
            return index + 1
    return None


def encode_reply(prompt_ids: list[int], reply_ids: list[int]) -> TokenizedExample:
    """Return the example of a reply whose exact token ids are known: every reply token is marked, none is added."""
    ids = torch.tensor(prompt_ids + reply_ids, dtype=torch.int64)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(prompt_ids) :] = True
    return TokenizedExample(ids, mask)
