"""`eyas plan RECIPE`: disk, memory and time of every stage before anything is loaded, and whether they suffice."""

import json
from typing import Annotated

import typer

from eyas.scripts.options import JsonOption, OutOption, RecipeArgument, SetOption

BYTES = "what the run may use, as bytes or like 20GB"
KNOWN = "rtx-4090, l40s, a100, h100, h200, b200"


def plan(
    recipe: RecipeArgument,
    out: OutOption = None,
    overrides: SetOption = None,
    disk: Annotated[str | None, typer.Option("--disk", metavar="BYTES", help=f"Disk: {BYTES} (default: free).")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help=f"Memory: {BYTES} (default: free).")
    ] = None,
    card: Annotated[
        str | None,
        typer.Option("--card", metavar="NAME", help=f"Plan for such a GPU and not for this machine: {KNOWN}."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print rows, tokens, disk, peak memory and time per stage; exit code 1 when the machine does not suffice."""
    from eyas.train.cards import find_card
    from eyas.train.context import RunContext
    from eyas.train.machine import measured_speed
    from eyas.train.plan import make_plan
    from eyas.train.plan_table import print_plan
    from eyas.train.progress import Reporter
    from eyas.train.recipe_io import load_recipe
    from eyas.train.run_folder import RunFolder, default_run_folder

    planned = find_card(card) if card else None
    limits = [f"plan.{name}={value}" for name, value in (("disk", disk), ("memory", memory)) if value is not None]
    loaded = load_recipe(recipe, [*(overrides or []), *limits])
    context = RunContext(loaded, RunFolder(out or default_run_folder(loaded.name)), Reporter())
    context.check()
    made = make_plan(context, speed=None if planned else measured_speed(context.device), card=planned)
    if as_json:
        typer.echo(json.dumps(made.as_dict(), indent=2))
    else:
        print_plan(made)
    if made.refusals:
        raise typer.Exit(1)
