"""Resumable training state: head, moments, average, position, best acceptance, in one file written whole.

A checkpoint torn by a kill never has a final name. Loading is weights_only. The data cursor counts batches of the one
sequence that all ranks share, so a run may go on with another number of processes.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.models.errors import UserError

KEEP = 2
SCHEMA = 2


@dataclass
class Position:
    """Where training stands: optimizer steps done, batches consumed, best held-out tau and the step it was seen at."""

    step: int = 0
    batches: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    history: list[dict[str, Any]] = field(default_factory=list)


def save_state(
    folder: Path,
    *,
    head: dict[str, Any],
    moments: dict[str, Any],
    average: dict[str, Any],
    position: Position,
    key: str,
) -> None:
    """Write the state of a step; older files beyond the last two are removed.

    `moments` are the optimizers' state by parameter name; `average` is empty where weights are not averaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{position.step:07d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    with temporary.open("wb") as file:
        state = {"schema": SCHEMA, "key": key, "position": position.__dict__}
        torch.save({**state, "head": head, "moments": moments, "average": average}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
        old.unlink()


def load_state(folder: Path, *, key: str) -> dict[str, Any] | None:
    """Return the newest state, None when there is none; raises UserError when it is of other settings or data."""
    for stale in folder.glob(".step-*.tmp"):
        stale.unlink(missing_ok=True)  # another rank may be deleting it too
    newest = sorted(folder.glob("step-*.pt"))
    if not newest:
        return None
    state: dict[str, Any] = torch.load(newest[-1], weights_only=True)
    if state.get("schema") != SCHEMA:
        raise UserError(
            f"{newest[-1]} has checkpoint schema {state.get('schema')}, this version reads {SCHEMA}; delete "
            f"{str(folder)!r} to start over."
        )
    if state["key"] != key:
        raise UserError(
            f"{newest[-1]} was saved by a run with other settings or data; delete {str(folder)!r} to start over."
        )
    return state
