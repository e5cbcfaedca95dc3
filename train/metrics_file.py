"""metrics.jsonl: one line per report of training; lines of steps that a resumed run repeats are dropped."""

import json
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends reports to a JSONL file; on resume, lines of steps that will be repeated are dropped."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        kept = [line for line in lines if _step_of(line) <= resume_step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")

    def write(self, fields: dict[str, Any]) -> None:
        """Append one line."""
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the reports of a metrics file; a last line cut by a kill is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) < float("inf")]


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")
