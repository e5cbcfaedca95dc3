"""Self-prompting: the target writes user turns from the bare chat prefix (Magpie, arXiv 2406.08464).

The prefix is everything the template renders up to where a user's text begins. A steering gives it a system prompt, so
that the turns are about something or in some language; the answers are written without it, as they are served.
"""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError

from eyas.data.answering import Progress, ReplyLog, answer_all
from eyas.data.backends import Backend, Request
from eyas.data.encode import ChatTemplate
from eyas.data.questions import ExactTexts, Question, WrittenPrompt, usable_prompts
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
    progress: Progress, group: int = 0,
) -> tuple[list[Question], dict[str, PromptCounts]]:  # fmt: skip
    """Return up to `wanted` distinct prompts, the categories evenly mixed, and the counts of every category.

    A third more than wanted are asked for, since some will be unusable. A prompt that does not end within `max_tokens`
    or renders longer than `longest` is unusable.
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
    seen = ExactTexts()
    kept: list[list[Question]] = []
    counts: dict[str, PromptCounts] = {}
    for steering, number in zip(steerings, numbers, strict=True):
        prompts = []
        for _ in range(number + number // 3):
            reply = next(replies)
            complete = reply.finish_reason == "stop"
            text = str(template.tokenizer.decode(list(reply.token_ids[:-1] if complete else reply.token_ids)))
            prompts.append(WrittenPrompt(reply.request.id, steering.category, text, complete))
        usable, dropped, duplicates = usable_prompts(template, prompts, longest=longest, repeats=seen.repeats)
        kept.append(usable[:number])
        counts[steering.category] = PromptCounts(number, len(prompts), len(kept[-1]), dropped, duplicates)
    return mixed(kept), counts


def mixed(lists: list[list[Question]]) -> list[Question]:
    """Return the questions of several lists evenly mixed, so that every stretch holds all in proportion."""
    places = [((n + 0.5) / len(one), c, n) for c, one in enumerate(lists) for n in range(len(one))]
    return [lists[c][n] for _, c, n in sorted(places)]


def user_stop_ids(template: ChatTemplate) -> frozenset[int]:
    """Return the special token that the template puts right after a user's text, where there is one."""
    marker = "\u241fEYAS\u241f"
    text = template.text([{"role": "user", "content": marker}], add_generation_prompt=True)
    after = template.tokenizer(text[text.index(marker) + len(marker) :], add_special_tokens=False).input_ids
    specials = set(template.tokenizer.all_special_ids) | set(template.tokenizer.added_tokens_decoder)
    return frozenset([token for token in after if token in specials][:1])


def _prefix(template: ChatTemplate, steering: Steering) -> tuple[int, ...]:
    try:
        return tuple(template.user_prefix(steering.system))
    except TemplateError as error:
        raise UserError(
            f"the chat template refuses the system prompt of steering {steering.category!r} ({error}); leave its "
            "system out."
        ) from None
