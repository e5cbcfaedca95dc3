"""`eyas compare RUN ...`: finished runs side by side, as a table, Markdown or JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.scripts.options import JsonOption

if TYPE_CHECKING:
    from eyas.train.comparison import Comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set runs side by side: corpus, training, and held-out acceptance by prompt set."""
    from eyas.train.comparison import compare as side_by_side

    found = side_by_side(runs)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    elif markdown:
        typer.echo(found.markdown(), nl=False)
    else:
        _print(found)


def _print(found: "Comparison") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table()
    for column in ("", *found.runs):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, cells in found.rows:
        table.add_row(name, *cells)
    console.print(table)
    for remark in found.remarks:
        console.print(f"note: {remark}", style="yellow", soft_wrap=True)
