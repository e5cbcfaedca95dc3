"""Self-prompting: the target writes user turns from the bare chat prefix (Magpie, arXiv 2406.08464).

The prefix is everything the template renders up to where a user's text begins. A steering gives it a system prompt, so
that the turns are about something or in some language; the answers are written without it, as they are served.
"""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError

from eyas.data.answering import Progress, ReplyLog, answer_all
from eyas.data.backends import Backend, Reply, Request
from eyas.data.dedup import TextRepeats
from eyas.data.encode import MARKER, ChatTemplate
from eyas.data.questions import Question, WrittenPrompt, usable_prompts
from eyas.data.ranks import Ranks
from eyas.data.styles import AnswerStyle, seed_of
from eyas.models.errors import UserError


@dataclass(frozen=True)
class Steering:
    """A kind of prompt to write: its category, the system prompt that asks for it (or none), its share of all."""

    category: str
    system: str | None
    share: float


@dataclass(frozen=True)
class PromptCounts:
    """What became of one category: `kept` of `asked` prompts, the others unusable (`dropped`) or said before."""

    wanted: int
    asked: int
    kept: int
    dropped: int
    duplicates: int


def quotas(total: int, shares: list[float]) -> list[int]:
    """Return how many of `total` each share gets; they add up to `total` (largest remainders)."""
    exact = [total * share / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def write_prompts(
    backend: Backend, template: ChatTemplate, steerings: tuple[Steering, ...], style: AnswerStyle, *, wanted: int,
    max_tokens: int, longest: int, stop_ids: frozenset[int], seed: int, folder: Path, rows_per_part: int, ranks: Ranks,
    progress: Progress, repeats: TextRepeats, group: int = 0,
) -> tuple[list[Question], dict[str, PromptCounts]]:  # fmt: skip
    """Return up to `wanted` distinct prompts, the categories evenly mixed, and the counts of every category.

    A third more than wanted are asked for, since some will be unusable. A prompt that does not end within `max_tokens`
    or renders longer than `longest` is unusable; one that `repeats` another or stands in an evaluation set is dropped.
    """
    numbers = quotas(wanted, [steering.share for steering in steerings])
    ends = stop_ids | user_stop_ids(template)
    requests: list[Request] = []
    for steering, number in zip(steerings, numbers, strict=True):
        prefix = _prefix(template, steering)
        stem = "self" if steering.category == "self" else f"self-{steering.category}"
        for n in range(number + number // 3):
            name = f"{stem}-{n:06d}"
            requests.append(
                Request(
                    name, prefix, max_tokens, ends, style.temperature, style.top_k, style.top_p, seed_of(seed, name)
                )
            )
    log = ReplyLog(folder, rows_per_part=rows_per_part, rank=ranks.rank)
    replies = iter(answer_all(backend, requests, log, ranks, group=group, phase="writing prompts", progress=progress))
    ending = user_ending(template)
    kept: list[list[Question]] = []
    counts: dict[str, PromptCounts] = {}
    for steering, number in zip(steerings, numbers, strict=True):
        prompts = []
        for _ in range(number + number // 3):
            prompts.append(_written(template, next(replies), steering.category, ending))
        usable, dropped, duplicates = usable_prompts(template, prompts, longest=longest, repeats=repeats.repeats)
        kept.append(usable[:number])
        counts[steering.category] = PromptCounts(number, len(prompts), len(kept[-1]), dropped, duplicates)
    return mixed(kept), counts


def mixed(lists: list[list[Question]]) -> list[Question]:
    """Return the questions of several lists evenly mixed, so that every stretch holds all in proportion."""
    places = [((n + 0.5) / len(one), c, n) for c, one in enumerate(lists) for n in range(len(one))]
    return [lists[c][n] for _, c, n in sorted(places)]


def user_stop_ids(template: ChatTemplate) -> frozenset[int]:
    """Return the special token that the template puts right after a user's text, where there is one."""
    after = template.tokenizer(_behind_user(template), add_special_tokens=False).input_ids
    specials = set(template.tokenizer.all_special_ids) | set(template.tokenizer.added_tokens_decoder)
    return frozenset([token for token in after if token in specials][:1])


def user_ending(template: ChatTemplate) -> str:
    """Return the plain text that ends a user's turn in a template without a special token there, else ""."""
    lines = _behind_user(template).strip().splitlines()
    return lines[0].strip() if lines and not user_stop_ids(template) else ""


def _behind_user(template: ChatTemplate) -> str:
    """Return what the template renders behind a user's last text, the header of the reply included."""
    text = template.text([{"role": "user", "content": MARKER}], add_generation_prompt=True)
    return text[text.index(MARKER) + len(MARKER) :]


def _written(template: ChatTemplate, reply: Reply, category: str, ending: str) -> WrittenPrompt:
    """Return the prompt that a reply holds, up to the token or the plain text that ends a user's turn."""
    complete = reply.finish_reason == "stop"
    text = str(template.tokenizer.decode(list(reply.token_ids[:-1] if complete else reply.token_ids)))
    if ending and ending in text:
        text, complete = text[: text.index(ending)].rstrip(), True
    return WrittenPrompt(reply.request.id, category, text, complete)


def _prefix(template: ChatTemplate, steering: Steering) -> tuple[int, ...]:
    try:
        return tuple(template.user_prefix(steering.system))
    except TemplateError as error:
        raise UserError(
            f"the chat template refuses the system prompt of steering {steering.category!r} ({error}); leave its "
            "system out."
        ) from None
