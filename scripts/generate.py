"""`eyas generate HEAD --target MODEL`: replies to prompts, drafted tokens marked, acceptance and speed beside them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

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
    summary_line,
)
from eyas.scripts.options import DeviceOption, JsonOption
from eyas.scripts.tree_option import DEFAULT_TREE, TreeOption

if TYPE_CHECKING:
    from eyas.inference.engine import Generation, GenerationRequest
    from eyas.train.progress import Reporter


@dataclass(frozen=True)
class _Prompt:
    id: str
    messages: list[dict[str, str]]


def generate(
    head: HeadArgument,
    target: TargetOption = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What the user says; repeatable.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A JSONL file of messages, or bundled:eval.")] = None,
    tree: TreeOption = DEFAULT_TREE,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_new_tokens: TokensOption = 128,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the reply; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Write on past the end of the turn.")] = False,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages all earlier tokens.")] = 1.0,
    logprobs: Annotated[bool, typer.Option(help="Log-probabilities of the tokens (with --json).")] = False,
    batch: Annotated[int, typer.Option(help="How many prompts run side by side.")] = 1,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    kv_dtype: KvDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts with a target and a draft head."""
    from rich.console import Console

    from eyas.inference.engine import GenerationRequest
    from eyas.inference.penalties import Penalties
    from eyas.train.progress import Reporter

    asked = list(_prompts(prompt or [], prompts))
    sampling, penalties = check_sampling(temperature, top_k, top_p, seed), Penalties(repetition_penalty)
    runtime = load_runtime(
        head, target, tree, dtype=dtype, device=device, kv_dtype=kv_dtype, batch=batch, reporter=Reporter(quiet=as_json)
    )
    requests = [
        GenerationRequest(
            runtime.prompt_ids(one.messages),
            max_new_tokens,
            runtime.stop_ids,
            sampling,
            stop_strings=tuple(stop or ()),
            ignore_eos=ignore_eos,
            penalties=penalties,
            logprobs=logprobs,
        )
        for one in asked
    ]
    if as_json:
        generations = _run(runtime, requests, Reporter(quiet=True))
        typer.echo(json.dumps(_report(runtime, head, asked, requests, generations), indent=2))
    elif len(requests) == 1 and not stop:
        print_summary(stream_reply(runtime, requests[0], Console(highlight=False, markup=False)))
    else:
        _print(asked, _run(runtime, requests, Reporter()), runtime)


def _prompts(texts: list[str], source: str | None) -> Iterator[_Prompt]:
    from eyas.data.sources import read_prompts

    if not texts and source is None:
        raise UserError("there is nothing to answer; give --prompt TEXT or --prompts FILE.")
    for number, text in enumerate(texts):
        if not text.strip():
            raise UserError("a --prompt is empty; give it some text.")
        yield _Prompt(f"prompt-{number}", [{"role": "user", "content": text}])
    for one in read_prompts(source) if source else ():
        yield _Prompt(one.id, list(one.messages))


def _run(runtime: Runtime, requests: "list[GenerationRequest]", reporter: "Reporter") -> "list[Generation]":
    finished: dict[int, Generation] = {}
    for request in requests:
        runtime.engine.session().check(request)
    with reporter.bar("tok") as bar:
        for event in runtime.engine.stream(requests):
            if event.finished:
                finished[event.number] = event.finished
            bar.update("decoding", len(finished), len(requests), len(event.round.tokens))
    return [finished[number] for number in range(len(requests))]


def _report(
    runtime: Runtime,
    head: str,
    asked: list[_Prompt],
    requests: "list[GenerationRequest]",
    generations: "list[Generation]",
) -> dict[str, Any]:
    tokens = sum(len(generation.token_ids) for generation in generations)
    rounds = sum(generation.stats.rounds for generation in generations)
    accepted = sum(generation.stats.accepted for generation in generations)
    return {
        "target": runtime.target,
        "head": head,
        "tree": runtime.tree,
        "tau": 1 + accepted / rounds if rounds else 1.0,
        "tokens": tokens,
        "results": [
            {"id": one.id, "prompt_tokens": len(request.prompt_ids), **describe(generation)}
            for one, request, generation in zip(asked, requests, generations, strict=True)
        ],
    }


def _print(asked: list[_Prompt], generations: "list[Generation]", runtime: Runtime) -> None:
    """Print all replies, drafted tokens in colour, each followed by its numbers."""
    from rich.console import Console
    from rich.text import Text

    from eyas.inference.request import Round
    from eyas.scripts.terminal import DRAFTED

    console = Console(highlight=False, markup=False)
    for one, generation in zip(asked, generations, strict=True):
        assert generation.text is not None
        spelling, reply = runtime.spelling(), Text()
        for made in (Round(0, 0, generation.token_ids[:1]), *generation.rounds):
            for piece in spelling.add(made):
                reply.append(piece.text, style=DRAFTED if piece.drafted else "")
        console.print(Text(f"[{one.id}] {one.messages[-1]['content']}", style="bold"), soft_wrap=True)
        console.print(reply[: len(generation.text)], soft_wrap=True)
        console.print(Text(summary_line(generation), style="dim"), soft_wrap=True)
        console.print()
