"""`eyas bench kernels`: every kernel on this machine's GPU against its reference, or compiled only, without a GPU."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.bench import write_section
from eyas.scripts.options import JsonOption

if TYPE_CHECKING:
    from eyas.kernels.aot import CompileReport

PAGE = Path("docs/benchmarks.md")


def run(
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile for sm_80, sm_90 and sm_100; needs no GPU.")
    ] = False,
    page: Annotated[Path, typer.Option("--page", help="The Markdown file whose section is rewritten.")] = PAGE,
    as_json: JsonOption = False,
) -> None:
    """Time the kernels on a GPU, or compile them without one, and write the table."""
    if compile_only:
        _compile_only(page, as_json)
    else:
        _on_device(page, as_json)


def _compile_only(page: Path, as_json: bool) -> None:
    from eyas.kernels.aot import all_builds, capabilities, compile_ahead, why_not
    from eyas.train.progress import Reporter

    if reason := why_not():
        raise UserError(f"kernels cannot be compiled here: {reason}.")
    reporter = Reporter()
    pairs = [(build, capability) for build in all_builds().values() for capability in capabilities(build)]
    reports = []
    with reporter.bar("builds") as bar:
        for build, capability in pairs:
            reports.append(compile_ahead(build, capability))
            bar.update("compile", len(reports), len(pairs), 1, build.name)
    write_section(page, "kernels compiled", compile_table(reports))
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        typer.echo(compile_table(reports))
    faults = [f"{report.build} on sm_{report.capability}: {report.fault}" for report in reports if report.fault]
    for fault in faults:
        reporter.error(fault)
    if faults:
        raise typer.Exit(1)


def compile_table(reports: "list[CompileReport]") -> str:
    """Return the section: one line per build, with a column of values per architecture."""
    import torch
    import triton

    from eyas.kernels.aot import CAPABILITIES, SHARED_LIMIT

    by_build: dict[str, dict[int, CompileReport]] = {}
    for report in reports:
        by_build.setdefault(report.build, {})[report.capability] = report
    spilled = sum(report.spilled_bytes > 0 for report in reports)
    over = sum(report.shared_bytes > SHARED_LIMIT[report.capability] for report in reports)
    lines = [
        "## Kernels, compiled ahead of time",
        "",
        f"`eyas bench kernels --compile-only`, triton {triton.__version__}, torch {torch.__version__}, no GPU needed: "
        f"{len(by_build)} builds for {', '.join(f'sm_{c}' for c in CAPABILITIES)}. {spilled} spill registers, {over} "
        "exceed the shared memory of their card. Registers are per thread, shared memory in KiB per block, the last "
        "column counts tensor-core instructions in the PTX. A dash: that card lacks the types (fp8).",
        "",
        "These are compiled, not run: nothing has been timed on a GPU unless a section of timings stands on this page "
        "(`eyas bench kernels` on a machine with one writes it).",
        "",
        "| build | registers | spilled bytes | shared KiB | tensor cores |",
        "|---|---|---|---|---|",
    ]
    for name, of_card in by_build.items():
        shown = {capability: _columns(report) for capability, report in of_card.items()}
        cards = [shown.get(capability, ("-",) * 4) for capability in CAPABILITIES]
        cells = [values[0] if len(set(values)) == 1 else " / ".join(values) for values in zip(*cards, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _columns(report: "CompileReport") -> tuple[str, ...]:
    shared = f"{report.shared_bytes / 1024:.1f}"
    return str(report.registers), str(report.spilled_bytes), shared, str(report.tensor_core_instructions)


def _on_device(page: Path, as_json: bool) -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("no CUDA device here: run `eyas bench kernels --compile-only`, or go to a machine with a GPU.")
    from eyas.scripts.bench_kernels_rounds import measure_rounds, rounds_table
    from eyas.scripts.bench_kernels_timing import event_median_us, measure, overheads_us, timing_table
    from eyas.train.progress import Reporter

    reporter, device = Reporter(), torch.device("cuda")
    timings = measure(device, reporter)
    write_section(page, "kernels timed", timing_table(timings))
    rounds = measure_rounds(device, reporter, timer=lambda stage: event_median_us(stage, [()]))
    page_of_rounds = rounds_table(rounds, overheads_us(timings))
    write_section(page, "rounds timed", page_of_rounds)
    if as_json:
        typer.echo(json.dumps({"kernels": [asdict(x) for x in timings], "rounds": asdict(rounds)}, indent=2))
    else:
        typer.echo(f"{timing_table(timings)}\n\n{page_of_rounds}")
    wrong = [x for x in timings if x.fault]
    for timing in wrong:
        reporter.error(f"{timing.case}: {timing.fault}; not timed")
    if wrong:
        raise typer.Exit(1)
