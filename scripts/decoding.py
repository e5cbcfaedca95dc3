"""What `eyas generate` and `eyas chat` share: their options, what they load, and how a result reads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.models.errors import UserError
from eyas.scripts.tree_option import AskedTree, parse_tree

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from eyas.data.encode import ChatTemplate
    from eyas.inference.calibration import Calibration
    from eyas.inference.engine import Engine, Generation, GenerationRequest
    from eyas.inference.latency import LatencyTable
    from eyas.inference.sampling import Sampling
    from eyas.inference.spelling import Spelling
    from eyas.models.draft_head import DraftHead
    from eyas.models.target import Target
    from eyas.train.progress import Reporter

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
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Sample among so many tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")]
SeedOption = Annotated[int, typer.Option(help="Fixes every random choice.")]
TokensOption = Annotated[int, typer.Option(help="The longest reply.")]
DtypeOption = Annotated[str, typer.Option(help="float32 or bfloat16, of the target; heads run in bfloat16.")]
DTYPES = ("float32", "bfloat16")
KvDtypeOption = Annotated[
    str | None, typer.Option(help="fp8: the target's KV cache in 8 bits (default: in the target's dtype).")
]
KV_DTYPES = {"fp8": "float8_e4m3fn"}


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


def load_runtime(
    head: str,
    target: str | None,
    tree: str,
    *,
    dtype: str,
    device: str = "auto",
    kv_dtype: str | None = None,
    batch: int = 1,
    reporter: "Reporter | None" = None,
) -> Runtime:
    """Load target, drafter and chat template; raises UserError where they do not fit."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.encode import ChatTemplate
    from eyas.data.synthesize import stop_token_ids
    from eyas.inference.eagle_drafter import EagleDrafter
    from eyas.inference.engine import Engine
    from eyas.models.checkpoint import load_head
    from eyas.models.packed_linear import pack_linears
    from eyas.models.target import Target, load_tokenizer
    from eyas.train.machine import chosen_device
    from eyas.train.progress import Reporter

    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} must be {' or '.join(DTYPES)}.")
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise UserError(f"--kv-dtype {kv_dtype!r} must be {' or '.join(KV_DTYPES)}; without it the target's is kept.")
    disable_progress_bar()
    asked, folder = parse_tree(tree), head_folder(head)
    card = head_card(folder)
    name = target or card.get("target")
    if name is None:
        raise UserError("name the target: --target MODEL (a model folder, a Hub id or a bundled name).")
    device = chosen_device(device)
    cache_dtype = None if kv_dtype is None else getattr(torch, KV_DTYPES[kv_dtype])
    rows = 1 if head == "none" else asked.rows
    eagle = None if folder is None else load_head(folder, dtype=torch.bfloat16, device=device)
    aux_layers = eagle.config.aux_layers if eagle is not None else ()
    loaded = Target.load(name, dtype=getattr(torch, dtype), aux_layers=aux_layers, device=device).pack(rows=rows)
    if eagle is not None:
        pack_linears(eagle, rows=rows)
        costs = Costs(loaded, eagle, name, batch, reporter or Reporter(), cache_dtype)
        calibration = head_calibration(card, name, where=head) if asked.needs_calibration else None
        drafter: Any = EagleDrafter(eagle, asked.maker(calibration, costs.table))
    else:
        drafter = _other_drafter(head, asked, dtype=dtype, device=device)
    tokenizer = load_tokenizer(name)
    template = ChatTemplate(tokenizer, card.get("template_arguments") or {})
    engine = Engine(
        loaded,
        drafter=drafter,
        batch=batch,
        decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        kv_dtype=cache_dtype,
    )
    return Runtime(engine, template, stop_token_ids(template, loaded), name, "plain" if head == "none" else tree)


@dataclass(frozen=True)
class Costs:
    """What rounds of a target and a head cost on this machine, with up to `batch` requests side by side."""

    target: "Target"
    head: "DraftHead"
    name: str
    batch: int
    reporter: "Reporter"
    kv_dtype: "torch.dtype | None" = None

    def table(self, max_nodes: int, top_k: int) -> "LatencyTable":
        """Return the latency table for trees of so many nodes, measured if this machine has none yet."""
        from eyas.models.target import model_fingerprint
        from eyas.train.latency_cache import measured_latency

        return measured_latency(
            self.target, self.head, target_fingerprint=model_fingerprint(self.name), rows=self.batch,
            max_nodes=max_nodes, top_k=top_k, kv_dtype=self.kv_dtype, reporter=self.reporter,
        )  # fmt: skip


def head_calibration(card: dict[str, Any], target: str, *, where: str) -> "Calibration | None":
    """Return the calibration in a head's eyas.json, None without; raises UserError when it is another target's."""
    from eyas.inference.calibration import Calibration
    from eyas.models.target import model_fingerprint

    calibration = Calibration.from_card(card, where=f"{where}/eyas.json")
    if calibration is not None and calibration.target != (found := model_fingerprint(target)):
        raise UserError(
            f"this head was calibrated on a target with fingerprint {calibration.target}, {target} has {found}: run "
            "eyas calibrate HEAD --target MODEL."
        )
    return calibration


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


def head_folder(head: str) -> Path | None:
    """Return the folder of a HEAD argument, a folder or a Hub id; None where it names no head."""
    from eyas.models.hub import resolve_head

    return None if head in ("none", "lookup") or head.startswith("model:") else resolve_head(head)


def head_card(folder: Path | None) -> dict[str, Any]:
    """Return the content of a head's eyas.json; empty where there is none, or no head."""
    path = None if folder is None else folder / "eyas.json"
    if path is None or not path.is_file():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _other_drafter(head: str, asked: AskedTree, *, dtype: str, device: str) -> Any:
    """Return the drafter of a HEAD argument that names no head: None, prompt lookup, or a small model."""
    import torch

    from eyas.inference.model_drafter import ModelDrafter
    from eyas.inference.prompt_lookup import PromptLookup
    from eyas.models.target import Target

    if head == "none":
        return None
    if head == "lookup":
        return PromptLookup(asked.plain.depth)
    small = Target.load(head.removeprefix("model:"), dtype=getattr(torch, dtype), device=device)
    return ModelDrafter(small.pack(rows=1), asked.plain.depth)
