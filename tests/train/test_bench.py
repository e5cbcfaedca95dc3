"""`eyas bench train`: both loops do the same work, the operations are counted right, and the table says it."""

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eyas.scripts.cli import app
from eyas.tests.train.rows import gradients
from eyas.train import bench
from eyas.train.bench import Loops, TrainingCase, bench_training

TINY = TrainingCase(
    draft_vocab_size=50, ttt_steps=3, rows=2, row_length=12, hidden_size=32, intermediate_size=48, heads=2, kv_heads=1,
    head_dim=16, vocab_size=80,
)  # fmt: skip


def test_both_loops_compute_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    loops, found = Loops(TINY), []

    def keep(self: Loops, loss: torch.Tensor | None) -> None:
        if loss is not None:
            loss.backward()
        found.append(gradients(self.head))

    monkeypatch.setattr(Loops, "_update", keep)
    loops.packed()
    loops.plain()
    assert found[0].keys() == found[1].keys() == {name for name, _ in loops.head.named_parameters()}
    for name, gradient in found[0].items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), found[1][name].flatten(), dim=0)
        assert float(cosine) > 0.99, name
        assert float(gradient.norm() / found[1][name].norm()) == pytest.approx(1.0, abs=0.03), name


def test_operations_by_hand() -> None:
    # Per step: q 64x32, k and v 64x16 each, o 32x32, three of the MLP 32x48, four norms.
    layer = 64 * 32 + 2 * 64 * 16 + 32 * 32 + 3 * 32 * 48 + 4 * 32
    # Ten slots of twelve are taught, nine at the second step, eight at the third; the other two are only seen.
    slots, pairs, keys = 10, 10 + 9 + 8, 3 * (10 * 11 // 2) + 10 * (1 + 2)
    only_keys = 2 * 64 * 16 + 32
    # Forward, by inputs, by weights; fc forward and by weights; the teacher once; scores and values 32 wide.
    products = 3 * (3 * layer * slots + only_keys * 2 + 32 * 50 * pairs + 2 * 32 * keys)
    assert TINY.flops == 2 * 2 * (products + 2 * 96 * 32 * 12 + 32 * 50 * slots)


def test_the_command_prints_a_row_per_case_and_everything_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CASES", (TINY,))
    monkeypatch.setattr(bench, "_in_own_process", lambda function, case, name: 1.25)
    printed = CliRunner().invoke(app, ["bench", "train", "--repeats", "1"])
    assert printed.exit_code == 0, printed.output
    assert "tokens/s" in printed.output
    assert "1.25" in printed.output
    result: dict[str, Any] = bench_training((TINY,), repeats=1, say=lambda text: None)
    (case,) = result["cases"]
    assert case["ratio"] == pytest.approx(case["tokens_per_second"] / case["plain_tokens_per_second"])
    assert case["utilisation"] > 0
    assert case["peak_gib"] == 1.25


@pytest.mark.parametrize("name", ["packed", "plain"])
def test_peak_memory_is_that_of_a_fresh_process(name: str) -> None:
    assert 0.1 < bench._in_own_process(bench._peak_memory, TINY, name) < 1.0
