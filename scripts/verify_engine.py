"""`eyas verify-engine HEAD --engine vllm --target MODEL --python ENV/bin/python`: the head in a real engine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.options import JsonOption


def verify_engine(
    head: Annotated[str, typer.Argument(help="The head: a folder or a Hub id.", metavar="HEAD")],
    target: Annotated[str, typer.Option("--target", help="The target it drafts for.")],
    python: Annotated[
        Path,
        typer.Option("--python", envvar="EYAS_VLLM_PYTHON", help="A python that has vLLM (scripts/vllm_cpu_env.sh)."),
    ],
    engine: Annotated[str, typer.Option("--engine", help="The engine: vllm.")] = "vllm",
    prompts: Annotated[str, typer.Option("--prompts", help="A JSONL file, or bundled:eval.")] = "bundled:eval",
    count: Annotated[int, typer.Option("--count", help="How many of them.", min=1)] = 24,
    depth: Annotated[int, typer.Option("--depth", help="Drafted tokens a round.", min=1)] = 5,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    as_json: JsonOption = False,
) -> None:
    """Serve a head in a real engine and compare drafts, acceptance and text; exit code 1 when they differ."""
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.encode import ChatTemplate
    from eyas.data.sources import read_prompts
    from eyas.models.head_files import read_head_files
    from eyas.models.hub import resolve_head
    from eyas.models.target import load_tokenizer
    from eyas.train.verify_engine import record_parity, report_parity, verify_vllm

    if engine != "vllm":
        raise UserError(f"--engine takes vllm, given {engine!r}; other engines are judged by eyas doctor.")
    disable_progress_bar()
    folder = resolve_head(head)
    template = ChatTemplate(load_tokenizer(target), read_head_files(folder).card.get("template_arguments", {}))
    ids = [template.ids(list(prompt.messages), add_generation_prompt=True) for prompt in read_prompts(prompts)]
    chosen = ids[:: max(1, len(ids) // count)][:count]
    parity = verify_vllm(folder, target, python, prompts=chosen, depth=depth, max_new_tokens=max_new_tokens)
    if Path(head).is_dir():  # what a Hub id led to is a cache that others read too
        record_parity(folder, parity)
        report_parity(folder, parity)
    if as_json:
        typer.echo(json.dumps(parity.as_dict(), indent=2))
    else:
        typer.echo(
            f"{parity.engine} {parity.version}: {parity.rounds_equal} of {parity.rounds_compared} rounds drafted "
            f"alike, mean acceptance length {parity.tau:.3f} against {parity.our_tau:.3f} here, {parity.texts_equal} "
            f"of {parity.prompts} texts equal to plain decoding"
        )
    if not parity.passed:
        raise typer.Exit(1)
