"""`eyas preview RECIPE`: training rows decoded, with the supervised tokens marked, before any target is loaded."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.scripts.options import JsonOption, OutOption, RecipeArgument, SetOption

if TYPE_CHECKING:
    from eyas.train.preview import Preview


def preview(
    recipe: RecipeArgument,
    out: OutOption = None,
    overrides: SetOption = None,
    rows: Annotated[int, typer.Option("--rows", help="How many rows to show.")] = 4,
    html: Annotated[Path | None, typer.Option("--html", help="Also write them as a page to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show training rows with the supervised tokens marked."""
    from eyas.data.preview import write_preview
    from eyas.train.context import RunContext
    from eyas.train.preview import preview as look
    from eyas.train.progress import Reporter
    from eyas.train.recipe_io import load_recipe
    from eyas.train.run_folder import RunFolder, default_run_folder

    loaded = load_recipe(recipe, overrides or [])
    reporter = Reporter()
    shown = look(RunContext(loaded, RunFolder(out or default_run_folder(loaded.name)), reporter), rows=rows)
    facts = {
        "target": loaded.target.model,
        "template arguments": json.dumps(loaded.target.template_arguments),
        "rows": str(shown.counted_rows),
        "supervised": f"{shown.supervised_share:.1%} of all tokens",
        "replies left out": str(shown.rewritten_turns),
    }
    if html is not None:
        write_preview(html, shown.rows, title=loaded.name, origin=shown.origin, facts=facts)
        reporter.say(f"  the page is {html}")
    if as_json:
        counts = [{"tokens": row.tokens, "supervised_tokens": row.supervised_tokens} for row in shown.rows]
        lines = [{**asdict(row), **count} for row, count in zip(shown.rows, counts, strict=True)]
        typer.echo(json.dumps({"recipe": loaded.name, **asdict(shown), "rows": lines}, indent=2))
    else:
        _print(shown, facts)


def _print(shown: "Preview", facts: dict[str, str]) -> None:
    from rich.console import Console
    from rich.text import Text

    from eyas.data.supervision import CLOSE, OPEN, SHARE

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(shown.origin)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for row in shown.rows:
        console.print()
        title = f"{row.id}  ({row.source}, {row.category}): {row.supervised_tokens} of {row.tokens} tokens supervised"
        console.rule(Text(title), align="left", style="dim")
        text = Text()
        for span in row.spans:
            if span.supervised:
                text.append(OPEN, "bold green").append(span.text, "black on green").append(CLOSE, "bold green")
            else:
                text.append(span.text, "dim")
        console.print(text)
        if row.rewritten_turns:
            console.print(f"{row.rewritten_turns} replies not supervised: the template changes them afterwards.")
    if not SHARE[0] <= shown.supervised_share <= SHARE[1]:
        console.print(f"\nnote: {shown.supervised_share:.1%} of all tokens supervised is unusual; look at the rows.")
