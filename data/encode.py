"""Token ids and the mask of what the target itself generated, on the template that is served.

For every assistant turn i the generated tokens are exactly
    render(messages[:i+1]) minus render(messages[:i], add_generation_prompt=True),
cut after its end-of-turn token. No regular expression, no second template. Where a template rewrites history (drops
earlier reasoning), a turn's prefix no longer leads into the full conversation: such turns are not marked, and counted.

Some templates write no token behind a reply; the target then ends it with the token that opens the next turn (GLM's
user token). There a turn that another one follows is marked up to and with that token, a last turn to its own end.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.data.conversation import Messages
from eyas.models.errors import UserError, nearest

MARKER = "\u241fEYAS\u241f"


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
        self._check_arguments()
        own = self._special_behind_reply(followed=False)
        end = self._special_behind_reply(followed=True) if own is None else own
        if end is None:
            raise UserError(
                "the chat template renders no special token after an assistant message, so replies would have no end; "
                "fix the template of the target's tokenizer."
            )
        self.end_of_turn = end
        self.ends_by_next_turn = own is None

    def text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Return the rendered text of messages; tool schemas are taken from the first one."""
        return str(
            self.tokenizer.apply_chat_template(
                [{key: value for key, value in message.items() if key != "tools"} for message in messages],
                tools=messages[0].get("tools") if messages else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.arguments,
            )
        )

    def ids(self, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
        """Return the token ids of rendered messages; the template's own special tokens, none added."""
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def user_prefix(self, system: str | None = None) -> list[int]:
        """Return the ids of the bare chat prefix: everything up to where a user's first message begins."""
        messages: Messages = [{"role": "system", "content": system}] if system else []
        text = self.text([*messages, {"role": "user", "content": MARKER}], add_generation_prompt=False)
        return self.tokenizer(self._parted(text, "user")[0], add_special_tokens=False).input_ids

    def _special_behind_reply(self, *, followed: bool) -> int | None:
        """Return the first special token rendered after a reply's content, None where there is none.

        `followed` by another user turn, the reply may lack a token of its own and the next turn's opener is returned.
        """
        turns: Messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": MARKER}]
        text = self.text([*turns, *turns[:1]] if followed else turns, add_generation_prompt=False)
        after = self.tokenizer(self._parted(text, "assistant")[1], add_special_tokens=False).input_ids
        specials = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return next((int(token) for token in after if token in specials), None)

    def _parted(self, text: str, role: str) -> tuple[str, str]:
        """Return what stands before and behind the marker; raises UserError when the template left it out."""
        before, found, behind = text.partition(MARKER)
        if not found:
            raise UserError(
                f"the chat template does not show the content of {role} messages, so nothing could be trained on them; "
                "fix the template of the target's tokenizer."
            )
        return before, behind

    def _check_arguments(self) -> None:
        """Raise UserError for an argument that stands nowhere in the template, which would do nothing, silently."""
        template = str(self.tokenizer.chat_template)
        known = sorted(set(re.findall(r"\w+", template)))
        for name in self.arguments:
            if name not in known:
                raise UserError(
                    f"the target's chat template does not read {name!r} of target.template_arguments; write it as the "
                    f"template does, or leave it out.{nearest(name, known)}"
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
        end = _end_of_reply(template, through, len(before), ids)
        if end is None or through[: len(before)] != before or ids[: min(end, len(through))] != through[:end]:
            rewritten += 1
            continue
        mask[len(before) : end] = [True] * (end - len(before))
        marked += 1
    example = TokenizedExample(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool))
    return example, EncodingReport(marked, rewritten)


def _end_of_reply(template: ChatTemplate, through: list[int], start: int, ids: list[int]) -> int | None:
    """Return the index just past the reply that begins at `start` and ends `through`, None when it has no end.

    It ends with its last end-of-turn token, as a reply may quote the token's text; everything a template adds behind it
    is not generated. Where the next turn's opener is the end, it is the token behind `through` in the whole row's ids.
    """
    if template.ends_by_next_turn:
        return len(through) + int(ids[len(through) : len(through) + 1] == [template.end_of_turn])
    for index in range(len(through) - 1, start - 1, -1):
        if through[index] == template.end_of_turn:
            return index + 1
    return None


def encode_reply(prompt_ids: list[int], reply_ids: list[int]) -> TokenizedExample:
    """Return the example of a reply whose exact token ids are known: every reply token is marked, none is added."""
    ids = torch.tensor(prompt_ids + reply_ids, dtype=torch.int64)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(prompt_ids) :] = True
    return TokenizedExample(ids, mask)
