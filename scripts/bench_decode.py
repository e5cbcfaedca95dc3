"""`eyas bench decode HEAD --target MODEL`: all ways of decoding, and transformers', on the same prompts in turn."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.scripts.decoding import (
    DtypeOption,
    HeadArgument,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopPOption,
    check_sampling,
    load_runtime,
    parse_tree,
)
from eyas.scripts.options import JsonOption

if TYPE_CHECKING:
    from eyas.inference.decode_bench import BenchEntry, Method

PLAIN = "plain"


def run(
    head: HeadArgument,
    target: TargetOption = None,
    prompts: Annotated[str, typer.Option(help="A JSONL file of messages, or bundled:eval.")] = "bundled:eval",
    per_set: Annotated[int, typer.Option(help="Prompts taken of each category.")] = 2,
    draft_model: Annotated[str | None, typer.Option(help="A small model with the target's tokenizer, too.")] = None,
    trees: Annotated[list[str] | None, typer.Option("--tree", help="Trees of the head; repeatable.")] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Prompts side by side; repeatable.")] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_new_tokens: TokensOption = 64,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Compare ways of decoding."""
    from eyas.data.sources import read_prompts
    from eyas.inference.decode_bench import BenchPlan, bench_decoding
    from eyas.train.progress import Reporter

    sampling, sizes = check_sampling(temperature, 0, top_p, seed), tuple(batches or [1])
    methods, runtime = _methods(head, target, draft_model, trees or [], dtype=dtype, batch=max(sizes))
    sets: dict[str, list[tuple[int, ...]]] = {}
    for prompt in read_prompts(prompts):
        taken = sets.setdefault(prompt.category, [])
        if len(taken) < per_set:
            taken.append(tuple(runtime.template.ids(list(prompt.messages), add_generation_prompt=True)))
    plan = BenchPlan(sizes, max_new_tokens, runtime.stop_ids, sampling)
    reporter = Reporter(quiet=as_json)
    with reporter.bar("tok") as bar:
        entries = bench_decoding(
            methods, sets, plan, lambda done, total, tokens: bar.update("decoding", done, total, tokens)
        )
    if as_json:
        rows = [{**asdict(entry), "tokens_per_second": entry.tokens_per_second} for entry in entries]
        typer.echo(json.dumps({"target": runtime.target, "head": head, "dtype": dtype, "results": rows}, indent=2))
    else:
        _print(entries)


def _methods(
    head: str, target: str | None, draft_model: str | None, trees: list[str], *, dtype: str, batch: int
) -> "tuple[dict[str, Method], Any]":
    """Return the methods by name, plain decoding first, and the runtime that lends them template and stop tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from eyas.inference.decode_bench import EngineMethod, LibraryMethod
    from eyas.inference.eagle_drafter import EagleDrafter
    from eyas.inference.engine import Engine
    from eyas.inference.model_drafter import ModelDrafter
    from eyas.inference.prompt_lookup import PromptLookup
    from eyas.models.bundled import resolve_model
    from eyas.models.target import Target

    shapes = {text: parse_tree(text) for text in trees or ["chain:5", "static", "dynamic:5,8,16"]}
    runtime = load_runtime(head, target, next(iter(shapes)), dtype=dtype, batch=batch)
    loaded, drafter = runtime.engine.target, runtime.engine.drafter

    def ours(way: Any) -> EngineMethod:
        return EngineMethod(Engine(loaded, drafter=way, batch=batch))

    methods: dict[str, Method] = {PLAIN: ours(None), "lookup": ours(PromptLookup(8, 3))}
    if draft_model is not None:
        small = Target.load(draft_model, dtype=loaded.dtype, device=str(loaded.device)).pack(rows=1)
        methods["draft model"] = ours(ModelDrafter(small, 5))
    if isinstance(drafter, EagleDrafter):
        for text, shape in shapes.items():
            methods[text] = ours(EagleDrafter(drafter.head, shape))
    untouched: Any = AutoModelForCausalLM.from_pretrained(resolve_model(runtime.target), dtype=getattr(torch, dtype))
    untouched = untouched.to(loaded.device).eval()
    methods["transformers"] = LibraryMethod(untouched)
    methods["transformers lookup"] = LibraryMethod(untouched, lookup=8)
    return methods, runtime


def _print(entries: "list[BenchEntry]") -> None:
    from rich.console import Console
    from rich.table import Table

    plain = {(entry.prompt_set, entry.batch): entry for entry in entries if entry.method == PLAIN}
    table = Table(title="decoding, interleaved", title_justify="left")
    for column in ("prompts", "batch", "method", "tau", "tokens/s", "against plain", "same as plain"):
        table.add_column(column, justify="left" if column in ("prompts", "method") else "right")
    for entry in sorted(entries, key=lambda entry: (entry.batch, entry.prompt_set)):
        table.add_row(
            f"{entry.prompt_set} ({entry.prompts})",
            str(entry.batch),
            entry.method,
            "" if entry.tau is None else f"{entry.tau:.2f}",
            f"{entry.tokens_per_second:.1f}",
            f"{entry.tokens_per_second / plain[entry.prompt_set, entry.batch].tokens_per_second:.2f}x",
            f"{entry.same} of {entry.prompts}",
        )
    Console(highlight=False).print(table)
