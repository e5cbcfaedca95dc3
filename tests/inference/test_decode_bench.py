"""Decoding side by side: the methods take turns on the same prompts, and sums, texts and batch limits are right."""

import pytest
import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.decode_bench import (
    BenchEntry,
    BenchPlan,
    Efficiency,
    EngineMethod,
    LibraryMethod,
    Method,
    Replies,
    RoundCosts,
    bench_decoding,
)
from eyas.inference.engine import Engine
from eyas.inference.prompt_lookup import PromptLookup
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.tests.inference.costs import PLAIN as PLAIN_SECONDS
from eyas.tests.inference.costs import costs
from eyas.tests.inference.heads import random_prompt
from eyas.tests.toys import tiny_target

TARGET = tiny_target(layers=2, aux_layers=())
PLAN = BenchPlan((1, 3), 8, frozenset({2, 5}), Sampling())
SETS = {
    "code": [random_prompt(length, seed=length) for length in (3, 9, 5, 2)],
    "chat": [random_prompt(length, seed=length) for length in (4, 7)],
}


class Scripted:
    """A method that notes when it is asked and answers `length` tokens per prompt."""

    def __init__(self, name: str, log: list[tuple[str, int]], length: int, largest_batch: int | None = None) -> None:
        self.name, self.log, self.length, self.largest_batch = name, log, length, largest_batch

    def run(self, prompts: list[tuple[int, ...]], plan: BenchPlan) -> Replies:
        self.log.append((self.name, len(prompts)))
        stats = AcceptanceStats(2)
        stats.record(1, drafted=2)
        stats.record(2, drafted=2)
        return Replies([[1] * self.length for _ in prompts], stats if self.name == "b" else None)


def test_methods_take_turns_and_sums_are_worked_out_by_hand() -> None:
    log: list[tuple[str, int]] = []
    methods: dict[str, Method] = {
        "a": Scripted("a", log, 3),
        "b": Scripted("b", log, 3),
        "c": Scripted("c", log, 4, largest_batch=1),
    }
    entries = bench_decoding(methods, SETS, PLAN, lambda *_: None)
    assert log[:3] == [("a", 1), ("b", 1), ("c", 1)]  # warm-up
    names = [name for name, _ in log[3:]]
    assert names[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [size for _, size in log[3:]].count(1) == 3 * 6 + 2  # batch 3 leaves one prompt of "code" alone
    found = {(entry.method, entry.prompt_set, entry.batch): entry for entry in entries}
    assert ("c", "code", 3) not in found
    code = found["b", "code", 3]
    assert (code.prompts, code.tokens, code.tau, code.same) == (4, 12, 2.5, 4)
    assert code.tokens_per_second == pytest.approx(12 / code.seconds)
    assert (found["a", "chat", 1].tau, found["a", "chat", 1].prompts) == (None, 2)
    assert found["c", "code", 1].same == 0


def test_the_library_and_every_engine_write_the_same_greedy_texts_whatever_the_batch() -> None:
    methods: dict[str, Method] = {
        "plain": EngineMethod(Engine(TARGET)),
        "lookup": EngineMethod(Engine(TARGET, drafter=PromptLookup(3, 2))),
        "library": LibraryMethod(TARGET.model),
        "library lookup": LibraryMethod(TARGET.model, lookup=3),
    }
    entries = bench_decoding(methods, SETS, PLAN, lambda *_: None)
    assert all(entry.same == entry.prompts for entry in entries)
    assert {(entry.method, entry.batch) for entry in entries} == {
        *((name, batch) for name in ("plain", "lookup", "library") for batch in (1, 3)),
        ("library lookup", 1),
    }
    assert {entry.tau for entry in entries if entry.method == "plain"} == {1.0}


def test_a_batch_that_no_set_fills_takes_turns_among_the_sets_in_whole_groups() -> None:
    log: list[tuple[str, int]] = []

    class Noting(Scripted):
        def run(self, prompts: list[tuple[int, ...]], plan: BenchPlan) -> Replies:
            asked.append([len(prompt) for prompt in prompts])
            return super().run(prompts, plan)

    asked: list[list[int]] = []
    entries = bench_decoding(
        {"a": Noting("a", log, 3)}, SETS, BenchPlan((5,), 8, frozenset(), Sampling()), lambda *_: None
    )
    assert asked[1:] == [[3, 4, 9, 7, 5]]
    assert [(entry.prompt_set, entry.batch, entry.prompts) for entry in entries] == [("mixed", 5, 5)]
    with pytest.raises(UserError, match="a batch of 7 needs as many prompts; there are 6"):
        bench_decoding({"a": Noting("a", log, 3)}, SETS, BenchPlan((7,), 8, frozenset(), Sampling()), lambda *_: None)


def entry(seconds: float, rounds: int, costs: RoundCosts | None, *, tokens: int = 42) -> BenchEntry:
    return BenchEntry("m", "code", 1, 2, tokens, seconds, tau=None, drafted=None, rounds=rounds, same=2, costs=costs)


def test_efficiency_is_worked_out_by_hand() -> None:
    plain = entry(10.0, 40, RoundCosts(prompt_seconds=2.0, verify=40.0))  # 0.2 s per token
    tree = entry(7.0, 20, RoundCosts(prompt_seconds=2.0, draft_seconds=0.8, verify=24.0))  # 0.125 s per token
    found = Efficiency.of(tree, plain)
    assert found is not None
    assert found.speedup == pytest.approx(1.6)
    assert found.verify_cost == pytest.approx(1.2)
    assert found.draft_cost == pytest.approx(0.04 / 0.2)
    assert found.efficiency == pytest.approx(1.6 / (2.0 / 1.4))
    alone = Efficiency.of(plain, plain)
    assert alone is not None
    assert (alone.speedup, alone.verify_cost, alone.draft_cost, alone.efficiency) == (1.0, 1.0, 0.0, 1.0)
    assert Efficiency.of(entry(7.0, 20, None), plain) is None
    assert Efficiency.of(entry(1.0, 0, RoundCosts(), tokens=2), plain) is None


def test_an_engine_tells_what_its_rounds_cost() -> None:
    method = EngineMethod(Engine(TARGET, drafter=PromptLookup(3, 2)), costs(node=5.0))
    replies = method.run([(5, 6, 7, 5, 6, 7, 5, 6)], PLAN)
    assert replies.stats is not None
    assert replies.costs is not None
    expected = replies.stats.rounds + replies.stats.drafted * 5.0 / PLAIN_SECONDS
    assert replies.stats.drafted > 0
    assert replies.costs.verify == pytest.approx(expected)
    assert replies.costs.draft_seconds > 0
    assert replies.costs.prompt_seconds > 0
    assert method.run([(5, 6), (7,)], PLAN).costs is None, "the costs of rows side by side are not those of each"
    assert EngineMethod(Engine(TARGET)).run([(5, 6)], PLAN).costs is None


def test_the_library_samples_when_asked() -> None:
    torch.manual_seed(0)
    plan = BenchPlan((1,), 12, frozenset(), Sampling(1.0, top_p=0.9))
    method = LibraryMethod(TARGET.model)
    texts = {tuple(method.run([SETS["code"][0]], plan).token_ids[0]) for _ in range(3)}
    assert len(texts) == 3
