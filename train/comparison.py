"""Finished runs side by side: corpus, training, held-out acceptance by prompt set, and what was not measured alike."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.models.errors import UserError

ALL, METHODS = "all", ("chain", "tree")
ALIKE = ("max_new_tokens", "chain", "tree", "dtype")  # settings of the evaluation without which taus mean other things


@dataclass(frozen=True)
class FinishedRun:
    """What the comparison reads of a run: results, the evaluation's report and the head's card, empty if missing."""

    name: str
    results: dict[str, Any]
    report: dict[str, Any]
    card: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "FinishedRun":
        """Read a run folder; raises UserError for a folder that holds no trained run."""
        summary = _json(folder / "summary.json")
        results = summary.get("results", {})
        if not results.get("train"):
            raise UserError(
                f"{folder} holds no run whose training has finished; give run folders, such as runs/smollm2-quickstart."
            )
        report = _json(folder / "evaluation" / "report.json") if results.get("evaluate") else {}
        return cls(folder.name, results, report, _json(folder / "head" / "eyas.json"))

    def entry(self, method: str, temperature: float, prompt_set: str) -> dict[str, Any] | None:
        """Return what the evaluation measured of a method on a prompt set."""
        wanted = (method, temperature, prompt_set)
        entries = self.results.get("evaluate", {}).get("results", [])
        return next((e for e in entries if (e["method"], e["temperature"], e["prompt_set"]) == wanted), None)

    @property
    def prompt_sets(self) -> list[str]:
        """The prompt sets at temperature 0, all of them together last."""
        entries = self.results.get("evaluate", {}).get("results", [])
        names = {e["prompt_set"] for e in entries if e["temperature"] == 0}
        return sorted(names, key=lambda name: (name == ALL, name))


@dataclass(frozen=True)
class Comparison:
    """A table: one column per run. `remarks` say what keeps the numbers from being comparable."""

    runs: list[str]
    rows: list[tuple[str, list[str]]]
    remarks: list[str]

    def markdown(self) -> str:
        lines = ["| | " + " | ".join(self.runs) + " |", "|---|" + "---|" * len(self.runs)]
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in self.rows]
        return "\n".join([*lines, *([""] + [f"* {remark}" for remark in self.remarks] if self.remarks else [])]) + "\n"


def compare(folders: list[Path]) -> Comparison:
    """Return the runs side by side; raises UserError for a folder without a trained run."""
    runs = [FinishedRun.read(folder) for folder in folders]
    rows: list[tuple[str, list[str]]] = []

    def row(name: str, cell: Callable[[FinishedRun], str | None]) -> None:
        cells = [cell(run) for run in runs]
        if any(cells):
            rows.append((name, [found or "" for found in cells]))

    def trained(key: str, form: str) -> Callable[[FinishedRun], str | None]:
        return lambda run: form.format(run.results["train"][key]) if run.results["train"].get(key) is not None else None

    row("reply tokens", lambda run: _number(run.results["synthesize"].get("reply_tokens")))
    row("supervised tokens", trained("supervised_tokens", "{:,}"))
    row("steps (best)", lambda run: f"{run.results['train']['steps']} ({run.results['train']['best_step']})")
    row("head", lambda run: f"{run.results['train']['head_parameters'] / 1e6:.1f}M")
    row("coverage, held out", lambda run: _percent(run.results["train"]["coverage"].get("validation")))
    row("validation: chain, tree", lambda run: _pair(run.results["train"], "best_validation_tau", "tree"))
    row("the same at T=1", lambda run: _pair(run.results["train"], "best_validation_sampled_tau", "sampled_tree"))
    for method in METHODS:
        for name in dict.fromkeys(name for run in runs for name in run.prompt_sets):
            row(f"{method} tau, {name}", lambda run, m=method, n=name: _tau(run.entry(m, 0.0, n)))  # type: ignore[misc]
        row(f"{method} tau, all, T=1", lambda run, m=method: _tau(run.entry(m, 1.0, ALL)))  # type: ignore[misc]
        row(f"{method} against plain", lambda run, m=method: _speed(run.entry(m, 0.0, ALL)))  # type: ignore[misc]
    row("commit", lambda run: str(run.card["provenance"]["commit"])[:7] if run.card.get("provenance") else None)
    row("seed", lambda run: str(run.card["provenance"]["seed"]) if run.card.get("provenance") else None)
    return Comparison([run.name for run in runs], rows, _remarks(runs))


def _remarks(runs: list[FinishedRun]) -> list[str]:
    measured = [run for run in runs if run.report]
    remarks = []
    if len({run.report["target_fingerprint"] for run in measured}) > 1:
        remarks.append("the runs have different targets")
    if len({run.report["prompt_hash"] for run in measured}) > 1:
        remarks.append("the runs were evaluated on different prompts: compare bundled sets, not their sums")
    for key in ALIKE:
        values = {json.dumps(run.report["settings"].get(key), sort_keys=True) for run in measured}
        if len(values) > 1:
            remarks.append(f"evaluate.{key} differs: {', '.join(sorted(values))}")
    return remarks


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _number(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _pair(trained: dict[str, Any], chain: str, tree: str) -> str | None:
    values = [trained.get(chain), trained.get(f"best_validation_{tree}_tau")]
    return None if values[0] is None else ", ".join("-" if value is None else f"{value:.3f}" for value in values)


def _tau(entry: dict[str, Any] | None) -> str | None:
    return None if entry is None else f"{entry['tau']:.2f}"


def _speed(entry: dict[str, Any] | None) -> str | None:
    return None if entry is None else f"{entry['speedup']:.2f}x"
