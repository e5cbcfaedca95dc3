"""`eyas synthesize | extract | train | evaluate | export RECIPE`: one stage of a run."""

from collections.abc import Callable

import typer

from eyas.scripts.options import JsonOption, OutOption, RecipeArgument, SetOption
from eyas.scripts.run import run_recipe
from eyas.train.run_folder import STAGES

HELP = {
    "synthesize": "Let the target write the corpus.",
    "extract": "Compute the target's features of the corpus.",
    "train": "Train the head (for several devices: accelerate launch -m eyas.train RECIPE).",
    "evaluate": "Decode held-out prompts and report acceptance and speed.",
    "export": "Write the checkpoint that vLLM, SGLang and the original EAGLE code load.",
}


def add_stage_verbs(app: typer.Typer) -> None:
    """Register one verb per stage."""
    for name in STAGES:
        app.command(name, help=HELP[name])(_verb(name))


def _verb(name: str) -> Callable[..., None]:
    def verb(
        recipe: RecipeArgument, out: OutOption = None, overrides: SetOption = None, as_json: JsonOption = False
    ) -> None:
        run_recipe(recipe, out, overrides or [], first=name, last=name, as_json=as_json)

    return verb
