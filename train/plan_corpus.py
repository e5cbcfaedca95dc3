"""How many rows and tokens a recipe makes: counted in the finished corpus, else bounded by the recipe's limits."""

from dataclasses import dataclass
from pathlib import Path

from eyas.data.corpus import load_corpus
from eyas.data.synthesize import validation_shares
from eyas.train.context import RunContext
from eyas.train.recipe import AnswerStyleSection, Recipe


@dataclass(frozen=True)
class CorpusCounts:
    """Rows and tokens. `stored_*` leave out the held-out rows, whose features nobody stores.

    `exact` says that they were counted in the corpus; otherwise every self-written prompt counts as usable and as long
    as it may get, and every reply as `plan.reply_tokens` or the limit.
    """

    rows: int
    prompt_tokens: int
    reply_tokens: int
    stored_rows: int
    stored_prompt_tokens: int
    stored_reply_tokens: int
    validation_rows: int
    self_prompts_asked: int
    longest_row: int
    exact: bool

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens

    @property
    def stored_tokens(self) -> int:
        return self.stored_prompt_tokens + self.stored_reply_tokens


@dataclass(frozen=True)
class PromptLengths:
    """Tokens of every given prompt as served, and of the bare chat frame around an empty user turn."""

    given: tuple[int, ...]
    frame: int


def prompt_lengths(context: RunContext) -> PromptLengths:
    """Return the lengths of a recipe's given prompts on its target's chat template."""
    template = context.template
    prompts = [conversation.prompt() for conversation in context.given.conversations]
    given = (template.ids(list(prompt.messages), add_generation_prompt=True) for prompt in prompts)
    frame = template.ids([{"role": "user", "content": ""}], add_generation_prompt=True)
    return PromptLengths(tuple(map(len, given)), len(frame))


def lengths_in(context: RunContext, folder: Path) -> PromptLengths:
    """Return the same of a finished corpus, its given conversations up to their first reply."""
    rows = load_corpus(folder / "corpus.jsonl")
    frame = context.template.ids([{"role": "user", "content": ""}], add_generation_prompt=True)
    return PromptLengths(tuple(len(row.prompt_ids) for row in rows if row.source != "self"), len(frame))


def count_finished(folder: Path) -> CorpusCounts:
    """Return the counts of a finished corpus."""
    rows = load_corpus(folder / "corpus.jsonl")
    stored = [row for row in rows if row.split != "heldout"]
    return CorpusCounts(
        rows=len(rows),
        prompt_tokens=sum(len(row.input_ids) - len(row.reply_ids) for row in rows),
        reply_tokens=sum(len(row.reply_ids) for row in rows),
        stored_rows=len(stored),
        stored_prompt_tokens=sum(len(row.input_ids) - len(row.reply_ids) for row in stored),
        stored_reply_tokens=sum(len(row.reply_ids) for row in stored),
        validation_rows=sum(row.split == "validation" for row in rows),
        self_prompts_asked=sum(1 for part in (folder / "prompts").glob("*.jsonl") for _ in part.open("rb")),
        longest_row=max(len(row.input_ids) for row in stored),
        exact=True,
    )


def _answers_each(styles: tuple[AnswerStyleSection, ...]) -> int:
    """Return how often a prompt is answered: once where the styles have shares, else once in each of them."""
    return 1 if any(style.share is not None for style in styles) else len(styles)


def count_allowed(recipe: Recipe, lengths: PromptLengths) -> CorpusCounts:
    """Return the counts that a recipe's limits allow; raises UserError where it asks for the impossible."""
    section, given = recipe.synthesize, len(lengths.given)
    of_self, of_given = validation_shares(validation=section.validation, self_prompts=section.self_prompts, given=given)
    written = min(lengths.frame + section.self_prompt_tokens, section.max_prompt_tokens)
    replies = recipe.plan.reply_tokens or section.max_reply_tokens
    given_rows = (given - of_given) * _answers_each(section.answers) + of_given
    self_rows = section.self_prompts * _answers_each(section.self_answers) + of_self
    stored = given_rows + self_rows
    mean_given = sum(lengths.given) / max(1, given)
    stored_prompts = round(given_rows * mean_given) + self_rows * written
    wanted = section.self_heldout + section.self_prompts + of_self
    longest = max([*lengths.given, written if self_rows else 0]) + section.max_reply_tokens
    return CorpusCounts(
        rows=stored + section.self_heldout,
        prompt_tokens=stored_prompts + section.self_heldout * written,
        reply_tokens=(stored + section.self_heldout) * replies,
        stored_rows=stored,
        stored_prompt_tokens=stored_prompts,
        stored_reply_tokens=stored * replies,
        validation_rows=of_self + of_given,
        self_prompts_asked=wanted + wanted // 3,
        longest_row=longest,
        exact=False,
    )
