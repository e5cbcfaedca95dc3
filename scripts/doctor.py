"""`eyas doctor RECIPE | HEAD --target MODEL`: the contract checks of a recipe before any long work, or of a head."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.doctor_head import doctor_head
from eyas.scripts.import_head import FlagOption, LayersOption, MapOption
from eyas.scripts.options import JsonOption, OutOption, SetOption


def doctor(
    subject: Annotated[
        str, typer.Argument(help="A recipe (YAML file or bundled name), or with --target a head (folder or Hub id).")
    ],
    target: Annotated[
        str | None, typer.Option("--target", help="The target a head drafts for: a folder, bundled name or Hub id.")
    ] = None,
    out: OutOption = None,
    overrides: SetOption = None,
    decode: Annotated[bool, typer.Option(help="Of a head: decode 20 prompts and compare the acceptance.")] = True,
    aux_layers: LayersOption = None,
    flags: FlagOption = None,
    map_kind: MapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe before any long work, or a head against its engines and its target; exit code 1 on any failure."""
    of_head = aux_layers or flags or map_kind or not decode
    if target is not None:
        if overrides or out:
            raise UserError("--set and --out belong to a recipe; a head is checked with --target alone.")
        doctor_head(subject, target, decode=decode, answers=(aux_layers, flags or [], map_kind), as_json=as_json)
    elif (Path(subject) / "config.json").is_file() or of_head:
        raise UserError(
            f"{subject!r} is checked as a head, which needs --target MODEL; a recipe is a YAML file or a bundled name."
        )
    else:
        doctor_recipe(subject, out, overrides or [], as_json=as_json)


def doctor_recipe(source: str, out: OutOption, overrides: list[str], *, as_json: bool) -> None:
    """Run the pre-flight of a recipe and print its findings."""
    from eyas.train.context import RunContext
    from eyas.train.preflight import Probe, run_checks
    from eyas.train.preflight_checks import CHECKS, VITAL
    from eyas.train.preflight_table import marked_text, print_findings
    from eyas.train.progress import Reporter
    from eyas.train.recipe_io import load_recipe
    from eyas.train.run_folder import RunFolder, default_run_folder

    loaded = load_recipe(source, overrides)
    probe = Probe(RunContext(loaded, RunFolder(out or default_run_folder(loaded.name)), Reporter()))
    findings = run_checks(probe, CHECKS, vital=VITAL)
    failed = {finding.check for finding in findings if finding.verdict == "failed"}
    rows = not failed & {*VITAL, "chat template"}
    preview = marked_text(probe.template, probe.examples[0][1]) if rows else None
    if as_json:
        fields = {"recipe": loaded.name, "ok": not failed, "preview": preview}
        typer.echo(json.dumps({**fields, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_findings(loaded.name, findings, preview)
    if failed:
        raise typer.Exit(1)
