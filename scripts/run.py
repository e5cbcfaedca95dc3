"""`eyas run RECIPE`: all stages, each skipped when unchanged and resumed when interrupted, then the summary."""

import json
from typing import Annotated

import typer

from eyas.scripts.options import JsonOption, OutOption, RecipeArgument, SetOption
from eyas.train.run_folder import STAGES


def run(
    recipe: RecipeArgument,
    out: OutOption = None,
    overrides: SetOption = None,
    first: Annotated[
        str, typer.Option("--from", help="The first stage to run; those before must be finished.")
    ] = STAGES[0],
    last: Annotated[str, typer.Option("--until", help="The last stage to run.")] = STAGES[-1],
    as_json: JsonOption = False,
) -> None:
    """Run a recipe's stages: synthesize, extract, train, evaluate, export."""
    run_recipe(recipe, out, overrides or [], first=first, last=last, as_json=as_json)


def run_recipe(source: str, out: OutOption, overrides: list[str], *, first: str, last: str, as_json: bool) -> None:
    """Load a recipe, run a span of its stages and print the summary."""
    from eyas.train.pipeline import run_stages
    from eyas.train.progress import Reporter
    from eyas.train.recipe_io import load_recipe
    from eyas.train.run_folder import default_run_folder
    from eyas.train.summary import print_summary

    reporter = Reporter()
    recipe = load_recipe(source, overrides)
    summary = run_stages(recipe, out or default_run_folder(recipe.name), first=first, last=last, reporter=reporter)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        print_summary(summary)
