"""What `eyas doctor HEAD --target MODEL` prints: what is wrong with a head, and which engines serve it as trained."""

import json
from typing import TYPE_CHECKING

import typer

from eyas.scripts.import_head import read_answers

if TYPE_CHECKING:
    from eyas.models.engines import Verdict
    from eyas.train.head_doctor import HeadReport

MARKS = {"ok": "ok", "failed": "FAILED", "warning": "note", "skipped": "-"}


def doctor_head(
    head: str, target: str, *, decode: bool, answers: tuple[str | None, list[str], str | None], as_json: bool
) -> None:
    """Run the checks of a head and print them; `answers` are the layers, flags and map as typed."""
    from transformers.utils.logging import disable_progress_bar

    from eyas.models.target_facts import TargetFacts
    from eyas.train.head_doctor import check_head_folder
    from eyas.train.progress import Reporter

    disable_progress_bar()
    given = read_answers(*answers, TargetFacts.of(target).config.num_hidden_layers)
    report = check_head_folder(head, target, decode=decode, answers=given, reporter=Reporter(quiet=as_json))
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_report(report)
    if report.failed:
        raise typer.Exit(1)


def _serves(verdict: "Verdict") -> str:
    if not verdict.serves:
        return "NO"
    return f"as --format {verdict.export}" if verdict.export else "yes"


def print_report(report: "HeadReport") -> None:
    """Print the findings, whose every tensor is, and the verdict of every engine."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    findings = Table("check", "", "finding", box=box.SIMPLE)
    for check in report.checks:
        findings.add_row(check.name, MARKS[check.status], check.detail.replace("[", "\\["))
    console.print(findings)
    if report.tensors:
        tensors = Table("tensor", "shape", "dtype", "whose", box=box.SIMPLE)
        for tensor in report.tensors:
            tensors.add_row(tensor.name, " x ".join(map(str, tensor.shape)), tensor.dtype, tensor.origin)
        console.print(tensors)
    if report.verdicts:
        engines = Table("engine", "version read", "run there", "serves it", "reads layers", "why not", box=box.SIMPLE)
        for verdict in report.verdicts:
            engines.add_row(
                verdict.engine, verdict.version, "yes" if verdict.tried else "no", _serves(verdict),
                ", ".join(map(str, verdict.layers)), "; ".join(verdict.reasons).replace("[", "\\["),
            )  # fmt: skip
        console.print(engines)
    failed = sum(check.status == "failed" for check in report.checks)
    console.print(f"{report.head}: {f'{failed} of {len(report.checks)} checks failed' if failed else 'sound'}")
