"""The arguments that the verbs share."""

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[str, typer.Argument(help="A YAML file or the name of a bundled recipe.", metavar="RECIPE")]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run folder (default: runs/NAME).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a recipe value; repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")]
