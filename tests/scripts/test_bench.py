"""`eyas bench kernels`: its page, its refusals, and its cases run on the CPU with every kernel in the interpreter."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.inference.draft import DynamicTree
from eyas.kernels.aot import CAPABILITIES, CompileReport
from eyas.kernels.triton_support import interpreted
from eyas.scripts import cli
from eyas.scripts.bench import BENCHES, write_section
from eyas.scripts.bench_kernels import compile_table
from eyas.scripts.bench_kernels_cases import Case, Inputs, Shape, cases
from eyas.scripts.bench_kernels_rounds import (
    RoundShape,
    RoundTiming,
    RoundTimings,
    measure_rounds,
    needed_bytes,
    rounds_table,
)
from eyas.scripts.bench_kernels_timing import OVERHEAD, Timing, measure, overheads_us, timing_table
from eyas.train.progress import Reporter

pytest.importorskip("triton")

TINY = Shape(
    "tiny",
    heads=2,
    kv_heads=1,
    head_dim=16,
    layers=1,
    vocabulary=150,
    draft_vocabulary=130,
    rows=2,
    nodes=5,
    prefix=9,
    chain=2,
    depth=2,
    top_k=3,
    slots=3,
    line=9,
    dtype=torch.float32,
)


def test_every_bench_has_a_verb() -> None:
    for module in BENCHES.values():
        assert callable(importlib.import_module(module).run)


def test_sections_are_replaced_and_others_kept(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    write_section(page, "a", "first a\n")
    write_section(page, "b", "first b")
    write_section(page, "a", "second a")
    text = page.read_text()
    assert text == (
        "# Benchmarks\n\n<!-- a -->\nsecond a\n<!-- end of a -->\n\n<!-- b -->\nfirst b\n<!-- end of b -->\n"
    )
    assert [path.name for path in page.parent.iterdir()] == ["benchmarks.md"]


def test_the_compile_table_shows_what_differs_between_cards() -> None:
    reports = [CompileReport("op bf16", c, 32, 0, 1024 * (c // 10), 4) for c in CAPABILITIES]
    reports += [CompileReport("other", c, 255, 8 * (c == 90), 0, 0) for c in CAPABILITIES]
    reports += [CompileReport("op fp8", c, 30 + c // 100, 0, 0, 0) for c in (90, 100)]
    table = compile_table(reports)
    assert "| op fp8 | - / 30 / 31 | - / 0 / 0 | - / 0.0 / 0.0 | - / 0 / 0 |" in table
    assert "| op bf16 | 32 | 0 | 8.0 / 9.0 / 10.0 | 4 |" in table
    assert "| other | 255 | 0 / 8 / 0 | 0.0 | 0 |" in table
    assert "3 builds for sm_80, sm_90, sm_100. 1 spill registers, 0 exceed" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no CUDA device here: run `eyas bench kernels --compile-only`"),
        (["--compile-only"], "TRITON_INTERPRET is set"),
    ],
)
def test_what_cannot_be_done_here_is_said(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU does both")
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["eyas", "bench", "kernels", *arguments, "--page", str(page)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not page.exists()


def pretend(function: object, sets: list[Inputs]) -> float:
    """Microseconds that name themselves: one per set of inputs."""
    return float(len(sets))


def test_all_cases_are_right_on_a_tiny_shape() -> None:
    device = torch.device("cpu")
    with interpreted():
        timings = measure(device, Reporter(quiet=True), shapes=(TINY,), timer=pretend, working_set=2**12)
    assert [x.fault for x in timings] == [None] * len(timings)
    assert len(timings) == len(cases(TINY, device)) == 12
    assert all(x.kernel_us and x.floor_us and x.reference_us for x in timings)
    table = timing_table(timings)
    assert table.count("| tiny |") == 12
    assert "sdpa, dense mask" in table
    assert "tiny: build, greedy verification and compaction take" in table


def test_a_wrong_kernel_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (greedy,) = (case for case in cases(TINY, torch.device("cpu")) if case.name == "greedy verification")

    def wrong(*inputs: object) -> object:
        result = greedy.reference(*inputs)
        return result._replace(bonus_B=result.bonus_B + 1)

    broken: Case = dataclasses.replace(greedy, kernel=wrong)
    monkeypatch.setattr("eyas.scripts.bench_kernels_timing.cases", lambda shape, device: [broken])
    (timing,) = measure(torch.device("cpu"), Reporter(quiet=True), shapes=(TINY,), timer=pretend, working_set=2**12)
    assert timing.fault == "2 of 2 values differ from the reference"
    assert timing.kernel_us is None
    assert "wrong: 2 of 2 values differ" in timing_table([timing])


TINY_ROUND = RoundShape(
    "tiny",
    "llama",
    {
        "vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 7, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": None,
    },
    draft_vocabulary=61,
    prompt=9,
    batches=(2,),
    ways={"plain": None, "tree of 60": DynamicTree(2, 2, 3)},
    dtype=torch.float32,
)  # fmt: skip


def test_rounds_are_timed_stage_by_stage() -> None:
    calls = iter(range(1, 1000))

    def pretend_stage(stage: Callable[[], None]) -> float:
        stage()
        return 1000.0 * next(calls)

    device = torch.device("cpu")
    with interpreted():
        measured = measure_rounds(device, Reporter(quiet=True), shapes=(TINY_ROUND,), timer=pretend_stage, memory=10**9)
    assert [(x.way, x.batch) for x in measured.timings[::2]] == [
        ("plain", 2),
        ("tree of 60", 2),
    ]
    assert measured.timings[1].stages_us == {"draft": 4000.0, "verify": 5000.0, "refeed": 6000.0}
    assert not any(x.recorded for x in measured.timings)  # no graphs on a CPU
    table = rounds_table(measured, {})
    assert "| tiny | plain | 2 | 4.00 | 5.00 | 6.00 | not recorded | 6.00 |  |" in table


def test_graphs_are_set_beside_launches_and_the_overhead_beside_the_forward() -> None:
    launched = RoundTiming("tiny", "tree of 60", 8, False, {"draft": 3000.0, "verify": 12000.0, "refeed": 1000.0})
    replayed = RoundTiming("tiny", "tree of 60", 8, True, {"draft": 1000.0, "verify": 6180.0, "refeed": 820.0})
    kernels = [Timing("tiny", case, kernel_us=60.0) for case in OVERHEAD]
    table = rounds_table(
        RoundTimings([launched, replayed], {"huge": "needs 60 GB, 20 GB are free"}), overheads_us(kernels)
    )
    assert "| tiny | tree of 60 | 8 | 1.00 | 6.18 | 0.82 | 8.00 | 16.00 | 2.00x |" in table
    assert "huge was left out: needs 60 GB, 20 GB are free." in table
    assert "take 180 us, 3.0% of the target's forward" in table  # 180 of 6000
    assert overheads_us(kernels[1:]) == {}


def test_a_target_that_does_not_fit_is_left_out() -> None:
    need = needed_bytes(TINY_ROUND)
    assert 4 * 97 * 40 < need < 10**7
    measured = measure_rounds(
        torch.device("cpu"), Reporter(quiet=True), shapes=(TINY_ROUND,), timer=lambda stage: 1.0, memory=need - 1
    )
    assert measured.timings == []
    assert list(measured.left_out) == ["tiny"]
