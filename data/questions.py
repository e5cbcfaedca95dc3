"""Questions: the conversations that the corpus answers, each with its split, none of them in two splits.

Of the prompts the target wrote, the complete and distinct ones are taken in order: first the held-out ones, then those
for validation, then the training ones. Given conversations are for training, but for a few kept for validation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from eyas.data.conversation import Conversation
from eyas.data.encode import ChatTemplate
from eyas.models.errors import UserError

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Question:
    """A conversation to answer. `turns` are the messages before each turn that the target writes.

    `prompt_ids` is the first prompt as served, `text` the message it ends with.
    """

    id: str
    source: str
    category: str
    split: str
    prompt_ids: tuple[int, ...]
    text: str
    turns: tuple[Messages, ...]


def turns_of(messages: Messages) -> tuple[Messages, ...]:
    """Return the messages before each assistant turn, the given assistant turns left out.

    An assistant turn that answers nobody (first of all, or behind system messages alone) and one right behind another
    are not turns of their own; what follows the last turn asks for one more if a user or a tool speaks.
    """
    turns: list[Messages] = []
    before: list[dict[str, Any]] = []
    for message in [*messages, {"role": "assistant"}]:
        if message["role"] != "assistant":
            before.append(message)
        elif before and before[-1]["role"] != "system":
            turns.append(tuple(before))
            before = []
    return tuple(turns)


def given_questions(
    template: ChatTemplate, conversations: list[Conversation], *, validation: int, longest: int, limits: str
) -> tuple[list[Question], dict[str, int]]:
    """Return the given conversations as questions, `validation` of them, evenly spread, kept from training.

    Those whose first prompt cannot be asked are left out and counted by reason. Raises UserError when none is left
    (naming the first, with `limits` in words), and for an id that is not a conversation's own.
    """
    questions: list[Question] = []
    dropped: dict[str, int] = {}
    first_fault = ""
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.id in seen or conversation.id.startswith("self-"):
            raise UserError(
                f"prompt id {conversation.id!r} is used twice or begins with 'self-', which the target's own prompts "
                "do; rename it."
            )
        seen.add(conversation.id)
        turns = turns_of(conversation.messages)
        ids: list[int] = []
        fault = "nothing to answer"
        if turns:
            try:
                ids = template.ids(list(turns[0]), add_generation_prompt=True)
                fault = "first prompt too long" if len(ids) > longest else ""
            except TemplateError:
                fault = "refused by the chat template"
        if fault:
            dropped[fault] = dropped.get(fault, 0) + 1
            says = f"is {len(ids)} tokens long, more than the {longest} that {limits} allow" if ids else f"has {fault}"
            first_fault = first_fault or f"prompt {conversation.id!r} {says}"
            continue
        text = str(turns[0][-1]["content"])
        questions.append(
            Question(conversation.id, conversation.source, conversation.category, "train", tuple(ids), text, turns)
        )
    if conversations and not questions:
        raise UserError(
            f"none of the {len(conversations)} given prompts can be asked; {first_fault}. Shorten them or change the "
            "limits."
        )
    check_validation(len(questions), validation)
    for number in range(validation):
        place = number * len(questions) // validation
        questions[place] = replace(questions[place], split="validation")
    return questions, dropped


def check_validation(given: int, validation: int) -> None:
    """Raise UserError unless `validation` of the `given` conversations leave some for training."""
    if validation and validation >= max(1, given):
        raise UserError(
            f"{given} given prompts are too few to keep {validation} for validation; give more prompts or lower "
            "synthesize.validation."
        )


@dataclass(frozen=True)
class WrittenPrompt:
    """A user turn the target wrote; `complete` when it ended by itself."""

    id: str
    category: str
    text: str
    complete: bool


def usable_prompts(
    template: ChatTemplate, prompts: list[WrittenPrompt], *, longest: int, repeats: Callable[[str], bool]
) -> tuple[list[Question], int, int]:
    """Return the complete, distinct prompts as questions, and the counts of unusable and of repeated ones."""
    kept: list[Question] = []
    dropped = duplicates = 0
    for prompt in prompts:
        # Its text is rendered again as served, without the system prompt that may have steered it.
        message = {"role": "user", "content": prompt.text}
        ids = template.ids([message], add_generation_prompt=True)
        if not prompt.complete or len(" ".join(prompt.text.split())) < 8 or len(ids) > longest:
            dropped += 1
        elif repeats(prompt.text):
            duplicates += 1
        else:
            kept.append(Question(prompt.id, "self", prompt.category, "train", tuple(ids), prompt.text, ((message,),)))
    return kept, dropped, duplicates


def split_prompts(kept: list[Question], heldout: int, held_back: int) -> list[Question]:
    """Return the target's own prompts: the first `heldout` held out, those up to `held_back` for validation."""
    splits = ["heldout" if n < heldout else "validation" if n < held_back else "train" for n in range(len(kept))]
    return [replace(question, split=split) for question, split in zip(kept, splits, strict=True)]


def without_leaks(questions: list[Question]) -> tuple[list[Question], int]:
    """Return the questions less the training ones that begin exactly as a held-back one, and how many those are."""
    held_back = {question.prompt_ids for question in questions if question.split != "train"}
    kept = [question for question in questions if question.split != "train" or question.prompt_ids not in held_back]
    return kept, len(questions) - len(kept)
