"""Decoding side by side: every method answers the same prompts in turn, so a machine that slows down slows all alike.

A method is anything that turns a group of prompts into replies. Ours are engines; `LibraryMethod` is what users have
without us: transformers' generate, plainly or with its own prompt lookup.

Efficiency says how much of what acceptance promises becomes speed: speed-up / (tau / (relative verify cost + relative
draft cost)), of decoding alone, without the prompt. The verify cost of a round is that of the latency table for as many
nodes, relative to one; the draft cost is measured, relative to a plain token of the same run.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Protocol

import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.latency import LatencyTable
from eyas.inference.sampling import Sampling
from eyas.inference.timed_drafter import DraftClock, TimedDrafter
from eyas.models.errors import UserError

MIXED = "mixed"  # the name of a group over all prompt sets


@dataclass(frozen=True)
class BenchPlan:
    """What every method is asked: at most `max_new_tokens` per prompt, ended by `stop_ids`, at one temperature."""

    batches: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling


@dataclass(frozen=True)
class RoundCosts:
    """What a group's rounds cost: seconds of its prompts and of drafting, and the verify costs of all rounds."""

    prompt_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify: float = 0.0

    def __add__(self, other: "RoundCosts") -> "RoundCosts":
        return RoundCosts(
            self.prompt_seconds + other.prompt_seconds,
            self.draft_seconds + other.draft_seconds,
            self.verify + other.verify,
        )


@dataclass(frozen=True)
class Replies:
    """The tokens of a group of prompts and, where the method tells, its acceptance and costs (of one prompt alone)."""

    token_ids: list[list[int]]
    stats: AcceptanceStats | None
    costs: RoundCosts | None = None


class Method(Protocol):
    """Something that answers prompts."""

    @property
    def largest_batch(self) -> int | None:
        """The most prompts it takes side by side; None: any number."""
        ...

    def run(self, prompts: list[tuple[int, ...]], plan: BenchPlan) -> Replies: ...


@dataclass(frozen=True)
class EngineMethod:
    """One of our engines; with a latency table it tells what its rounds cost, on a CPU."""

    engine: Engine
    latency: LatencyTable | None = None
    largest_batch: int | None = None

    def run(self, prompts: list[tuple[int, ...]], plan: BenchPlan) -> Replies:
        requests = [GenerationRequest(prompt, plan.max_new_tokens, plan.stop_ids, plan.sampling) for prompt in prompts]
        clock, engine = DraftClock(), self.engine
        is_timed = self.latency is not None and engine.target.device.type == "cpu"  # a GPU runs behind the clock
        if is_timed and engine.drafter is not None:
            timed = TimedDrafter(engine.drafter, clock)
            engine = Engine(engine.target, drafter=timed, batch=engine.batch, kv_dtype=engine.kv_dtype)
        generations = engine.generate(requests)
        stats = sum((generation.stats for generation in generations), AcceptanceStats(0))
        costs = None
        if self.latency is not None and is_timed and len(prompts) == 1:
            verify_N = self.latency.verify_seconds(1)
            costs = RoundCosts(
                prompt_seconds=generations[0].prefill_seconds + clock.prompt_seconds,
                draft_seconds=clock.seconds,
                verify=sum(verify_N[made.drafted] for made in generations[0].rounds) / verify_N[0],
            )
        return Replies([list(generation.token_ids) for generation in generations], stats, costs)


@dataclass(frozen=True)
class LibraryMethod:
    """transformers' own generate on a model that nothing was done to; `lookup` tokens per round, 0 for none."""

    model: Any
    lookup: int = 0

    @property
    def largest_batch(self) -> int | None:
        return 1 if self.lookup else None

    def run(self, prompts: list[tuple[int, ...]], plan: BenchPlan) -> Replies:
        longest, sampling = max(map(len, prompts)), plan.sampling
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        warped = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        out = self.model.generate(
            torch.tensor(rows, device=self.model.device),
            attention_mask=torch.tensor(seen, device=self.model.device),
            max_new_tokens=plan.max_new_tokens,
            eos_token_id=sorted(plan.stop_ids) or None,
            pad_token_id=0,
            do_sample=sampling.temperature > 0,
            **(warped if sampling.temperature > 0 else {}),
            **({"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}),
        )
        return Replies([_until_stop(row, plan.stop_ids) for row in out[:, longest:].tolist()], None)


@dataclass(frozen=True)
class BenchEntry:
    """One method on one set of prompts at one batch size; `same` counts prompts whose text is the baseline's.

    `drafted` are nodes per round.
    """

    method: str
    prompt_set: str
    batch: int
    prompts: int
    tokens: int
    seconds: float
    tau: float | None
    drafted: float | None
    rounds: int | None
    same: int
    costs: RoundCosts | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding alone: without prompts, and without the first tokens, which they yield."""
        if self.costs is None or self.tokens == self.prompts:
            return None
        return (self.seconds - self.costs.prompt_seconds) / (self.tokens - self.prompts)


@dataclass(frozen=True)
class Efficiency:
    """A method's speed-up over plain decoding, prompts left aside, and the costs of its rounds in plain tokens."""

    speedup: float
    verify_cost: float
    draft_cost: float
    efficiency: float

    @classmethod
    def of(cls, entry: BenchEntry, plain: BenchEntry) -> "Efficiency | None":
        """Return it, or None where the costs of either are not known."""
        own, alone = entry.seconds_per_token, plain.seconds_per_token
        if own is None or alone is None or entry.costs is None or not entry.rounds:
            return None
        verify, draft = entry.costs.verify / entry.rounds, entry.costs.draft_seconds / entry.rounds / alone
        tau = (entry.tokens - entry.prompts) / entry.rounds
        return cls(alone / own, verify, draft, alone / own / (tau / (verify + draft)))


def bench_decoding(
    methods: dict[str, Method],
    prompt_sets: dict[str, list[tuple[int, ...]]],
    plan: BenchPlan,
    progress: Callable[[int, int, int], None],
) -> list[BenchEntry]:
    """Return an entry per method, set and batch size. The first method is the baseline of `same`; all are warmed up."""
    baseline, *_ = methods
    some = next(iter(prompt_sets.values()))[0]
    for warmed in methods.values():
        warmed.run([some], BenchPlan(plan.batches, min(4, plan.max_new_tokens), plan.stop_ids, plan.sampling))
    groups = list(_groups(prompt_sets, plan.batches))
    totals: dict[tuple[str, str, int], _Total] = {}
    for number, (name, batch, group) in enumerate(groups):
        texts: dict[str, list[list[int]]] = {}
        for method in _in_turn(list(methods), number):
            most = methods[method].largest_batch
            if most is not None and batch > most:
                continue
            started = time.perf_counter()
            replies = methods[method].run(group, plan)
            seconds = time.perf_counter() - started
            texts[method] = replies.token_ids
            totals.setdefault((method, name, batch), _Total()).add(replies, seconds)
        for method, replied in texts.items():
            same = sum(a == b for a, b in zip(replied, texts[baseline], strict=True))
            totals[method, name, batch].same += same
        progress(number + 1, len(groups), sum(len(text) for replied in texts.values() for text in replied))
    return [
        BenchEntry(
            method=method,
            prompt_set=name,
            batch=batch,
            prompts=total.prompts,
            tokens=total.tokens,
            seconds=total.seconds,
            tau=None if total.stats is None else total.stats.tau,
            drafted=None if not total.stats or not total.stats.rounds else total.stats.drafted / total.stats.rounds,
            rounds=None if total.stats is None else total.stats.rounds,
            same=total.same,
            costs=total.costs,
        )
        for (method, name, batch), total in totals.items()
    ]


@dataclass
class _Total:
    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stats: AcceptanceStats | None = None
    same: int = 0
    costs: RoundCosts | None = None

    def add(self, replies: Replies, seconds: float) -> None:
        self.prompts += len(replies.token_ids)
        self.tokens += sum(map(len, replies.token_ids))
        self.seconds += seconds
        if replies.stats is not None:
            self.stats = (self.stats or AcceptanceStats(0)) + replies.stats
        if replies.costs is not None:
            self.costs = (self.costs or RoundCosts()) + replies.costs


def _groups(
    prompt_sets: dict[str, list[tuple[int, ...]]], batches: tuple[int, ...]
) -> Iterator[tuple[str, int, list[tuple[int, ...]]]]:
    """Yield (set, batch size, prompts). A batch that no set fills takes turns among all sets, in whole groups."""
    for batch in batches:
        named = prompt_sets
        if batch > max(map(len, prompt_sets.values())):
            turns = chain.from_iterable(zip_longest(*prompt_sets.values()))
            everything = [prompt for prompt in turns if prompt is not None]
            whole = len(everything) // batch * batch
            if whole == 0:
                raise UserError(
                    f"a batch of {batch} needs as many prompts; there are {len(everything)}: take more per set."
                )
            named = {MIXED: everything[:whole]}
        for name, prompts in named.items():
            for start in range(0, len(prompts), batch):
                yield name, batch, prompts[start : start + batch]


def _in_turn(names: list[str], number: int) -> list[str]:
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to the first stop, which is kept; what the library pads behind it is no text."""
    end = next((place for place, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
    return tokens[: end + 1]
