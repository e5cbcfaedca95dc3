"""What this machine has: free disk and memory, and a measured speed of matrix products, memory and small operations.

The speeds are measured once in a few seconds and kept under EYAS_HOME for this processor, torch and number of threads.
They are the machine's own best; `train/plan_time.py` says how much of them the stages get.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from eyas.data.corpus import write_atomically
from eyas.models.bundled import cache_home
from eyas.models.errors import UserError
from eyas.train.run_folder import fingerprint

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Speed:
    """FLOP/s of a large product, bytes/s of a copy (read plus written), seconds per small operation."""

    flops_float32: float
    flops_bfloat16: float
    bytes_per_second: float
    seconds_per_operation: float

    def flops(self, dtype: str) -> float:
        """Return FLOP/s in a dtype."""
        return self.flops_bfloat16 if dtype == "bfloat16" else self.flops_float32


def chosen_device(asked: str, *, setting: str = "--device") -> str:
    """Return the device to work on: `auto` is a GPU if there is one. Raises UserError for one that is not here."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{setting} {asked!r} cannot be used here: {reason}; set it to auto or cpu.") from None
    return asked


def free_disk(folder: Path) -> int:
    """Return the free bytes where a folder is or will be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def free_memory(device: str) -> int:
    """Return the bytes a run may take: of the device, or of this machine within its cgroup (this process included)."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    own = psutil.Process().memory_info().rss
    available = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        pass  # no cgroup, or one without a limit ("max")
    return own + available


def measured_speed(device: str) -> Speed:
    """Return the device's speed, measured on the first call on this machine and read from EYAS_HOME after that."""
    key = fingerprint({"device": device_name(device), "torch": torch.__version__, "threads": torch.get_num_threads()})
    path = cache_home() / "machine" / f"{key}.json"
    try:
        return Speed(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        speed = measure(device)
        write_atomically(path, json.dumps(asdict(speed), indent=2))
        return speed


def device_name(device: str) -> str:
    """Return the name of a GPU, or of this machine's processor with its number of cores."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()


def measure(device: str, *, seconds: float = 0.5) -> Speed:
    """Return the device's speed from four small measurements of about `seconds` each."""
    flops = {dtype: _product_flops(device, dtype, seconds) for dtype in (torch.float32, torch.bfloat16)}
    source = torch.ones(1 << 26, device=device)  # 256 MB: more than a cache
    copy = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _time(lambda: copy.copy_(source), seconds, device)
    few = torch.ones(8, 64, device=device)
    return Speed(
        flops_float32=flops[torch.float32],
        flops_bfloat16=flops[torch.bfloat16],
        bytes_per_second=bandwidth,
        seconds_per_operation=_time(lambda: few * 0.5 + 1.0, seconds, device) / 2,
    )


def _product_flops(device: str, dtype: torch.dtype, seconds: float) -> float:
    """Return FLOP/s of a product as large as a layer's."""
    x = torch.ones(512, 1024, device=device, dtype=dtype)
    weight = torch.ones(4096, 1024, device=device, dtype=dtype)
    return 2 * 512 * 1024 * 4096 / _time(lambda: x @ weight.T, seconds, device)


def _time(work: Callable[[], torch.Tensor], seconds: float, device: str) -> float:
    """Return the best seconds per call in about `seconds`, after a call to warm up."""
    work()
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - before)
    return best


def _processor() -> str:
    """Return the processor's name and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} x{os.cpu_count()}"
