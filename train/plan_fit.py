"""Smaller settings of a recipe that fit a limit: one change alone where that is enough, else several together."""

from collections.abc import Callable
from typing import Any, get_args

from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig
from eyas.models.size import DTYPE_BYTES
from eyas.train.plan_facts import Facts, facts_with
from eyas.train.recipe import ExtractSection, Recipe
from eyas.train.recipe_io import parse_recipe

Excess = Callable[[Facts], int]  # bytes over the limits, 0 when all fits
Change = tuple[str, Any]  # a recipe key and its value


def _halves(value: int, *, least: int) -> list[int]:
    """Return value / 2, / 4, ... down to `least`."""
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _smaller_states(facts: Facts) -> list[str]:
    """Return the store's dtypes that are smaller than the recipe's, the largest of them first."""
    allowed: tuple[str, ...] = get_args(ExtractSection.model_fields["state_dtype"].annotation)
    size = DTYPE_BYTES[facts.recipe.extract.state_dtype]
    smaller = [name for name in allowed if DTYPE_BYTES[name] < size]
    return sorted(smaller, key=lambda name: -DTYPE_BYTES[name])


def _half_precision(dtype: str) -> list[str]:
    return ["bfloat16"] if dtype == "float32" else []


def _longest(facts: Facts) -> int:
    return facts.recipe.synthesize.max_prompt_tokens + facts.recipe.synthesize.max_reply_tokens


def _smaller_vocabularies(config: HeadConfig) -> list[int]:
    return _halves(config.draft_vocab_size, least=1024) if config.kind == "eagle3" else []


# Those that cost the least quality first.
KNOBS: dict[str, Callable[[Facts], list[Any]]] = {
    "synthesize.batch": lambda f: _halves(f.recipe.synthesize.batch, least=1),
    "extract.tokens_per_batch": lambda f: _halves(f.recipe.extract.tokens_per_batch, least=64),
    "extract.rows_per_shard": lambda f: _halves(f.recipe.extract.rows_per_shard, least=1),
    "train.lines_per_batch": lambda f: _halves(f.recipe.train.lines_per_batch, least=1),
    "train.line_length": lambda f: [*_halves(f.recipe.train.line_length, least=_longest(f) + 1), _longest(f)],
    "extract.state_dtype": _smaller_states,
    "synthesize.dtype": lambda f: _half_precision(f.recipe.synthesize.dtype),
    "extract.dtype": lambda f: _half_precision(f.recipe.extract.dtype),
    "evaluate.dtype": lambda f: _half_precision(f.recipe.evaluate.dtype),
    "head.draft_vocab_size": lambda f: _smaller_vocabularies(f.head_config),
    "train.ttt_steps": lambda f: list(range(f.recipe.train.ttt_steps - 1, 0, -1)),
    "synthesize.self_prompts": lambda f: _halves(f.recipe.synthesize.self_prompts, least=1),
    "synthesize.max_reply_tokens": lambda f: _halves(f.recipe.synthesize.max_reply_tokens, least=32),
    "synthesize.max_prompt_tokens": lambda f: _halves(f.recipe.synthesize.max_prompt_tokens, least=32),
}


def with_changes(recipe: Recipe, changes: list[Change]) -> Recipe:
    """Return a recipe with some values changed; raises UserError when it is not valid then."""
    fields = recipe.model_dump(mode="json")
    for key, value in changes:
        section, _, name = key.partition(".")
        fields[section][name] = value
    return parse_recipe(fields, where=recipe.name)


def settings_that_fit(facts: Facts, excess: Excess, *, most: int = 3) -> list[list[Change]]:
    """Return up to `most` single changes that make everything fit, or else one list of changes that do together.

    Empty when no smaller setting fits.
    """
    single = []
    for key, values in KNOBS.items():
        for value in values(facts):
            if _excess_with(facts, [(key, value)], excess) == 0:
                single.append([(key, value)])
                break
    if single:
        return single[:most]
    if _excess_with(facts, _least(facts), excess):
        return []
    together = _together(facts, excess)
    return [together] if together else []


def _least(facts: Facts) -> list[Change]:
    """Return the smallest value of every knob; the longest row first, on which the length of a line depends."""
    changes: list[Change] = []
    for key in reversed(KNOBS):
        if values := KNOBS[key](facts_with(facts, with_changes(facts.recipe, changes))):
            changes.append((key, values[-1]))
    return changes


def _together(facts: Facts, excess: Excess) -> list[Change]:
    """Return changes that fit together: step by step the one smaller value that helps most; empty when none is left."""
    changes: dict[str, Any] = {}
    left = excess(facts)
    while left:
        current = facts_with(facts, with_changes(facts.recipe, list(changes.items())))
        steps = [(key, values[0]) for key, find in KNOBS.items() if (values := find(current))]
        outcomes = {
            (key, value): over
            for key, value in steps
            if (over := _excess_with(facts, list({**changes, key: value}.items()), excess)) is not None
        }
        if not outcomes or min(outcomes.values()) >= left:
            return []
        best = min(outcomes, key=lambda change: outcomes[change])
        changes[best[0]], left = best[1], outcomes[best]
    return list(changes.items())


def _excess_with(facts: Facts, changes: list[Change], excess: Excess) -> int | None:
    """Return the bytes over the limits after some changes, None where the changed recipe is not valid."""
    try:
        return excess(facts_with(facts, with_changes(facts.recipe, changes)))
    except UserError:
        return None
