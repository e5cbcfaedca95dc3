"""`eyas synthesize | extract | train | evaluate RECIPE`: one stage of a run (export: scripts/export.py)."""

from collections.abc import Callable

import typer

from eyas.scripts.options import JsonOption, OutOption, RecipeArgument, SetOption
from eyas.scripts.run import run_recipe

HELP = {
    "synthesize": "Let the target write the corpus.",
    "extract": "Compute the target's features of the corpus.",
    "train": "Train the head (for several devices: accelerate launch -m eyas.train RECIPE).",
    "evaluate": "Decode held-out prompts and report acceptance and speed.",
}


def add_stage_verbs(app: typer.Typer) -> None:
    """Register one verb per stage but the last."""
    for name, text in HELP.items():
        app.command(name, help=text)(_verb(name))


def _verb(name: str) -> Callable[..., None]:
    def verb(
        recipe: RecipeArgument, out: OutOption = None, overrides: SetOption = None, as_json: JsonOption = False
    ) -> None:
        run_recipe(recipe, out, overrides or [], first=name, last=name, as_json=as_json)

    return verb
