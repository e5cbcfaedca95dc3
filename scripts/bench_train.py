"""`eyas bench train`: the training step beside a plain row-by-row loop of the same objective."""

import json
from typing import Annotated

import typer

from eyas.scripts.options import JsonOption


def run(
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed steps of each loop.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Time the training step on a 135M target's dimensions beside a plain row-by-row loop of the same objective."""
    from eyas.train.bench import CASES, bench_training
    from eyas.train.progress import Reporter

    result = bench_training(CASES, repeats=repeats, say=Reporter().say)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(
        f"{result['rows']} rows of {result['row_length']} tokens, bf16 autocast, {result['threads']} threads, torch "
        f"{result['torch']}; every slot supervised, optimizer step included, target forward excluded"
    )
    head = ("draft ids", "steps", "tokens/s", "plain", "ratio", "of matmul", "GFLOP/s", "peak GiB", "plain GiB")
    typer.echo("".join(f"{name:>11}" for name in head))
    for case in result["cases"]:
        cells = (
            f"{case['draft_vocab_size']}", f"{case['ttt_steps']}", f"{case['tokens_per_second']:.0f}",
            f"{case['plain_tokens_per_second']:.0f}", f"{case['ratio']:.2f}", f"{case['utilisation']:.0%}",
            f"{case['matmul_gflops']:.0f}", f"{case['peak_gib']:.2f}", f"{case['plain_peak_gib']:.2f}",
        )  # fmt: skip
        typer.echo("".join(f"{cell:>11}" for cell in cells))
