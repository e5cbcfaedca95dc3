"""Supervised tokens made visible: a row as text spans, and the check that some tokens are trained and some are not.

Where nobody has answered yet, a stand-in reply takes the answer's place: which tokens are trained depends on where the
reply stands, not on what it says.
"""

from dataclasses import dataclass
from itertools import groupby

from eyas.data.conversation import Conversation, Messages, is_unwritten
from eyas.data.encode import ChatTemplate, TokenizedExample, encode_conversation, encode_reply
from eyas.models.errors import CheckFailed

STAND_IN = "(the target's reply)"
OPEN, CLOSE = "\u27e6", "\u27e7"
SHARE = (0.05, 0.95)  # outside of it a corpus is worth a look
EXAMPLE = Conversation(
    "example",
    "example",
    "built-in",
    (
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "6."},
    ),
)


@dataclass(frozen=True)
class Span:
    """A run of tokens that are all supervised or all not, as text."""

    text: str
    supervised: bool
    tokens: int


@dataclass(frozen=True)
class ShownRow:
    """One training row to look at; `rewritten_turns` of its replies are not trained in it."""

    id: str
    source: str
    category: str
    spans: tuple[Span, ...]
    rewritten_turns: int = 0

    @property
    def tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def supervised_tokens(self) -> int:
        return sum(span.tokens for span in self.spans if span.supervised)

    @property
    def marked_text(self) -> str:
        """The row as text, its supervised spans in brackets."""
        return "".join(f"{OPEN}{span.text}{CLOSE}" if span.supervised else span.text for span in self.spans)


def spans_of(template: ChatTemplate, example: TokenizedExample) -> tuple[Span, ...]:
    """Return a row's spans in order, special tokens spelt out."""
    pairs = zip(example.input_ids_T.tolist(), example.generated_mask_T.tolist(), strict=True)
    spans = []
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        spans.append(Span(str(template.tokenizer.decode(ids)), supervised, len(ids)))
    return tuple(spans)


def show_conversation(template: ChatTemplate, conversation: Conversation) -> ShownRow:
    """Return a given conversation as it would be trained, with stand-in replies where there are none.

    Where the template shows no reply as it was served (its generation prompt opens a think block that the history
    drops), the last one is shown behind its served prompt, as synthesis will store it.
    """
    messages = _answered(list(conversation.messages))
    example, report = encode_conversation(template, messages)
    if not example.generated_mask_T.any():
        reply_ids = template.tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids
        prompt_ids = template.ids(messages[:-1], add_generation_prompt=True)
        example = encode_reply(prompt_ids, [*reply_ids, template.end_of_turn])
    spans = spans_of(template, example)
    return ShownRow(conversation.id, conversation.source, conversation.category, spans, report.rewritten_turns)


def check_supervision(rows: list[ShownRow]) -> None:
    """Raise CheckFailed, with one row decoded, when no row has a supervised token or every row has nothing else."""
    supervised, tokens = sum(row.supervised_tokens for row in rows), sum(row.tokens for row in rows)
    if 0 < supervised < tokens or not rows:
        return
    row = rows[0]
    what = "not one token is" if not supervised else "every token is"
    raise CheckFailed(
        f"{what} supervised in the {len(rows)} rows looked at: the target's chat template does not tell prompts from "
        f"replies. Row {row.id!r}, supervised spans in {OPEN} {CLOSE}:\n{row.marked_text}\nMend the template of the "
        "target's tokenizer, or target.template_arguments."
    )


def _answered(messages: Messages) -> Messages:
    answered = [{**message, "content": STAND_IN} if is_unwritten(message) else message for message in messages]
    waiting = answered[-1]["role"] != "assistant"
    return [*answered, {"role": "assistant", "content": STAND_IN}] if waiting else answered
