"""Times kernels on a GPU by events: medians, inputs rotating through more than the L2, nothing timed that is wrong."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas.scripts.bench_kernels_cases import SHAPES, Case, Inputs, Shape, cases
from eyas.train.progress import Reporter

REPEATS = 30
# A spin before each measurement, so that launches queue behind it and their cost on the CPU is not counted.
SPIN_CYCLES = 500_000
COMPILE_BUDGET_SECONDS = 240.0
# What counts as verification of a round, beside the target's forward pass.
OVERHEAD = ("tree build", "greedy verification", "path compaction, all layers")

Timer = Callable[[Callable[..., Any], list[Inputs]], float]


@dataclass(frozen=True)
class Timing:
    """A case's medians in microseconds; None where something was not run. `fault` says why nothing was timed."""

    shape: str
    case: str
    fault: str | None = None
    kernel_us: float | None = None
    floor_us: float | None = None
    gigabytes_per_second: float | None = None
    reference_us: float | None = None
    compiled_us: float | None = None
    rivals_us: dict[str, float] | None = None

    @property
    def over_floor(self) -> float | None:
        """Return the kernel's time over that of moving its bytes once."""
        return self.kernel_us / self.floor_us if self.kernel_us and self.floor_us else None


def measure(
    device: torch.device,
    reporter: Reporter,
    *,
    shapes: tuple[Shape, ...] = SHAPES,
    timer: Timer | None = None,
    working_set: int | None = None,
) -> list[Timing]:
    """Return the timings of all cases of all shapes; a case whose kernel is wrong is not timed."""
    timer = timer or event_median_us
    torch.manual_seed(0)
    if working_set is None:
        working_set = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    bandwidth = _copy_bandwidth(device, timer, working_set)
    started = time.perf_counter()
    timings = []
    with reporter.bar("cases") as bar:
        for shape in shapes:
            of_shape = cases(shape, device)
            for done, case in enumerate(of_shape):
                may_compile = time.perf_counter() - started < COMPILE_BUDGET_SECONDS
                timings.append(_time_case(shape, case, timer, bandwidth, working_set, may_compile=may_compile))
                bar.update(shape.name, done + 1, len(of_shape), 1, case.name)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return timings


def _time_case(
    shape: Shape, case: Case, timer: Timer, bandwidth: float, working_set: int, *, may_compile: bool
) -> Timing:
    first = case.draw()
    if fault := case.fault(first):
        return Timing(shape.name, case.name, fault=fault)
    sets = [first] + [case.draw() for _ in range(min(working_set // max(case.bytes_moved, 1), 15))]
    kernel_us = timer(case.kernel, sets)
    compiled_us = None
    if case.compiled and may_compile:
        compiled_us = timer(torch.compile(case.reference), sets)
    return Timing(
        shape.name,
        case.name,
        kernel_us=kernel_us,
        floor_us=case.bytes_moved / bandwidth * 1e6,
        gigabytes_per_second=case.bytes_moved / kernel_us / 1e3,
        reference_us=timer(case.reference, sets[:1]),
        compiled_us=compiled_us,
        rivals_us={name: timer(rival, sets) for name, rival in case.rivals.items()},
    )


def _copy_bandwidth(device: torch.device, timer: Timer, working_set: int) -> float:
    """Return bytes per second of a device copy that is larger than the L2."""
    source = torch.empty(max(4 * working_set, 2**20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timer(target.copy_, [(source,)]) * 1e6


def event_median_us(function: Callable[..., Any], sets: list[Inputs]) -> float:
    """Return the median microseconds of a call between two events, over inputs in turn, after a warm-up."""
    for inputs in sets[:3]:
        function(*inputs)
    torch.cuda.synchronize()
    once = time.perf_counter()
    function(*sets[0])
    torch.cuda.synchronize()
    # References that take long are called less often: a case has seconds, not minutes.
    repeats = max(3, min(REPEATS, int(2.0 / max(time.perf_counter() - once, 1e-6))))
    pairs = []
    for i in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        function(*sets[i % len(sets)])
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(stop) for start, stop in pairs)


def overheads_us(timings: list[Timing]) -> dict[str, float]:
    """Return what verification costs beside the target's forward, by shape; only where all of it was timed."""
    found = {}
    for shape in dict.fromkeys(x.shape for x in timings):
        parts = [x.kernel_us for x in timings if x.shape == shape and x.case in OVERHEAD and x.kernel_us is not None]
        if len(parts) == len(OVERHEAD):
            found[shape] = sum(parts)
    return found


def timing_table(timings: list[Timing]) -> str:
    """Return the section: card, versions, one line per case, and the verification overhead of each shape."""
    import triton

    card = "CPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        cache = f"L2 {properties.L2_cache_size / 2**20:.0f} MiB"
        card = f"{properties.name} (sm_{properties.major}{properties.minor}, {cache})"
    lines = [
        "## Kernels, timed",
        "",
        f"`eyas bench kernels` on {card}, torch {torch.__version__}, CUDA {torch.version.cuda}, triton "
        f"{triton.__version__}. Medians of up to {REPEATS} calls between CUDA events, inputs rotating through more "
        "than the L2. The floor is the time a copy needs for the bytes that have to be moved once, at the bandwidth "
        "measured in the same run. A kernel that differs from its reference is not timed.",
        "",
        "| target | op | us | GB/s | times the floor | reference us | torch.compile us | others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in timings:
        if x.fault:
            lines.append(f"| {x.shape} | {x.case} | wrong: {x.fault} | | | | | |")
            continue
        others = ", ".join(f"{name} {us:.0f} us" for name, us in (x.rivals_us or {}).items())
        numbers = [_number(x.kernel_us), _number(x.gigabytes_per_second), _number(x.over_floor, 2)]
        numbers += [_number(x.reference_us), _number(x.compiled_us), others]
        lines.append(f"| {x.shape} | {x.case} | {' | '.join(numbers)} |")
    lines.append("")
    lines += [
        f"{shape}: build, greedy verification and compaction take {total:.0f} us a round."
        for shape, total in overheads_us(timings).items()
    ]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"
