"""Evaluation: decode held-out prompts plainly, with a chain and with a tree, side by side, one prompt at a time.

Methods are interleaved per prompt, so a machine that slows down slows all of them. Every measurement is appended to one
file as it is made; a killed evaluation goes on with the measurements that are missing.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import TreeMaker
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.target import Target

PLAIN = "plain"


@dataclass(frozen=True)
class EvaluationPrompt:
    """One held-out prompt of a named set."""

    id: str
    prompt_set: str
    prompt_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class EvaluationPlan:
    """`trees` names the speculative methods; `sampled_prompts` bounds the prompts per set decoded at T > 0."""

    trees: dict[str, TreeMaker]
    temperatures: tuple[float, ...]
    sampled_prompts: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int


@dataclass(frozen=True)
class Measurement:
    """One prompt decoded by one method at one temperature.

    `identical_to_plain` compares with plain decoding of the same prompt and seed; where it is False, `gap` is the
    difference of the target's two best logits at the first differing token: near zero means a tie broken by rounding.
    `accepted` marks the tokens that were drafted; `rounds` are (drafts accepted, nodes drafted, tokens emitted) each.
    """

    prompt_id: str
    prompt_set: str
    method: str
    temperature: float
    token_ids: list[int]
    accepted: list[bool]
    prompt_tokens: int
    rounds: list[list[int]]
    finish_reason: str
    stats: dict[str, Any]
    seconds: float
    prefill_seconds: float
    identical_to_plain: bool
    gap: float | None

    @property
    def key(self) -> tuple[str, str, float]:
        return (self.prompt_id, self.method, self.temperature)


def evaluate(
    target: Target,
    head: DraftHead,
    prompts: list[EvaluationPrompt],
    plan: EvaluationPlan,
    path: Path,
    progress: Callable[[int, int, int], None],
) -> list[Measurement]:
    """Return all measurements, appending new ones to `path` as they are made."""
    repeated = [id_ for id_, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise UserError(f"prompt id {repeated[0]!r} is given more than once; every evaluation prompt needs its own id.")
    done = {measurement.key: measurement for measurement in read_measurements(path)}
    engines = {PLAIN: Engine(target), **{name: Engine(target, head, tree) for name, tree in plan.trees.items()}}
    work = list(_work(prompts, plan))
    total = len(work) * len(engines)
    if len(done) < total:
        _warm_up(engines, prompts[0], plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    finished = 0
    with path.open("a", encoding="utf-8") as file:
        for number, (prompt, temperature) in enumerate(work):
            for method in _rotated(list(engines), number):
                key = (prompt.id, method, temperature)
                if key not in done:
                    plain = done.get((prompt.id, PLAIN, temperature))
                    done[key] = _measure(engines[method], prompt, method, temperature, plan, plain)
                    file.write(json.dumps(asdict(done[key])) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                finished += 1
                progress(finished, total, len(done[key].token_ids))
    return [done[(prompt.id, method, temperature)] for prompt, temperature in work for method in engines]


def read_measurements(path: Path) -> Iterator[Measurement]:
    """Yield the measurements of a file; a last line torn by a kill is cut off the file."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    for line in whole.splitlines():
        yield Measurement(**json.loads(line))


def _work(prompts: list[EvaluationPrompt], plan: EvaluationPlan) -> Iterator[tuple[EvaluationPrompt, float]]:
    for temperature in plan.temperatures:
        taken: dict[str, int] = {}
        for prompt in prompts:
            taken[prompt.prompt_set] = taken.get(prompt.prompt_set, 0) + 1
            if temperature == 0 or taken[prompt.prompt_set] <= plan.sampled_prompts:
                yield prompt, temperature


def _rotated(methods: list[str], number: int) -> list[str]:
    """Return plain first (the others compare with it), then the rest in an order that turns from prompt to prompt."""
    rest = methods[1:]
    turn = number % max(1, len(rest))
    return [methods[0], *rest[turn:], *rest[:turn]]


def _request(prompt: EvaluationPrompt, temperature: float, plan: EvaluationPlan) -> GenerationRequest:
    sampling = Sampling(temperature=temperature, seed=plan.seed)
    return GenerationRequest(prompt.prompt_ids, plan.max_new_tokens, plan.stop_ids, sampling)


def _warm_up(engines: dict[str, Engine], prompt: EvaluationPrompt, plan: EvaluationPlan) -> None:
    """Run every engine briefly, so that the first measurement does not pay for allocations and thread pools."""
    for engine in engines.values():
        engine.generate(GenerationRequest(prompt.prompt_ids, min(8, plan.max_new_tokens)))


def _measure(
    engine: Engine,
    prompt: EvaluationPrompt,
    method: str,
    temperature: float,
    plan: EvaluationPlan,
    plain: Measurement | None,
) -> Measurement:
    generation = engine.generate(_request(prompt, temperature, plan))
    ids = list(generation.token_ids)
    differs = plain is not None and plain.token_ids != ids
    gap = _gap_at_difference(engine.target, prompt, plain.token_ids, ids) if plain is not None and differs else None
    return Measurement(
        prompt_id=prompt.id,
        prompt_set=prompt.prompt_set,
        method=method,
        temperature=temperature,
        token_ids=ids,
        accepted=_accepted_marks(generation),
        prompt_tokens=len(prompt.prompt_ids),
        rounds=[[made.accepted, made.drafted, len(made.tokens)] for made in generation.rounds],
        finish_reason=generation.finish_reason,
        stats=generation.stats.as_dict(),
        seconds=generation.seconds,
        prefill_seconds=generation.prefill_seconds,
        identical_to_plain=not differs,
        gap=gap,
    )


def _accepted_marks(generation: Generation) -> list[bool]:
    marks = [False]
    for round_ in generation.rounds:
        marks += [True] * round_.accepted + [False] * (len(round_.tokens) - round_.accepted)
    return marks


def _gap_at_difference(target: Target, prompt: EvaluationPrompt, a: list[int], b: list[int]) -> float:
    """Return the gap between the target's two best logits where two continuations part."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ids = torch.tensor([*prompt.prompt_ids, *a[:common]], device=target.device)
    logits = target.head.logits(target.forward(ids[None]).final_hidden_BTD[0, -1])
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def summarise(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """Return one entry per method x temperature x prompt set, and one per method x temperature over "all" sets.

    `tau` counts the bonus token. Speeds are total tokens over total seconds; `speedup` compares with plain decoding of
    the same prompts, measured interleaved.
    """
    plain = {(m.prompt_id, m.temperature): m for m in measurements if m.method == PLAIN}
    groups: dict[tuple[str, float, str], list[Measurement]] = {}
    for measurement in measurements:
        for name in (measurement.prompt_set, "all"):
            groups.setdefault((measurement.method, measurement.temperature, name), []).append(measurement)
    return [_entry(method, temperature, name, group, plain) for (method, temperature, name), group in groups.items()]


def _entry(
    method: str, temperature: float, name: str, group: list[Measurement], plain: dict[tuple[str, float], Measurement]
) -> dict[str, Any]:
    stats = AcceptanceStats(0)
    for measurement in group:
        stats += AcceptanceStats.from_dict(measurement.stats)
    tokens, seconds = sum(len(m.token_ids) for m in group), sum(m.seconds for m in group)
    same = [plain[(m.prompt_id, m.temperature)] for m in group]
    plain_speed = sum(len(m.token_ids) for m in same) / sum(m.seconds for m in same)
    return {
        "method": method,
        "temperature": temperature,
        "prompt_set": name,
        "prompts": len(group),
        **stats.as_dict(),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "plain_tokens_per_second": plain_speed,
        "speedup": tokens / seconds / plain_speed,
        "identical_to_plain": sum(m.identical_to_plain for m in group),
        "differences": [{"prompt_id": m.prompt_id, "gap": m.gap} for m in group if not m.identical_to_plain],
    }
