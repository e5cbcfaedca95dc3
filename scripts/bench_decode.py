"""`eyas bench decode HEAD --target MODEL`: all ways of decoding, and transformers', on the same prompts in turn."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.scripts.bench_methods import PLAIN, Compared, compared_methods
from eyas.scripts.decoding import (
    DtypeOption,
    HeadArgument,
    KvDtypeOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopPOption,
    check_sampling,
)
from eyas.scripts.options import DeviceOption, JsonOption

if TYPE_CHECKING:
    from eyas.inference.decode_bench import BenchEntry, Efficiency

WIDTH = 130  # of the table where nobody's terminal limits it


def run(
    head: HeadArgument,
    target: TargetOption = None,
    prompts: Annotated[str, typer.Option(help="A JSONL file of messages, or bundled:eval.")] = "bundled:eval",
    per_set: Annotated[int, typer.Option(help="Prompts taken of each category.", min=1)] = 2,
    draft_model: Annotated[str | None, typer.Option(help="A small model with the target's tokenizer, too.")] = None,
    trees: Annotated[
        list[str] | None, typer.Option("--tree", help="Trees of the head; repeatable (default: some of every kind).")
    ] = None,
    batches: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", help="Prompts side by side; repeatable. More than a set has: of all sets together.", min=1
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--method", help="Only these methods beside plain; repeatable.")
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option("--vllm-python", envvar="EYAS_VLLM_PYTHON", help="A python that has vLLM: compare with it, too."),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_new_tokens: TokensOption = 64,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    kv_dtype: KvDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare ways of decoding."""
    from eyas.inference.decode_bench import BenchPlan, bench_decoding
    from eyas.train.progress import Reporter

    sampling, sizes = check_sampling(temperature, 0, top_p, seed), tuple(batches or [1])
    reporter = Reporter(quiet=as_json)
    compared = compared_methods(
        head, target, draft_model=draft_model, trees=trees, only=only, prompts=prompts, per_set=per_set,
        batch=max(sizes), dtype=dtype, device=device, kv_dtype=kv_dtype, vllm_python=vllm_python,
        max_new_tokens=max_new_tokens, greedy=temperature == 0, reporter=reporter,
    )  # fmt: skip
    plan = BenchPlan(sizes, max_new_tokens, compared.runtime.stop_ids, sampling)
    try:
        with reporter.bar("tok") as bar:
            entries = bench_decoding(
                compared.methods,
                compared.sets,
                plan,
                lambda done, total, tokens: bar.update("decoding", done, total, tokens),
            )
    finally:
        compared.close()
    order = list(compared.methods)
    entries.sort(key=lambda entry: (entry.batch, entry.prompt_set, order.index(entry.method)))
    if as_json:
        typer.echo(json.dumps(_report(head, compared, entries, dtype=dtype, kv_dtype=kv_dtype), indent=2))
    else:
        _print(entries)


def _report(
    head: str, compared: Compared, entries: "list[BenchEntry]", *, dtype: str, kv_dtype: str | None
) -> dict[str, Any]:
    import torch

    efficiency = _efficiencies(entries)
    rows = [
        {
            **asdict(entry),
            "tokens_per_second": entry.tokens_per_second,
            "efficiency": None if (known := efficiency[number]) is None else asdict(known),
        }
        for number, entry in enumerate(entries)
    ]
    return {
        "target": compared.runtime.target,
        "head": head,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "threads": torch.get_num_threads(),
        "latency": None if compared.latency is None else json.loads(compared.latency.as_json()),
        "results": rows,
    }


def _plain(entries: "list[BenchEntry]") -> "dict[tuple[str, int], BenchEntry]":
    return {(entry.prompt_set, entry.batch): entry for entry in entries if entry.method == PLAIN}


def _efficiencies(entries: "list[BenchEntry]") -> "list[Efficiency | None]":
    from eyas.inference.decode_bench import Efficiency

    plain = _plain(entries)
    return [Efficiency.of(entry, plain[entry.prompt_set, entry.batch]) for entry in entries]


def _print(entries: "list[BenchEntry]") -> None:
    from rich.console import Console
    from rich.table import Table

    plain = _plain(entries)
    table = Table(title="decoding, interleaved", title_justify="left")
    names = ("prompts", "method")
    numbers = ("batch", "tau", "drafted", "tokens/s", "against plain", "verify", "draft", "efficiency", "same as plain")
    for column in (*names, *numbers):
        table.add_column(column, justify="left" if column in names else "right")
    for entry, known in zip(entries, _efficiencies(entries), strict=True):
        alone = plain[entry.prompt_set, entry.batch]
        costs = ("", "", "") if known is None else (known.verify_cost, known.draft_cost, known.efficiency)
        table.add_row(
            f"{entry.prompt_set} ({entry.prompts})",
            entry.method,
            str(entry.batch),
            *("" if value is None else f"{value:.2f}" for value in (entry.tau, entry.drafted)),
            f"{entry.tokens_per_second:.1f}",
            f"{entry.tokens_per_second / alone.tokens_per_second:.2f}x",
            *(cost if isinstance(cost, str) else f"{cost:.2f}" for cost in costs),
            f"{entry.same} of {entry.prompts}",
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(
        "verify, draft: costs of a round relative to a plain token; efficiency: speed-up of decoding alone over "
        "tau / (verify + draft)",
        style="dim",
    )
