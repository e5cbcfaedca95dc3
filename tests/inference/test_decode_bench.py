"""Decoding side by side: the methods take turns on the same prompts, and sums, texts and batch limits are right."""

import pytest
import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.decode_bench import BenchPlan, EngineMethod, LibraryMethod, Method, Replies, bench_decoding
from eyas.inference.engine import Engine
from eyas.inference.prompt_lookup import PromptLookup
from eyas.inference.sampling import Sampling
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


def test_the_library_samples_when_asked() -> None:
    torch.manual_seed(0)
    plan = BenchPlan((1,), 12, frozenset(), Sampling(1.0, top_p=0.9))
    method = LibraryMethod(TARGET.model)
    texts = {tuple(method.run([SETS["code"][0]], plan).token_ids[0]) for _ in range(3)}
    assert len(texts) == 3
