"""`eyas bench NAME`: side-by-side measurements. One file per measurement; its `run` is the verb."""

from importlib import import_module

import typer

BENCHES = {
    "decode": "eyas.scripts.bench_decode",
}


def add_bench_verbs(app: typer.Typer) -> None:
    """Register the group `bench` with one verb per measurement."""
    group = typer.Typer(help="Measure side by side, as ratios.", no_args_is_help=True, add_completion=False)
    for name, module in BENCHES.items():
        group.command(name)(import_module(module).run)
    app.add_typer(group, name="bench")
