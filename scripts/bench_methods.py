"""The ways of decoding that `eyas bench decode` compares: ours, transformers' and, where there is one, vLLM's."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.models.errors import UserError, nearest
from eyas.scripts.decoding import Costs, Runtime, head_calibration, head_card, head_folder, load_runtime
from eyas.scripts.tree_option import parse_tree

if TYPE_CHECKING:
    from eyas.inference.decode_bench import Method
    from eyas.inference.latency import LatencyTable
    from eyas.train.progress import Reporter

LOOKUP, MODEL_DEPTH, VLLM_DEPTH = 8, 5, 5
PLAIN, PROMPT_LOOKUP, SMALL_MODEL = "plain", "lookup", "draft model"
LIBRARY, LIBRARY_LOOKUP, VLLM, VLLM_CHAIN = "transformers", "transformers lookup", "vllm", f"vllm chain:{VLLM_DEPTH}"
TREES = ["chain:5", "static", "dynamic:5,8,16"]
EIGHT_NODES = ["chain:8", "dynamic:8,8,8", "dynamic:8,8,8,calibrated"]
CALIBRATED_TREES = [*EIGHT_NODES, "auto:head", "auto"]

Sets = dict[str, list[tuple[int, ...]]]


@dataclass(frozen=True)
class Compared:
    """Everything a comparison needs: the asked methods by name, plain decoding first, and what they were made of."""

    methods: "dict[str, Method]"
    runtime: Runtime
    sets: Sets
    latency: "LatencyTable | None"

    def close(self) -> None:
        """End the engines that run in processes of their own."""
        from eyas.train.vllm_decoding import VllmMethod

        for method in self.methods.values():
            if isinstance(method, VllmMethod):
                method.close()


def compared_methods(
    head: str,
    target: str | None,
    *,
    draft_model: str | None,
    trees: list[str] | None,
    only: list[str] | None,
    prompts: str,
    per_set: int,
    batch: int,
    dtype: str,
    device: str,
    kv_dtype: str | None,
    vllm_python: Path | None,
    max_new_tokens: int,
    greedy: bool,
    reporter: "Reporter",
) -> Compared:
    """Return the methods (`only` some of them beside plain) on the prompts.

    Raises UserError where head, target, trees or prompts do not fit, and for an unknown method before anything is
    loaded or timed.
    """
    from eyas.inference.decode_bench import EngineMethod
    from eyas.inference.eagle_drafter import EagleDrafter
    from eyas.inference.engine import Engine
    from eyas.inference.model_drafter import ModelDrafter
    from eyas.inference.prompt_lookup import PromptLookup
    from eyas.models.target import Target

    folder = head_folder(head)
    card = head_card(folder)
    asked = [parse_tree(text) for text in trees or [*TREES, *(CALIBRATED_TREES if "calibration" in card else [])]]
    served = folder if greedy else None
    names = method_names(
        trees=[one.text for one in asked] if folder is not None else [], draft_model=draft_model is not None,
        vllm=vllm_python is not None, vllm_head=served is not None,
    )  # fmt: skip
    if unknown := set(only or ()) - set(names):
        name = min(unknown)
        raise UserError(f"--method {name!r} is none of {', '.join(names)}.{nearest(name, names)}")
    first = next((one.text for one in asked if not one.is_auto), TREES[-1])
    runtime = load_runtime(head, target, first, dtype=dtype, device=device, kv_dtype=kv_dtype)
    loaded, drafter, kept = runtime.engine.target, runtime.engine.drafter, runtime.engine.kv_dtype
    sets = read_sets(runtime, prompts, per_set)
    latency = None
    if isinstance(drafter, EagleDrafter):
        most = max(LOOKUP + 1, *(one.plain.max_nodes for one in asked))
        widest = max((one.numbers[1] for one in asked if len(one.numbers) == 3), default=1)
        latency = Costs(loaded, drafter.head, runtime.target, batch, reporter, kept).table(most, widest)

    def ours(way: Any) -> EngineMethod:
        return EngineMethod(Engine(loaded, drafter=way, batch=batch, kv_dtype=kept), latency)

    methods: dict[str, Method] = {PLAIN: ours(None), PROMPT_LOOKUP: ours(PromptLookup(LOOKUP, 3))}
    if draft_model is not None:
        small = Target.load(draft_model, dtype=loaded.dtype, device=str(loaded.device)).pack(rows=1)
        methods[SMALL_MODEL] = ours(ModelDrafter(small, MODEL_DEPTH))
    if isinstance(drafter, EagleDrafter):
        assert latency is not None
        table = latency
        calibration = None
        if any(one.needs_calibration for one in asked):
            calibration = head_calibration(card, runtime.target, where=head)
        if calibration is not None:
            calibration.check_apart(prompt for taken in sets.values() for prompt in taken)
        for one in asked:
            methods[one.text] = ours(EagleDrafter(drafter.head, one.maker(calibration, lambda *_: table)))
    methods |= _library(runtime, dtype)
    if vllm_python is not None:
        longest = max(len(prompt) for taken in sets.values() for prompt in taken) + max_new_tokens
        methods |= _vllm(vllm_python, runtime.target, served, dtype=dtype, batch=batch, longest=longest)
    assert list(methods) == names
    methods = {name: method for name, method in methods.items() if only is None or name in (PLAIN, *only)}
    return Compared(methods, runtime, sets, latency)


def method_names(*, trees: list[str], draft_model: bool, vllm: bool, vllm_head: bool) -> list[str]:
    """Return the names of all methods that the arguments make, in the table's order; `trees` are those of a head."""
    small = [SMALL_MODEL] if draft_model else []
    engine = [VLLM, *([VLLM_CHAIN] if vllm_head else [])] if vllm else []
    return [PLAIN, PROMPT_LOOKUP, *small, *dict.fromkeys(trees), LIBRARY, LIBRARY_LOOKUP, *engine]


def read_sets(runtime: Runtime, prompts: str, per_set: int) -> Sets:
    """Return the first prompts of each category, as tokens."""
    from eyas.data.sources import read_prompts

    sets: Sets = {}
    for prompt in read_prompts(prompts):
        taken = sets.setdefault(prompt.category, [])
        if len(taken) < per_set:
            taken.append(tuple(runtime.template.ids(list(prompt.messages), add_generation_prompt=True)))
    return sets


def _library(runtime: Runtime, dtype: str) -> "dict[str, Method]":
    """Return transformers' own ways, on a model that nothing was done to."""
    import torch
    from transformers import AutoModelForCausalLM

    from eyas.inference.decode_bench import LibraryMethod
    from eyas.models.bundled import resolve_model

    untouched: Any = AutoModelForCausalLM.from_pretrained(resolve_model(runtime.target), dtype=getattr(torch, dtype))
    untouched = untouched.to(runtime.engine.target.device).eval()
    return {LIBRARY: LibraryMethod(untouched), LIBRARY_LOOKUP: LibraryMethod(untouched, lookup=LOOKUP)}


def _vllm(python: Path, target: str, head: Path | None, *, dtype: str, batch: int, longest: int) -> "dict[str, Method]":
    """Return vLLM's plain decoding and, with a head, its chain, which it serves greedily only on a CPU."""
    from eyas.models.bundled import resolve_model
    from eyas.models.head_files import read_head_files
    from eyas.models.launch import VLLM_METHODS
    from eyas.train.vllm_decoding import VllmMethod

    folder = resolve_model(target)
    methods: dict[str, Method] = {VLLM: VllmMethod(python, target=folder, dtype=dtype, batch=batch, longest=longest)}
    if head is not None:
        methods[VLLM_CHAIN] = VllmMethod.with_head(
            python, target=folder, head=str(head), method=VLLM_METHODS[read_head_files(head).method],
            depth=VLLM_DEPTH, dtype=dtype, longest=longest,
        )  # fmt: skip
    return methods
