"""A run's folder: what lies where, and which stages are finished for which fingerprint.

A stage writes into its own folder and gets a `stage.json` when it is done. A changed fingerprint throws the stage's
folder away and starts it anew; an unchanged one resumes an unfinished stage and skips a finished one.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.corpus import write_atomically

STAGES = ("synthesize", "extract", "train", "evaluate", "export")
FOLDERS = {
    "synthesize": "corpus",
    "extract": "features",
    "train": "training",
    "evaluate": "evaluation",
    "export": "head",
}


def default_run_folder(name: str) -> Path:
    """Return where a recipe's run goes when no folder is named."""
    return Path("runs") / name


def fingerprint(parts: dict[str, Any]) -> str:
    """Return a short hash of JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """Return a short hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    def of(self, stage: str) -> Path:
        """Return the folder a stage writes to."""
        return self.path / FOLDERS[stage]

    def _mark(self, stage: str) -> Path:
        return self.path / "stages" / f"{stage}.json"

    def record(self, stage: str) -> dict[str, Any]:
        """Return what is known of a stage: fingerprint, whether finished, seconds, result; empty when never begun."""
        try:
            return dict(json.loads(self._mark(stage).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def is_finished(self, stage: str, key: str) -> bool:
        """Return whether a stage is finished for this fingerprint and its output is still there."""
        record = self.record(stage)
        return record.get("fingerprint") == key and bool(record.get("finished")) and self.of(stage).exists()

    def begin(self, stage: str, key: str) -> bool:
        """Open a stage for work; return whether an unfinished attempt with the same fingerprint is being resumed."""
        record = self.record(stage)
        resumed = record.get("fingerprint") == key and not record.get("finished") and self.of(stage).exists()
        if not resumed:
            shutil.rmtree(self.of(stage), ignore_errors=True)
            self.of(stage).mkdir(parents=True)  # the ranks that follow the first one find an attempt under way
            self._write(stage, {"fingerprint": key, "finished": False, "seconds": 0.0, "result": {}})
        return resumed

    def add_seconds(self, stage: str, seconds: float) -> float:
        """Add working time to a stage (over interruptions) and return the sum."""
        record = self.record(stage)
        record["seconds"] = record.get("seconds", 0.0) + seconds
        self._write(stage, record)
        return float(record["seconds"])

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Mark a stage finished with its result."""
        self._write(stage, {**self.record(stage), "finished": True, "result": result})

    def _write(self, stage: str, record: dict[str, Any]) -> None:
        write_atomically(self._mark(stage), json.dumps(record, indent=2))
