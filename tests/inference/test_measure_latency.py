"""The measured latency table: what it covers, what it runs, and that more work is never measured to cost less."""

from itertools import pairwise

import pytest
import torch

from eyas.inference import measure_latency as module
from eyas.inference.measure_latency import measure_latency
from eyas.models.draft_head import DraftHead
from eyas.models.kv_cache import FP8, KVCache
from eyas.models.target import Target
from eyas.tests.toys import tiny_eagle1, tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
PLAIN = tiny_target(layers=3, aux_layers=())


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_the_table_covers_what_was_asked_for(kind: str) -> None:
    target, head = {"eagle3": (TARGET, tiny_head(TARGET)), "eagle1": (PLAIN, tiny_eagle1(PLAIN))}[kind]
    assert isinstance(head, DraftHead)
    heard: list[tuple[int, int, int]] = []
    table = measure_latency(
        target, head, rows=5, max_nodes=33, top_k=4, seconds=0.0, progress=lambda *told: heard.append(told)
    )
    assert [entry.rows for entry in table.by_rows] == [1, 2, 4, 5]
    assert table.by_rows[0].nodes == (1, 2, 3, 4, 6, 8, 12, 17, 25, 33)
    for entry in table.by_rows:
        assert entry.nodes[-1] == 33
        assert all(0 < a <= b for a, b in pairwise(entry.verify))
        assert entry.feed > 0
        assert entry.first > 0
    assert heard == [(1, 4, 0), (2, 4, 0), (3, 4, 0), (4, 4, 0)]
    assert len(table.verify_seconds(3)) == 33
    assert table.verify_seconds(1)[-1] > table.verify_seconds(1)[0]


def test_rounds_are_measured_on_the_cache_that_they_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    original = Target.new_cache

    def noted(self: Target, *, batch: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        cache = original(self, batch=batch, capacity=capacity, dtype=dtype)
        made.append(cache.dtype)
        return cache

    monkeypatch.setattr(Target, "new_cache", noted)
    for dtype in (None, FP8):
        measure_latency(
            TARGET, tiny_head(TARGET), rows=1, max_nodes=3, top_k=2, kv_dtype=dtype, seconds=0.0,
            progress=lambda *_: None,
        )  # fmt: skip
    assert made == [torch.float32] * 3 + [FP8] * 3


def test_wide_batches_are_measured_up_to_a_number_of_tokens() -> None:
    table = measure_latency(
        TARGET, tiny_head(TARGET), rows=40, max_nodes=33, top_k=2, seconds=0.0, progress=lambda *_: None
    )
    assert [entry.nodes[-1] for entry in table.by_rows] == [33, 33, 33, 32, 16, 8, 6]


def test_the_best_of_several_turns_counts_and_the_first_turn_only_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], {"a": 0, "b": 0}

    def take(name: str, times: list[float]) -> None:
        now[0] += times[min(calls[name], len(times) - 1)]
        calls[name] += 1

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    works = {"a": lambda: take("a", [0.1, 5.0, 3.0, 4.0]), "b": lambda: take("b", [9.0, 2.0, 2.5, 2.0])}
    assert module._best_in_turn(works, 0.0, synchronise=False) == pytest.approx({"a": 3.0, "b": 2.0})
    assert calls == {"a": 4, "b": 4}
    assert module._best_in_turn(works, 30.0, synchronise=False) == pytest.approx({"a": 4.0, "b": 2.0})
    assert calls["a"] > 8
