"""`eyas push HEAD --repo USER/NAME`: upload a head to the Hub, private unless asked, with a card of its numbers."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.options import JsonOption


def push(
    head: Annotated[str, typer.Argument(help="The head's folder.", metavar="HEAD")],
    repo: Annotated[str, typer.Option("--repo", help="Where to: USER/NAME.")],
    target: Annotated[
        str | None, typer.Option("--target", help="The target's Hub id, for base_model and the launch lines.")
    ] = None,
    licence: Annotated[str | None, typer.Option("--licence", help="The head's licence, such as apache-2.0.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repo public (default: private).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show card and files, send nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a head, write its model card and upload both; run it again after a broken connection."""
    from eyas.models.bundled import BUNDLED_TARGETS
    from eyas.models.head_checks import require_sound
    from eyas.models.head_files import read_head_files
    from eyas.models.hub import push_folder, resolve_head
    from eyas.models.model_card import model_card

    folder = resolve_head(head)
    files = read_head_files(folder)
    require_sound(files)
    named = target or files.card.get("target")
    if not named:
        raise UserError("this head does not say which target it is for; name it with --target.")
    if named in BUNDLED_TARGETS:
        raise UserError(f"{named!r} is eyas' own name for a target; give its Hub id with --target, for all others.")
    card = model_card(files, repo=repo, target=named, licence=licence)
    upload = push_folder(folder, repo, card=card, private=not public, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(asdict(upload)))
        return
    if dry_run:
        typer.echo(card)
    listed = ", ".join(f"{name} ({size} bytes)" for name, size in upload.files.items())
    kind = "private" if upload.private else "public"
    typer.echo(f"{'would upload' if dry_run else 'uploaded'} {listed} to the {kind} repo {repo}")
    if upload.url:
        typer.echo(upload.url)
