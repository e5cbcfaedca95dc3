"""What `eyas generate` and `eyas chat` share: their options, what they load, and how a result reads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.models.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from eyas.data.encode import ChatTemplate
    from eyas.inference.draft import TreeMaker
    from eyas.inference.engine import Engine, Generation, GenerationRequest
    from eyas.inference.sampling import Sampling
    from eyas.inference.spelling import Spelling

HeadArgument = Annotated[
    str,
    typer.Argument(
        metavar="HEAD",
        help="A folder or Hub id; or `none` (plain decoding), `lookup` (prompt lookup), `model:NAME` (a small model).",
    ),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="A model folder, a Hub id or a bundled name (default: the head's own).")
]
TreeOption = Annotated[
    str,
    typer.Option(help="chain:DEPTH, dynamic:DEPTH,TOP_K,NODES or static (EAGLE-1's); lookup and model read chain."),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Sample among so many tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")]
SeedOption = Annotated[int, typer.Option(help="Fixes every random choice.")]
TokensOption = Annotated[int, typer.Option(help="The longest reply.")]
DtypeOption = Annotated[str, typer.Option(help="float32 or bfloat16, of the target; heads run in bfloat16.")]
DEFAULT_TREE = "dynamic:5,8,16"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Runtime:
    """A loaded target with its drafter and chat template."""

    engine: "Engine"
    template: "ChatTemplate"
    stop_ids: frozenset[int]
    target: str
    tree: str

    def prompt_ids(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Return a conversation as it is served, up to where the reply begins."""
        return tuple(self.template.ids(list(messages), add_generation_prompt=True))

    def spelling(self) -> "Spelling":
        """Return what turns the tokens of one reply into text as they come."""
        from eyas.inference.spelling import Spelling

        assert self.engine.decode is not None
        return Spelling(self.engine.decode)


def parse_tree(text: str) -> "TreeMaker":
    """Return the tree maker of an option; raises UserError naming what is allowed."""
    from eyas.inference.draft import TREES, ChainTree, DynamicTree, StaticTree

    name, _, rest = text.partition(":")
    try:
        numbers = [int(number) for number in rest.split(",")] if rest else []
    except ValueError:
        numbers = [-1] * 9
    if name == "static" and not numbers:
        return StaticTree()
    if name == "chain" and len(numbers) == 1:
        return ChainTree(*numbers)
    if name == "dynamic" and len(numbers) == 3:
        return DynamicTree(*numbers)
    raise UserError(
        f"--tree {text!r} is none of chain:DEPTH, dynamic:DEPTH,TOP_K,NODES and static; for example {DEFAULT_TREE}."
        f"{nearest(name, TREES)}"
    )


def load_runtime(head: str, target: str | None, tree: str, *, dtype: str, batch: int = 1) -> Runtime:
    """Load target, drafter and chat template; raises UserError where they do not fit."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.encode import ChatTemplate
    from eyas.data.synthesize import stop_token_ids
    from eyas.inference.engine import Engine
    from eyas.models.hub import resolve_head
    from eyas.models.target import Target, load_tokenizer

    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} must be {' or '.join(DTYPES)}.")
    disable_progress_bar()
    maker = parse_tree(tree)
    folder = None if head in ("none", "lookup") or head.startswith("model:") else resolve_head(head)
    made_for = _metadata(folder)
    name = target or made_for.get("target")
    if name is None:
        raise UserError("name the target: --target MODEL (a model folder, a Hub id or a bundled name).")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafter, aux_layers, rows = _drafter(head, folder, maker, dtype=dtype, device=device)
    loaded = Target.load(name, dtype=getattr(torch, dtype), aux_layers=aux_layers, device=device).pack(rows=rows)
    tokenizer = load_tokenizer(name)
    template = ChatTemplate(tokenizer, made_for.get("template_arguments") or {})
    engine = Engine(
        loaded,
        drafter=drafter,
        batch=batch,
        decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
    )
    return Runtime(engine, template, stop_token_ids(template, loaded), name, "plain" if head == "none" else tree)


def check_sampling(temperature: float, top_k: int, top_p: float, seed: int) -> "Sampling":
    """Return the settings; raises UserError where one is out of range."""
    from eyas.inference.sampling import Sampling

    return Sampling(temperature, top_k, top_p, seed)


def stream_reply(runtime: Runtime, request: "GenerationRequest", console: "Console | None") -> "Generation":
    """Return the reply to one request, shown on a console while it is written."""
    from contextlib import nullcontext

    from eyas.scripts.terminal import LiveReply

    runtime.engine.session().check(request)
    spelling = runtime.spelling()
    with LiveReply(console) if console else nullcontext() as shown:
        for event in runtime.engine.stream([request]):
            if shown:
                shown.add(event.round, spelling.add(event.round))
    assert event.finished is not None
    return event.finished


def print_summary(generation: "Generation") -> None:
    """Print the line about a reply to stderr."""
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False).print(summary_line(generation), style="dim", soft_wrap=True)


def describe(generation: "Generation", *, trace: bool = True) -> dict[str, Any]:
    """Return a generation as JSON: text, numbers, and what every round drafted, kept and emitted."""
    stats = generation.stats.as_dict()
    marks = [False]
    for made in generation.rounds:
        marks += [True] * made.accepted + [False] * (len(made.tokens) - made.accepted)
    fields: dict[str, Any] = {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "accepted": marks,
        "finish_reason": generation.finish_reason,
        **{name: stats[name] for name in ("tau", "survival", "alpha")},
        "tokens": len(generation.token_ids),
        "seconds": generation.seconds,
        "prefill_seconds": generation.prefill_seconds,
        "tokens_per_second": len(generation.token_ids) / generation.seconds,
        "rounds": [
            {"drafted": made.drafted, "accepted": made.accepted, "tokens": list(made.tokens)}
            for made in generation.rounds
        ],
    }
    if generation.logprobs is not None:
        fields["logprobs"] = list(generation.logprobs)
    return fields if trace else {name: value for name, value in fields.items() if name != "rounds"}


def summary_line(generation: "Generation") -> str:
    """Return one line about a reply: acceptance, speed, length and why it ended."""
    speed = len(generation.token_ids) / generation.seconds
    return (
        f"tau {generation.stats.tau:.2f} | {speed:.1f} tokens/s | {len(generation.token_ids)} tokens in "
        f"{generation.stats.rounds + 1} target forwards | {generation.finish_reason}"
    )


def _metadata(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / "eyas.json"
    if path is None or not path.is_file():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _drafter(
    head: str, folder: Path | None, maker: "TreeMaker", *, dtype: str, device: str
) -> tuple[Any, tuple[int, ...], int]:
    """Return (the drafter, the aux layers it reads, how many tokens a target forward carries)."""
    import torch

    from eyas.inference.eagle_drafter import EagleDrafter
    from eyas.inference.model_drafter import ModelDrafter
    from eyas.inference.prompt_lookup import PromptLookup
    from eyas.models.checkpoint import load_head
    from eyas.models.packed_linear import pack_linears
    from eyas.models.target import Target

    if head == "none":
        return None, (), 1
    if head == "lookup":
        return PromptLookup(maker.depth), (), maker.depth + 1
    if folder is None:
        small = Target.load(head.removeprefix("model:"), dtype=getattr(torch, dtype), device=device)
        return ModelDrafter(small.pack(rows=1), maker.depth), (), maker.depth + 1
    loaded = load_head(folder, dtype=torch.bfloat16, device=device)
    pack_linears(loaded, rows=maker.max_nodes)
    return EagleDrafter(loaded, maker), loaded.config.aux_layers, maker.max_nodes
