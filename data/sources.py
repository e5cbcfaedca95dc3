"""Prompt sources: files and datasets in any usual form, read row by row into conversations, with a table of every row.

The order of work: each source is read and checked (`row_checks.py`), then repeats and evaluation prompts are dropped
over all sources in the order of the recipe (`dedup.py`), then the rest is mixed by weight. Row ids are a row's own
id or its place in its source, the same in every run.

`weight` is the share of the conversations drawn from a source, relative to the sum of all weights. The mix is as large
as the smallest source allows for its share: that source is used whole, of the others the rest stays unused and is
counted. Nothing is repeated. Which rows are drawn depends on the seed and their ids alone.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice

from jinja2 import TemplateError

from eyas.data.conversation import Conversation, Prompt
from eyas.data.dedup import DedupPlan, OverlapFinder, RepeatFinder
from eyas.data.encode import ChatTemplate
from eyas.data.prompt_source import PROBE_ROWS, PromptSource, Say
from eyas.data.questions import turns_of
from eyas.data.row_checks import REASONS, BadRow, check_messages, mended
from eyas.data.row_files import RawRow
from eyas.data.row_table import SEVERAL, RowTable, RowTally
from eyas.data.schema import SCHEMAS, row_tools
from eyas.data.template_text import TemplateText
from eyas.models.errors import CheckFailed, UserError

ID_COLUMNS = ("id", "conversation_id", "prompt_id", "question_id", "uuid")
SELF_WRITTEN = "self-"  # ids of the prompts that the target writes begin so
Progress = Callable[[str, int, int, int], None]


@dataclass(frozen=True)
class ReadPlan:
    """How rows are read: `strict` stops at the first bad row, else up to `max_drop_share` of a source may be dropped.

    With a template every prompt is rendered as it will be served and may have `max_tokens` tokens. `evaluation` holds
    the texts of the evaluation prompts that no prompt may share a run of words with.
    """

    strict: bool = False
    max_drop_share: float = 0.1
    template: ChatTemplate | None = None
    max_tokens: int | None = None
    dedup: DedupPlan = field(default_factory=DedupPlan)
    evaluation: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class SourcesReport:
    """The conversations that may be used, and the table of all rows read."""

    conversations: list[Conversation]
    table: RowTable


class RowsRefused(CheckFailed):
    """Rows are bad beyond what the recipe allows; `table` counts what was read until then."""

    def __init__(self, message: str, table: RowTable) -> None:
        super().__init__(message)
        self.table = table


@dataclass
class _Reading:
    """One source while it is read: its tally, and the conversations with their places in it."""

    source: PromptSource
    tally: RowTally
    found: list[tuple[int, Conversation]] = field(default_factory=list)


def read_sources(
    sources: list[PromptSource], plan: ReadPlan, *, say: Say = lambda line: None, progress: Progress | None = None
) -> SourcesReport:
    """Return the conversations of all sources; raises RowsRefused for bad rows, UserError for what cannot be read."""
    names = [source.name for source in sources]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UserError(f"prompt source {repeated!r} is given twice; give each once, with a weight for its share.")
    readings: list[_Reading] = []
    taken: set[str] = set()
    for source in sources:
        readings.append(_Reading(source, RowTally(source.name)))
        _read(readings[-1], plan, taken, say, readings)
    if not plan.strict:
        _check_shares(readings, plan)
    _drop_repeats(readings, plan, progress)
    _mix(readings, plan.seed, say)
    table = _table(readings)
    conversations = [conversation for reading in readings for _, conversation in reading.found]
    assert len(conversations) == sum(rows.used for rows in table.sources)
    return SourcesReport(conversations, table)


def read_prompts(name: str) -> list[Prompt]:
    """Return the prompts of an evaluation set: a file or a bundled set, every row good and every id its own.

    Raises UserError naming the row.
    """
    try:
        plan = ReadPlan(strict=True, dedup=DedupPlan(exact=False, near=0, overlap_words=0))
        report = read_sources([PromptSource(path=name)], plan)
    except RowsRefused as error:
        raise UserError(str(error)) from None
    repeated = sum(count for rows in report.table.sources for key, count in rows.repaired.items() if "repeated" in key)
    if repeated:
        raise UserError(f"prompt file {name!r} repeats {repeated} ids; ids must be unique (or left out).")
    return [conversation.prompt() for conversation in report.conversations]


def _read(reading: _Reading, plan: ReadPlan, taken: set[str], say: Say, readings: list[_Reading]) -> None:
    source, tally = reading.source, reading.tally
    rows = source.rows()
    first = list(islice(rows, PROBE_ROWS))
    tally.schema = source.find_schema(first, say=say)
    if tally.schema == "text" and plan.template is None:
        raise UserError(f"{source.name!r} has preformatted text: only the target's template can split it.")
    splitter = TemplateText(plan.template) if tally.schema == "text" and plan.template else None
    for row in chain(first, rows):
        try:
            conversation, repairs = _checked(row, source, tally.schema, splitter, plan, taken)
            place = tally.add("repaired" if repairs else "kept", SEVERAL.join(repairs))
            if plan.strict and any(REASONS[repair].bad for repair in repairs):
                raise _refused(f"{source.where(row)}: {SEVERAL.join(repairs)}", readings)
            reading.found.append((place, conversation))
        except BadRow as fault:
            tally.add("dropped", fault.reason)
            if plan.strict and REASONS[fault.reason].bad:
                raise _refused(f"{source.where(row)}: {fault}", readings) from None


def _checked(
    row: RawRow, source: PromptSource, schema: str, splitter: TemplateText | None, plan: ReadPlan, taken: set[str]
) -> tuple[Conversation, list[str]]:
    """Return a row's conversation and its repairs; raises BadRow."""
    if row.fault is not None:
        raise row.fault
    if not isinstance(row.value, dict):
        raise BadRow("not an object", repr(row.value)[:60])
    value, lone = mended(row.value)
    raw = SCHEMAS[schema].messages(value)
    if splitter is not None:
        raw = splitter.messages(raw[0]["content"])
    messages, repairs = check_messages(raw)
    tools = row_tools(value)
    if tools:
        messages[0] = {**messages[0], "tools": tools}
    category = source.category or str(value.get("category") or source.stem)
    conversation = Conversation("", category, source.label, tuple(messages))
    if plan.template is not None:
        _check_rendering(plan.template, conversation, plan.max_tokens)
    name, repeated = _own_id(value, row.number, source, taken)
    repairs = [*row.repairs, *(["lone surrogate"] if lone else []), *repairs, *(["repeated id"] if repeated else [])]
    return Conversation(name, category, source.label, conversation.messages), repairs


def _own_id(row: dict[str, object], number: int, source: PromptSource, taken: set[str]) -> tuple[str, bool]:
    """Return an id that no other row has, and whether the row's own was taken."""
    given = next((row[key] for key in ID_COLUMNS if isinstance(row.get(key), str | int) and row[key] != ""), None)
    name = str(given) if given is not None else f"{source.stem}-{number:05d}"
    repeated = name in taken or name.startswith(SELF_WRITTEN)
    if repeated:
        name = f"{source.name}#{number}"
    taken.add(name)
    return name, repeated and given is not None


def _check_rendering(template: ChatTemplate, conversation: Conversation, max_tokens: int | None) -> None:
    """Raise BadRow for a conversation that the served template refuses, does not show whole, or that starts too long.

    Its turns are written anew from the first prompt on, and end where a later prompt has no room: that is no bad row.
    """
    messages = list(conversation.prompt().messages)
    first = next(iter(turns_of(conversation.messages)), tuple(messages))
    try:
        text = template.text(messages, add_generation_prompt=True)
        length = len(template.ids(list(first), add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError) as error:
        raise BadRow("refused by the template", " ".join(str(error).split())[:80]) from None
    hidden = [m for m in messages if m["role"] == "tool" and m["content"].strip() not in text]
    if hidden:
        raise BadRow("tool turns", "the template leaves them out")
    if max_tokens is not None and length > max_tokens:
        raise BadRow("too long", f"{length} tokens, {max_tokens} allowed")


def _table(readings: list[_Reading]) -> RowTable:
    return RowTable(tuple(reading.tally.rows() for reading in readings))


def _refused(message: str, readings: list[_Reading]) -> RowsRefused:
    return RowsRefused(f"{message}. Every row has to be good here; mend it.", _table(readings))


def _check_shares(readings: list[_Reading], plan: ReadPlan) -> None:
    for reading in readings:
        rows = reading.tally.rows()
        if rows.drop_share > plan.max_drop_share:
            worst = max((reason for reason in rows.dropped if REASONS[reason].bad), key=lambda name: rows.dropped[name])
            raise RowsRefused(
                f"{rows.drop_share:.1%} of the rows of {rows.source!r} are bad, more than the "
                f"{plan.max_drop_share:.1%} allowed; most often: {worst} ({REASONS[worst].meaning}). Mend them, state "
                "another schema, or raise synthesize.max_drop_share.",
                _table(readings),
            )


def _drop_repeats(readings: list[_Reading], plan: ReadPlan, progress: Progress | None) -> None:
    repeats = RepeatFinder(plan.dedup)
    run = plan.dedup.overlap_words
    overlaps = OverlapFinder(plan.evaluation if run else (), run=run)
    total, done = sum(len(reading.found) for reading in readings), 0
    for reading in readings:
        fresh = []
        for place, conversation in reading.found:
            reason = repeats.repeats(conversation)
            if reason is None and any(map(overlaps.overlaps, conversation.user_texts())):
                reason = "in an evaluation set"
            if reason is None:
                fresh.append((place, conversation))
            else:
                reading.tally.change(place, reason)
            done += 1
            if progress is not None:
                progress("comparing prompts", done, total, 0)
        reading.found = fresh


def _mix(readings: list[_Reading], seed: int, say: Say) -> None:
    """Keep of each source its share, chosen by a hash of seed and id, in the source's own order."""
    weights = [reading.source.weight for reading in readings]
    if all(weight is None for weight in weights):
        return
    if None in weights:
        name = readings[weights.index(None)].source.name
        raise UserError(f"prompt source {name!r} has no weight and others have; give all of them one, or none.")
    shares = {reading.source.name: (reading.source.weight or 0.0) for reading in readings}
    smallest = min(readings, key=lambda reading: len(reading.found) / shares[reading.source.name])
    per_weight = len(smallest.found) / shares[smallest.source.name]
    if not per_weight:
        raise UserError(f"prompt source {smallest.source.name!r} has a weight and no usable row.")
    for reading in readings:
        wanted = min(len(reading.found), max(1, round(per_weight * shares[reading.source.name])))
        ranked = sorted(reading.found, key=lambda item: hashlib.sha256(f"{seed}/{item[1].id}".encode()).digest())
        for place, _ in ranked[wanted:]:
            reading.tally.change(place, "beyond its weight")
        chosen = {place for place, _ in ranked[:wanted]}
        reading.found = [item for item in reading.found if item[0] in chosen]
    counts = ", ".join(f"{len(reading.found)} of {reading.source.name}" for reading in readings)
    say(f"  mix by weight, as large as {smallest.source.name} allows: {counts}")
