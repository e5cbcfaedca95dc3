"""Questions: the prompts that the corpus answers, each with its split, none of them in two splits.

Of the prompts the target wrote, the complete and distinct ones are taken in order: first the held-out ones, then those
for validation, then the training ones. Given prompts are for training, but for a few that are kept for validation.
"""

from dataclasses import dataclass, replace

from eyas.data.conversation import Prompt
from eyas.data.corpus import CorpusRow
from eyas.data.encode import ChatTemplate


@dataclass(frozen=True)
class Question:
    """One prompt as served, waiting for its replies."""

    id: str
    source: str
    category: str
    split: str
    prompt_ids: tuple[int, ...]
    text: str


def given_questions(template: ChatTemplate, prompts: list[Prompt], *, validation: int) -> list[Question]:
    """Return the given prompts as served, `validation` of them, evenly spread, kept from training."""
    chosen = {number * len(prompts) // validation for number in range(validation)}
    return [
        Question(
            prompt.id, "given", prompt.category, "validation" if number in chosen else "train",
            tuple(template.ids(list(prompt.messages), add_generation_prompt=True)), prompt.messages[-1]["content"],
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


def usable_prompts(
    template: ChatTemplate, rows: list[CorpusRow], *, wanted: int, longest: int
) -> tuple[list[Question], int, int]:
    """Return the first `wanted` complete, distinct prompts, and the counts of unusable and of repeated ones."""
    kept: list[Question] = []
    seen: set[str] = set()
    dropped = duplicates = 0
    for row in rows:
        text = " ".join(row.reply_text.split())
        # A user turn the target wrote ends with its end-of-turn token; its text is rendered again as served.
        ids = template.ids([{"role": "user", "content": row.reply_text}], add_generation_prompt=True)
        if row.finish_reason != "stop" or len(text) < 8 or len(ids) > longest:
            dropped += 1
        elif text.lower() in seen:
            duplicates += 1
        else:
            seen.add(text.lower())
            kept.append(Question(row.id, "self", "self", "train", tuple(ids), row.reply_text))
    return kept[:wanted], dropped, duplicates


def split_prompts(kept: list[Question], heldout: int, held_back: int) -> list[Question]:
    """Return the target's own prompts: the first `heldout` held out, those up to `held_back` for validation."""
    splits = ["heldout" if n < heldout else "validation" if n < held_back else "train" for n in range(len(kept))]
    return [replace(question, split=split) for question, split in zip(kept, splits, strict=True)]


def without_leaks(questions: list[Question]) -> tuple[list[Question], int]:
    """Return the questions less the training ones that read exactly as a held-back one, and how many those are."""
    held_back = {question.prompt_ids for question in questions if question.split != "train"}
    kept = [question for question in questions if question.split != "train" or question.prompt_ids not in held_back]
    return kept, len(questions) - len(kept)
