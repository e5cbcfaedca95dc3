"""Resumable training state: head, optimizer, position, best acceptance, in one file written whole.

A checkpoint torn by a kill never has a final name. Loading is weights_only.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.models.errors import UserError

KEEP = 2


@dataclass
class Position:
    """Where training stands: optimizer steps done, best held-out tau and the step it was seen at."""

    step: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    history: list[dict[str, Any]] = field(default_factory=list)


def save_state(
    folder: Path, *, head: dict[str, Any], optimizer: dict[str, Any], position: Position, key: str, processes: int
) -> None:
    """Write the state of a step; older files beyond the last two are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{position.step:07d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    with temporary.open("wb") as file:
        state = {"key": key, "processes": processes, "position": position.__dict__}
        torch.save({**state, "head": head, "optimizer": optimizer}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
        old.unlink()


def load_state(folder: Path, *, key: str, processes: int) -> dict[str, Any] | None:
    """Return the newest state, None when there is none.

    Raises UserError when it belongs to other settings or data, or to another number of processes: which rows a step
    takes depends on that, so going on would repeat some rows and miss others.
    """
    for stale in folder.glob(".step-*.tmp"):
        stale.unlink(missing_ok=True)  # another rank may be deleting it too
    newest = sorted(folder.glob("step-*.pt"))
    if not newest:
        return None
    state: dict[str, Any] = torch.load(newest[-1], weights_only=True)
    if state["key"] != key:
        raise UserError(
            f"{newest[-1]} was saved by a run with other settings or data; delete {str(folder)!r} to start over."
        )
    if state["processes"] != processes:
        raise UserError(
            f"{newest[-1]} was saved by a run of {state['processes']} processes, this one has {processes}; launch as "
            f"many again, or delete {str(folder)!r} to start over."
        )
    return state
