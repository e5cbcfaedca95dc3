"""The prompt sources of a recipe: read once, before the target is loaded; their table is printed and saved."""

import json
from collections.abc import Callable
from pathlib import Path

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eyas.data.corpus import CorpusRow, write_atomically
from eyas.data.dedup import DedupPlan, OverlapFinder
from eyas.data.encode import ChatTemplate
from eyas.data.prompt_source import PromptSource
from eyas.data.row_datasets import DatasetName
from eyas.data.row_table import RowTable
from eyas.data.sources import ReadPlan, RowsRefused, SourcesReport, read_prompts, read_sources
from eyas.models.errors import CheckFailed
from eyas.train.progress import Reporter
from eyas.train.recipe import PromptSourceSection, Recipe
from eyas.train.run_folder import file_hash

ROWS_FILE = "rows.json"


def prompt_sources(recipe: Recipe) -> list[PromptSource]:
    """Return the sources of a recipe's prompts."""
    return [_source(section) for section in recipe.synthesize.prompts]


def overlap_sets(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the evaluation sets that no prompt may overlap."""
    dedup = recipe.synthesize.dedup
    if not dedup.overlap_words:
        return ()
    return recipe.evaluate.prompts if dedup.overlap_with is None else dedup.overlap_with


def read_given(recipe: Recipe, template: ChatTemplate, *, positions: int, reporter: Reporter) -> SourcesReport:
    """Return the recipe's given conversations.

    `positions` is how many the target has: prompt and reply must fit. Raises RowsRefused.
    """
    section = recipe.synthesize
    plan = ReadPlan(
        strict=section.strict,
        max_drop_share=section.max_drop_share,
        template=template,
        max_tokens=min(section.max_prompt_tokens, positions - section.max_reply_tokens),
        dedup=dedup_plan(recipe),
        evaluation=evaluation_texts(recipe),
        seed=section.seed,
    )
    with reporter.bar("rows") as bar:
        return read_sources(prompt_sources(recipe), plan, say=reporter.say, progress=bar.update)


def dedup_plan(recipe: Recipe) -> DedupPlan:
    """Return which repeats the recipe drops."""
    section = recipe.synthesize.dedup
    return DedupPlan(section.exact, section.near, section.overlap_words)


def evaluation_texts(recipe: Recipe) -> tuple[str, ...]:
    """Return what users say in the evaluation sets that no training prompt may share a run of words with."""
    prompts = [prompt for name in overlap_sets(recipe) for prompt in read_prompts(name)]
    return tuple(text for prompt in prompts for text in prompt.user_texts())


def with_table(read: Callable[[], SourcesReport], reporter: Reporter, folder: Path | None) -> SourcesReport:
    """Return what `read` returns, the table of its rows printed and saved to `folder`, also when it is refused."""
    try:
        report = read()
    except RowsRefused as error:
        _show(error.table, reporter, folder)
        raise
    _show(report.table, reporter, folder)
    return report


def check_apart(recipe: Recipe, corpus: list[CorpusRow]) -> None:
    """Raise CheckFailed when a training prompt shares a run of words with a prompt of evaluate.prompts.

    Synthesis drops such prompts; the evaluation set may have changed since.
    """
    run = recipe.synthesize.dedup.overlap_words
    if not run or recipe.synthesize.dedup.overlap_with is not None:
        return
    asked = [prompt for name in recipe.evaluate.prompts for prompt in read_prompts(name)]
    trained = [row for row in corpus if row.split == "train"]
    overlaps = OverlapFinder((text for prompt in asked for text in prompt.user_texts()), run=run)
    leaks = dict.fromkeys(row.prompt_text for row in trained if overlaps.overlaps(row.prompt_text))
    if leaks:
        raise CheckFailed(
            f"{len(leaks)} training prompts of the corpus stand in evaluate.prompts, for example "
            f"{next(iter(leaks))[:80]!r}: the acceptance measured would flatter the head. Take them out of the "
            "evaluation set, or name the set in synthesize.dedup.overlap_with to write the corpus anew without them."
        )


def source_hash(source: PromptSource) -> object:
    """Return what a stage's fingerprint holds of a source's data: the bytes of its files, or the name of a Hub dataset.

    Raises UserError when there is no such file.
    """
    if source.dataset is None:
        return file_hash(source.file or Path())
    folder = Path(source.dataset.name)
    if not folder.is_dir():
        return [source.dataset.name, source.dataset.revision]
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): file_hash(path) for path in files}


def prompt_file_hash(source: str) -> str:
    """Return the hash of an evaluation set's file; raises UserError when there is none."""
    return file_hash(PromptSource(path=source).file or Path())


def _source(section: PromptSourceSection) -> PromptSource:
    dataset = None
    if section.dataset is not None:
        dataset = DatasetName(section.dataset, section.config, section.revision, section.split, section.streaming)
    return PromptSource(section.path, dataset, section.schema_name, section.weight, section.limit, section.category)


def _show(table: RowTable, reporter: Reporter, folder: Path | None) -> None:
    if folder is not None:
        write_atomically(folder / ROWS_FILE, json.dumps(table.to_json(), indent=2))
    shown = Table(title="rows of the prompt sources", title_justify="left")
    for column in ("source", "outcome", "why", "rows"):
        shown.add_column(column, justify="right" if column == "rows" else "left", overflow="fold")
    previous = ""
    for source, outcome, reason, rows in table.lines():
        if source != previous:
            shown.add_section()
        shown.add_row(Text("" if source == previous else source), outcome, reason, str(rows))
        previous = source
    reporter.console.print(Padding(shown, (0, 0, 0, 2)), markup=False)
