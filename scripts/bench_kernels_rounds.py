"""Times whole rounds of targets with random weights: plain, chain and tree, as CUDA graphs and as plain launches.

Rounds have fixed shapes, so their time does not depend on what is accepted; a random head accepts next to nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.inference.draft import ChainTree, DynamicTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.fixed_round import FixedRound
from eyas.inference.round_graphs import Stage
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import default_aux_layers, head_config_for
from eyas.models.size import target_size
from eyas.models.target import Target
from eyas.models.warm_start import init_random, set_vocabulary
from eyas.train.progress import Reporter

STAGES = ("draft", "verify", "refeed")
Timer = Callable[[Stage], float]  # microseconds of one call


@dataclass(frozen=True)
class RoundShape:
    """A target to be built with random weights, and the rounds that are timed on it."""

    name: str
    kind: str
    sizes: dict[str, Any]
    draft_vocabulary: int = 32000
    prompt: int = 1024
    batches: tuple[int, ...] = (1, 8, 32)
    ways: dict[str, TreeMaker | None] = field(
        default_factory=lambda: {"plain": None, "chain of 5": ChainTree(5), "tree of 60": DynamicTree(6, 10, 59)}
    )
    dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> Any:
        return AutoConfig.for_model(self.kind, **self.sizes)


_WIDE = {"num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 8192}
ROUND_SHAPES = (
    RoundShape(
        "Llama-3.1-8B",
        "llama",
        {
            **_WIDE, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_key_value_heads": 8,
        },
    ),
    RoundShape(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        {
            **_WIDE, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    ),
)  # fmt: skip


@dataclass(frozen=True)
class RoundTiming:
    """Microseconds of the stages of one kind of round; `recorded` says whether they were CUDA graphs."""

    shape: str
    way: str
    batch: int
    recorded: bool
    stages_us: dict[str, float]

    @property
    def total_us(self) -> float:
        return sum(self.stages_us.values())


@dataclass(frozen=True)
class RoundTimings:
    """All timings, and why shapes were left out, by name."""

    timings: list[RoundTiming]
    left_out: dict[str, str]

    def verify_us(self, shape: str, way: str, batch: int) -> float | None:
        """Return the quickest verification stage of a kind of round, None where it was not timed."""
        found = [
            x.stages_us["verify"] for x in self.timings if (x.shape, x.way, x.batch) == (shape, way, batch)
        ]  # fmt: skip
        return min(found, default=None)


def measure_rounds(
    device: torch.device,
    reporter: Reporter,
    *,
    shapes: tuple[RoundShape, ...] = ROUND_SHAPES,
    timer: Timer,
    memory: int | None = None,
) -> RoundTimings:
    """Return the timings of all rounds of the shapes that fit into the device's free memory (in bytes; None: ask)."""
    timings: list[RoundTiming] = []
    left_out: dict[str, str] = {}
    for shape in shapes:
        free = torch.cuda.mem_get_info(device)[0] if memory is None else memory
        if (need := needed_bytes(shape)) > free:
            left_out[shape.name] = f"needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
            continue
        target, head = build(shape, device)
        with reporter.bar("rounds") as bar:
            total = 2 * len(shape.batches) * len(shape.ways)
            for done, timing in enumerate(_rounds(shape, target, head, timer)):
                timings.append(timing)
                bar.update(shape.name, done + 1, total, 1, f"{timing.way}, batch {timing.batch}")
        del target, head
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return RoundTimings(timings, left_out)


def needed_bytes(shape: RoundShape) -> int:
    """Return about how much a target, its largest cache and the prefill of that need."""
    size = target_size(shape.config)
    tokens = max(shape.batches) * shape.prompt
    prefill = tokens * (6 * size.hidden_size + 3 * size.mlp_width)  # states tapped and passed on, and one MLP
    return shape.dtype.itemsize * (size.parameters + 2 * tokens * size.kv_per_token + prefill)


def build(shape: RoundShape, device: torch.device) -> tuple[Target, Eagle3Head]:
    """Return a target of a shape and a head for it, both with random weights made on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=shape.dtype)
    aux_layers = default_aux_layers(shape.config.num_hidden_layers)
    target = Target(model.eval(), aux_layers=aux_layers)
    U, V = shape.draft_vocabulary, target.vocab_size
    head = Eagle3Head(head_config_for(target.config, aux_layers=aux_layers, draft_vocab_size=U))
    init_random(head, std=0.02)
    set_vocabulary(head, DraftVocabulary.from_counts(torch.arange(V).flip(0), size=U, forced=set()))
    head = head.to(device=device, dtype=shape.dtype).eval()
    head.use_embedding(target.embedding)
    return target, head


def _rounds(shape: RoundShape, target: Target, head: Eagle3Head, timer: Timer) -> Iterator[RoundTiming]:
    for batch in shape.batches:
        for way, maker in shape.ways.items():
            for graphs in (False, True):
                made = _under_way(shape, target, None if maker is None else head, maker, batch=batch, graphs=graphs)
                assert made.stages is not None
                stages = dict(zip(STAGES, made.stages, strict=True))
                recorded = graphs and stages["verify"] != made.verify_stage
                with torch.inference_mode():
                    times = {name: timer(stage) for name, stage in stages.items()}
                yield RoundTiming(shape.name, way, batch, recorded, times)


def _under_way(
    shape: RoundShape, target: Target, head: Eagle3Head | None, maker: TreeMaker | None, *, batch: int, graphs: bool
) -> FixedRound:
    """Return a round of `batch` rows after two of its kind have been run."""
    engine = Engine(target, head, maker, batch=batch, fixed=True, graphs=graphs)
    session = engine.session()
    prompts = torch.randint(target.vocab_size, (batch, shape.prompt)).tolist()
    session.join([GenerationRequest(tuple(prompt), 64) for prompt in prompts])
    session.round()
    session.round()
    (made,) = session.fixed_rounds.values()
    return made


def rounds_table(measured: RoundTimings, overhead_us: dict[str, float]) -> str:
    """Return the section, one line per kind of round; `overhead_us`: what kernels beside the forward take, by shape."""
    lines = [
        "## Rounds, timed",
        "",
        "Stages of a round of fixed shapes in milliseconds, medians between events, on targets and heads of random "
        "weights. Graphs: the round replayed from CUDA graphs; launches: the same kernels launched one by one.",
        "",
        "| target | round | batch | draft | verify | refeed | graphs | launches | graphs gain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds: dict[tuple[str, str, int], list[RoundTiming]] = {}
    for x in measured.timings:
        kinds.setdefault((x.shape, x.way, x.batch), []).append(x)
    for (shape, way, batch), (launched, replayed) in kinds.items():
        stages = " | ".join(f"{replayed.stages_us[name] / 1e3:.2f}" for name in STAGES)
        graphs, gain = "not recorded", ""
        if replayed.recorded:
            graphs, gain = f"{replayed.total_us / 1e3:.2f}", f"{launched.total_us / replayed.total_us:.2f}x"
        lines.append(f"| {shape} | {way} | {batch} | {stages} | {graphs} | {launched.total_us / 1e3:.2f} | {gain} |")
    lines += [""] + [f"{name} was left out: {why}." for name, why in measured.left_out.items()]
    for shape, overhead in overhead_us.items():
        verify = measured.verify_us(shape, "tree of 60", 8)
        if verify is not None:
            share = overhead / max(verify - overhead, 1e-9)
            lines.append(
                f"{shape}: build, greedy verification and compaction of 8 trees of 60 nodes take {overhead:.0f} us, "
                f"{share:.1%} of the target's forward."
            )
    return "\n".join(lines)
