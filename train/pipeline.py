"""The stages of a run, in order; each skipped when finished for its fingerprint, resumed when interrupted."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.data.corpus import write_atomically
from eyas.models.errors import UserError, nearest
from eyas.train.context import RunContext
from eyas.train.progress import Reporter
from eyas.train.ranks import is_main_rank, main_rank_first
from eyas.train.recipe import Recipe
from eyas.train.recipe_io import dump_recipe
from eyas.train.run_folder import STAGES, RunFolder

Stage = Callable[[RunContext], dict[str, Any]]


def _stage(name: str) -> Stage:
    """Return a stage's function; imported when it runs, because a finished run needs none of the heavy libraries."""
    from importlib import import_module

    return getattr(import_module(f"eyas.train.stage_{name}"), f"run_{name}")


def run_stages(
    recipe: Recipe, folder: Path, *, first: str = STAGES[0], last: str = STAGES[-1], reporter: Reporter
) -> dict[str, Any]:
    """Run the stages from `first` to `last` and return the run's summary.

    Stages before `first` must be finished with the same settings; raises UserError naming the one that is not.
    """
    for name in (first, last):
        if name not in STAGES:
            raise UserError(f"unknown stage {name!r}; the stages are {', '.join(STAGES)}.{nearest(name, STAGES)}")
    if STAGES.index(first) > STAGES.index(last):
        raise UserError(f"nothing to run: stage {first!r} comes after {last!r}.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is a file; --out takes a folder for the run.")
    context = RunContext(recipe, RunFolder(folder), reporter)
    context.check()
    keys = context.fingerprints
    for name in STAGES[: STAGES.index(first)]:
        if not context.folder.is_finished(name, keys[name]):
            state = "was made with other settings" if context.folder.record(name).get("finished") else "is not finished"
            raise UserError(f"stage {name!r} {state} in {folder}; run it first: eyas {name} RECIPE --out {folder}")
    asked = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
    if is_main_rank() and not all(context.folder.is_finished(name, keys[name]) for name in asked):
        from eyas.train.plan import check_plan  # a finished run needs neither this nor the stages' libraries

        check_plan(context, asked)
    write_atomically(folder / "recipe.yaml", dump_recipe(recipe))
    for number, name in enumerate(STAGES, start=1):
        if STAGES.index(first) <= number - 1 <= STAGES.index(last):
            _run_stage(context, name, f"[{number}/{len(STAGES)}] {name}")
    summary = summarise_run(context)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2))
    return summary


def _run_stage(context: RunContext, name: str, title: str) -> None:
    key = context.fingerprints[name]
    if context.folder.is_finished(name, key):
        context.reporter.say(f"{title}: unchanged, skipped")
        return
    with main_rank_first(cpu=context.device == "cpu"):
        resumed = context.folder.begin(name, key)
    context.reporter.say(f"{title}{': resuming' if resumed else ''}")
    started = time.perf_counter()
    try:
        result = _stage(name)(context)
    finally:
        if is_main_rank():
            seconds = context.folder.add_seconds(name, time.perf_counter() - started)
    if is_main_rank():
        context.folder.finish(name, result)
        context.reporter.say(f"  done in {seconds:.0f} s")


def summarise_run(context: RunContext) -> dict[str, Any]:
    """Return what the run has: per stage its state, seconds and result; those of other settings are left out."""
    records = {name: context.folder.record(name) for name in STAGES}
    for name, record in records.items():
        if record.get("fingerprint") != context.fingerprints[name]:
            records[name] = {}
    return {
        "recipe": context.recipe.name,
        "folder": str(context.folder.path),
        "stages": {
            name: {"finished": bool(record.get("finished")), "seconds": record.get("seconds", 0.0)}
            for name, record in records.items()
        },
        "results": {name: record.get("result", {}) for name, record in records.items()},
    }
