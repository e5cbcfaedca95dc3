"""Where a head came from: command, commit, versions, machine, seed and time, for eyas.json and the model card."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eyas.train.stage_evaluate import versions


def provenance(*, seed: int) -> dict[str, Any]:
    """Return what one needs to know to repeat a run, JSON-able."""
    return {
        "command": shlex.join(["eyas", *sys.argv[1:]]),
        "commit": _commit(),
        "versions": versions(),
        "machine": machine(),
        "seed": seed,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """Return the hardware in words: CPU, cores, and the GPUs torch sees."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"cpu": _cpu(), "cores": os.cpu_count(), "gpus": gpus, "system": f"{platform.system()} {platform.machine()}"}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Return the commit of the checkout this package runs from; None when it is installed."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
