"""`eyas doctor RECIPE`: the contract checks of a recipe, in seconds, before any long work."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from eyas.models.errors import UserError
from eyas.scripts.options import JsonOption, OutOption, RecipeArgument, SetOption


def doctor(
    recipe: RecipeArgument, out: OutOption = None, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Check template, features, batching, supervision, RoPE, head and room; exit code 1 on any failure."""
    if (Path(recipe) / "config.json").is_file():
        raise UserError(f"{recipe!r} is a model folder; eyas doctor takes a recipe: a YAML file or a bundled name.")
    doctor_recipe(recipe, out, overrides or [], as_json=as_json)


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
