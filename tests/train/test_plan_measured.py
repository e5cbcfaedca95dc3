"""Plans against what really happened: bytes on disk within a few percent, peak memory within 30 % of the measured one.

Every stage runs in a process of its own, forked from one that has the libraries loaded; its high-water mark is reset
before the stage begins.
"""

import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from eyas.data.corpus import CorpusRow, to_jsonl, write_atomically
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.context import RunContext
from eyas.train.pipeline import run_stages
from eyas.train.plan import make_plan
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import STAGES, RunFolder

BIG = {"vocab_size": 128_256, "hidden_size": 64, "max_position_embeddings": 4096}
LENGTH = 2048


def context_of(fields: dict[str, object], folder: Path) -> RunContext:
    return RunContext(parse_recipe(fields, where="tiny"), RunFolder(folder), Reporter(quiet=True))


def high_water() -> int:
    """Return the largest resident size of this process since the mark was last reset, in bytes."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def run_stage(fields: dict[str, object], folder: Path, stage: str, results: Connection) -> None:
    """Send (planned peak, measured peak, base) of one stage run in this process."""
    torch.set_num_threads(1)
    context = context_of(fields, folder)
    plan = make_plan(context)
    planned = next(found for found in plan.stages if found.name == stage)
    Path("/proc/self/clear_refs").write_text("5")
    run_stages(context.recipe, folder, first=stage, last=stage, reporter=Reporter(quiet=True))
    results.send((planned.phase.peak, high_water(), plan.facts.base))


Peaks = Callable[[str], tuple[int, int, int]]


def peaks_of(fields: dict[str, object], folder: Path) -> Peaks:
    """Return a function that runs one stage in its own process."""

    def run(stage: str) -> tuple[int, int, int]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*(f"eyas.train.stage_{name}" for name in STAGES), "eyas.tests.train.tiny_run"])
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_stage, args=(fields, folder, stage, theirs))
        process.start()
        process.join(timeout=300)
        assert process.exitcode == 0, stage
        planned, measured, base = ours.recv()
        return int(planned), int(measured), int(base)

    return run


def write_corpus(context: RunContext, *, rows: int, length: int) -> None:
    """Finish the synthesize stage with made-up rows: nobody waits for a random model to write so much."""
    random = torch.Generator().manual_seed(0)
    made = []
    for number in range(rows):
        ids = torch.randint(3, 200, (length,), generator=random).tolist()
        split = "validation" if number < 2 else "train"
        made.append(
            CorpusRow(f"r{number}", "given", "x", split, 0.0, tuple(ids), ((40, len(ids)),), "length", "", ("",))
        )
    context.folder.begin("synthesize", context.fingerprints["synthesize"])
    write_atomically(context.folder.of("synthesize") / "corpus.jsonl", to_jsonl(made))
    context.folder.finish("synthesize", {})


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    """A vocabulary of 128256 and rows of 2048 tokens, with 4096 draft ids and 4 TTT steps."""
    folder = tmp_path_factory.mktemp("long")
    model = save_tiny_model(folder / "model", **BIG)
    fields = tiny_recipe(
        model, folder,
        synthesize={"max_reply_tokens": LENGTH - 96, "batch": 4},
        extract={"tokens_per_batch": 4096, "rows_per_shard": 4},
        head={"draft_vocab_size": 4096},
        train={"steps": 2, "line_length": LENGTH, "ttt_steps": 4, "validate_every": 2, "keep_oov": True},
    )  # fmt: skip
    write_corpus(context_of(fields, folder / "run"), rows=6, length=LENGTH)
    return peaks_of(fields, folder / "run")


def check(stage: str, planned: int, measured: int, base: int) -> None:
    assert planned == pytest.approx(measured, rel=0.3), stage
    assert measured > 1.15 * base, f"{stage} hardly takes memory, so its plan is not tested"


def test_peaks_of_long_rows_and_a_large_vocabulary(long_rows: Peaks) -> None:
    for stage in ("extract", "train"):
        check(stage, *long_rows(stage))


def test_peaks_of_writing_and_decoding(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", **BIG, intermediate_size=1024)
    fields = tiny_recipe(
        model, tmp_path,
        synthesize={"max_prompt_tokens": 1024, "max_reply_tokens": 8, "batch": 64},
        train={"steps": 1, "line_length": 1032},
        evaluate={"max_new_tokens": 4, "sampled_prompts": 0},
    )  # fmt: skip
    run = peaks_of(fields, tmp_path / "run")
    for stage in STAGES:
        planned, measured, _ = run(stage)
        assert planned == pytest.approx(measured, rel=0.3), stage


def test_bytes_on_disk_are_those_planned(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    fields = tiny_recipe(model, tmp_path)
    run_stages(parse_recipe(fields, where="tiny"), tmp_path / "run", reporter=Reporter(quiet=True))
    plan = make_plan(context_of(fields, tmp_path / "run"))
    assert plan.facts.counts.exact
    for stage, within in (("extract", 0.02), ("train", 0.04), ("export", 0.1), ("synthesize", 0.5)):
        folder = RunFolder(tmp_path / "run").of(stage)
        measured = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        planned = next(found.disk for found in plan.stages if found.name == stage)
        assert planned == pytest.approx(measured, rel=within), stage
