"""`eyas bench NAME`: side-by-side measurements. One file per measurement; its `run` is the verb."""

from importlib import import_module
from pathlib import Path

import typer

BENCHES = {
    "kernels": "eyas.scripts.bench_kernels",
    "extract": "eyas.scripts.bench_extract",
    "generate": "eyas.scripts.bench_generate",
    "train": "eyas.scripts.bench_train",
    "decode": "eyas.scripts.bench_decode",
    "copies": "eyas.scripts.bench_copies",
}


def add_bench_verbs(app: typer.Typer) -> None:
    """Register the group `bench` with one verb per measurement."""
    group = typer.Typer(help="Measure side by side, as ratios.", no_args_is_help=True, add_completion=False)
    for name, module in BENCHES.items():
        group.command(name)(import_module(module).run)
    app.add_typer(group, name="bench")


def write_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers of section `name` of a Markdown file, at its end if it has none; written whole."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    page = path.read_text() if path.exists() else "# Benchmarks\n"
    before, found, rest = page.partition(begin)
    after = rest.partition(end)[2] if found else ""
    if not found:
        before = before.rstrip("\n") + "\n\n"
        after = "\n"
    temporary = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
    temporary.replace(path)
