"""`eyas import FOLDER --target MODEL --out DIR`: a published head of any known layout as a native checkpoint."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.models.errors import UserError, nearest
from eyas.scripts.options import JsonOption

LayersOption = Annotated[
    str | None, typer.Option("--aux-layers", help="The layers it reads, as layers applied: 2,16,29 (or: default).")
]
FlagOption = Annotated[
    list[str] | None, typer.Option("--flag", metavar="NAME=true|false", help="A norm flag its config leaves out.")
]
MapOption = Annotated[str | None, typer.Option("--map", help="What d2t holds where that is open: offsets or ids.")]


def import_verb(
    head: Annotated[str, typer.Argument(help="The published head: a folder or a Hub id.", metavar="HEAD")],
    target: Annotated[str, typer.Option("--target", help="The target it drafts for.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    aux_layers: LayersOption = None,
    flags: FlagOption = None,
    map_kind: MapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a published head into the native layout; what its files leave open is asked for."""
    from eyas.models.head_checks import require_sound
    from eyas.models.head_files import read_head_files, write_head_files
    from eyas.models.hub import resolve_head
    from eyas.models.import_head import import_head
    from eyas.models.target_facts import TargetFacts

    facts = TargetFacts.of(target)
    imported = import_head(
        resolve_head(head),
        target=facts,
        answers=read_answers(aux_layers, flags or [], map_kind, facts.config.num_hidden_layers),
    )
    write_head_files(out, imported.files, check=lambda folder: require_sound(read_head_files(folder)))
    if as_json:
        typer.echo(json.dumps({"folder": str(out), "notes": list(imported.notes)}))
        return
    for note in imported.notes:
        typer.echo(f"  {note}")
    typer.echo(f"imported to {out}; next: eyas doctor {out} --target {target}")


def read_answers(aux_layers: str | None, flags: list[str], map_kind: str | None, num_layers: int) -> Any:
    """Return the user's answers; raises UserError for one that cannot be read."""
    from eyas.models.head_config import default_aux_layers
    from eyas.models.head_layout import FLAGS
    from eyas.models.import_head import Answers

    layers: tuple[int, ...] | None = None
    if aux_layers == "default":
        layers = default_aux_layers(num_layers)
    elif aux_layers is not None:
        parts = aux_layers.split(",")
        if not all(part.strip().isdigit() for part in parts):
            raise UserError(f"--aux-layers takes numbers such as 2,16,29, or default; given {aux_layers!r}.")
        layers = tuple(int(part) for part in parts)
    answered = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        if name not in FLAGS or value not in ("true", "false"):
            raise UserError(
                f"--flag takes NAME=true or NAME=false with {', '.join(FLAGS)}; given {flag!r}.{nearest(name, FLAGS)}"
            )
        answered[name] = value == "true"
    if map_kind not in (None, "offsets", "ids"):
        raise UserError(f"--map takes offsets or ids, given {map_kind!r}.")
    return Answers(layers, answered, map_kind)
