"""`eyas chat HEAD --target MODEL`: a conversation in the terminal, drafted tokens in colour, numbers live."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.decoding import (
    DtypeOption,
    HeadArgument,
    KvDtypeOption,
    Runtime,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TopPOption,
    check_sampling,
    describe,
    load_runtime,
    print_summary,
    stream_reply,
)
from eyas.scripts.options import DeviceOption
from eyas.scripts.tree_option import DEFAULT_TREE, TreeOption

if TYPE_CHECKING:
    from rich.console import Console

    from eyas.inference.engine import Generation
    from eyas.inference.sampling import Sampling

HELP = "/reset forgets the conversation, /exit or end of input leaves."


def chat(
    head: HeadArgument,
    target: TargetOption = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    tree: TreeOption = DEFAULT_TREE,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_new_tokens: TokensOption = 512,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    kv_dtype: KvDtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per reply, with every round.")] = False,
) -> None:
    """Talk to a target through a draft head."""
    from rich.console import Console

    sampling = check_sampling(temperature, top_k, top_p, seed)
    runtime = load_runtime(head, target, tree, dtype=dtype, device=device, kv_dtype=kv_dtype)
    console, notes = Console(highlight=False, markup=False), Console(stderr=True, highlight=False, markup=False)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if sys.stdin.isatty():
        notes.print(f"{runtime.target}, {runtime.tree}. {HELP}", style="dim", soft_wrap=True)
    for said in _turns(console):
        if said == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": said})
        try:
            generation = _reply(runtime, messages, sampling, max_new_tokens, None if as_json else console)
        except UserError as error:  # the conversation has outgrown the target: this turn is not part of it
            messages.pop()
            notes.print(f"{error} {HELP}", style="red", soft_wrap=True)
            continue
        messages.append({"role": "assistant", "content": generation.text or ""})
        if as_json:
            typer.echo(json.dumps({"prompt": said, **describe(generation)}))
        else:
            print_summary(generation)


def _turns(console: "Console") -> Iterator[str]:
    """Yield what the user says, without empty lines, until the end."""
    while True:
        try:
            said = console.input("[bold]> ") if sys.stdin.isatty() else input()
        except (EOFError, KeyboardInterrupt):
            return
        if said.strip() == "/exit":
            return
        if said.strip():
            yield said.strip()


def _reply(
    runtime: Runtime, messages: list[dict[str, str]], sampling: "Sampling", limit: int, console: "Console | None"
) -> "Generation":
    """Return the reply to a conversation, shown on a console while it is written."""
    from eyas.inference.engine import GenerationRequest

    ids, positions = runtime.prompt_ids(messages), runtime.engine.target.position_limit
    if len(ids) >= positions:
        raise UserError(f"the conversation fills the target's {positions} positions.")
    request = GenerationRequest(ids, min(limit, positions - len(ids)), runtime.stop_ids, sampling)
    return stream_reply(runtime, request, console)
