"""`eyas export RECIPE` (the last stage of a run) and `eyas export HEAD --format ENGINE --out DIR`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.options import JsonOption, OutOption, SetOption
from eyas.scripts.run import run_recipe


def export(
    source: Annotated[str, typer.Argument(help="A recipe, or a head: a folder or a Hub id.", metavar="RECIPE|HEAD")],
    out: OutOption = None,
    overrides: SetOption = None,
    format_name: Annotated[
        str | None,
        typer.Option("--format", help="vllm, sglang, eagle, speculators, eagle1-vllm, eagle1-sglang or eagle1-eagle."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The target named in the launch lines (default: the one it knows).")
    ] = None,
    with_embeddings: Annotated[
        bool,
        typer.Option("--with-embeddings", help="Add the target's embeddings: for vLLM on several pipeline stages."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the native checkpoint of a run, or a head in the files of one engine."""
    if format_name is None:
        if (Path(source) / "config.json").is_file():
            raise UserError(f"{source!r} is a head; say in which --format to export it, and where to with --out.")
        if with_embeddings:
            raise UserError("--with-embeddings goes with --format: the native checkpoint holds the head alone.")
        run_recipe(source, out, overrides or [], first="export", last="export", as_json=as_json)
        return
    if out is None:
        raise UserError("--format writes a head's folder; say where to with --out.")
    if overrides:
        raise UserError("--set belongs to recipes; a head is exported as it was trained.")
    _export_head(source, format_name, out, target, with_embeddings=with_embeddings, as_json=as_json)


def _export_head(
    source: str, format_name: str, out: Path, target: str | None, *, with_embeddings: bool, as_json: bool
) -> None:
    from eyas.models.bundled import BUNDLED_TARGETS, resolve_model
    from eyas.models.export import export_head
    from eyas.models.head_files import read_head_files
    from eyas.models.hub import resolve_head
    from eyas.models.launch import Serving

    folder = resolve_head(source)
    card = read_head_files(folder).card
    recipe = card.get("recipe", {}).get("evaluate", {})
    tree = recipe.get("tree", {})
    known = target or card.get("target")
    if with_embeddings and known is None:
        raise UserError("--with-embeddings copies the target's; name it with --target.")
    named = known or "TARGET"
    serving = Serving(
        resolve_model(named) if named in BUNDLED_TARGETS else named,
        str(out),
        depth=recipe.get("chain", {}).get("depth", 5),
        top_k=tree.get("top_k", 8),
        num_draft_tokens=tree.get("num_draft_tokens", 16),
    )
    export_head(folder, format_name, out, serving=serving, embeddings_of=known if with_embeddings else None)
    size = sum(path.stat().st_size for path in out.iterdir())
    result = {"folder": str(out), "format": format_name, "bytes": size}
    typer.echo(
        json.dumps(result) if as_json else f"{format_name} files in {out} ({size} bytes); README.md has the command"
    )
