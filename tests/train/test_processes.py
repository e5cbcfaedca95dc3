"""Two processes train what one process trains, also when one of them has nothing to train on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eyas.models.checkpoint import load_head
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import write_recipe
from eyas.tests.train.two_ranks import train_two_rows
from eyas.train import __main__ as train_main
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe
from eyas.train.training_state import load_state


class Launched(NamedTuple):
    recipe: Path
    before: Path  # a run folder that is ready for training
    run: Path
    rows: Path
    said: str


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Two processes, launched once for all tests: two rows, one of them masked, then the train stage of a tiny run."""
    folder = tmp_path_factory.mktemp("processes")
    recipe = write_recipe(save_tiny_model(folder / "model"), folder, train={"steps": 6, "validate_every": 3})
    before, run, rows = folder / "before", folder / "run", folder / "rows"
    run_stages(load_recipe(str(recipe)), before, last="extract", reporter=Reporter(quiet=True))
    shutil.copytree(before, run)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command += ["eyas.tests.train.two_ranks", str(rows), str(recipe), str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its workers then, and only then
            raise
    assert process.returncode == 0, said
    return Launched(recipe, before, run, rows, said)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_two_processes_give_the_weights_of_one_though_one_rank_has_only_masked_rows(
    launched: Launched, tmp_path: Path
) -> None:
    train_two_rows(tmp_path, accumulate=2)
    one = load_state(tmp_path / "checkpoints", key="two")
    two = load_state(launched.rows / "straight" / "checkpoints", key="two")
    assert one is not None
    assert two is not None
    assert_same(two["head"], one["head"])
    for number, moments in one["moments"]["state"].items():  # Adam's steps alone would hide a wrong scale
        assert_same(two["moments"]["state"][number], moments)
    for point, other in zip(two["position"]["history"], one["position"]["history"], strict=True):
        assert point == pytest.approx(other, rel=1e-5)  # the ranks shared the held-out rows


def test_two_processes_that_were_stopped_and_started_again_equal_those_that_were_not(launched: Launched) -> None:
    straight, resumed = (
        load_state(launched.rows / name / "checkpoints", key="two") for name in ("straight", "resumed")
    )
    assert straight is not None
    assert resumed is not None
    assert_same(resumed["head"], straight["head"])
    for number, moments in straight["moments"]["state"].items():
        assert_same(resumed["moments"]["state"][number], moments)
    assert resumed["position"] == straight["position"]


def test_the_train_stage_on_two_processes_gives_the_head_of_one(launched: Launched, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(launched.before, run)
    assert train_main.main([str(launched.recipe), "--out", str(run), "--set", "train.accumulate=2"]) == 0
    best = [load_head(folder / "training" / "best", dtype=torch.float32).state_dict() for folder in (launched.run, run)]
    assert_same(*best)
    records = [json.loads((folder / "stages" / "train.json").read_text()) for folder in (launched.run, run)]
    assert records[0]["finished"]
    results = [record["result"] for record in records]
    assert [result.pop("processes") for result in results] == [2, 1]
    for of_two, of_one in zip(*(result.pop("history") for result in results), strict=True):
        assert of_two == pytest.approx(of_one, rel=1e-5)
    for name, value in results[0].items():
        assert value == (pytest.approx(results[1][name], rel=1e-5) if "tau" in name else results[1][name]), name
    logged = [
        [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]
        for folder in (launched.run, run)
    ]
    for of_two, of_one in zip(*logged, strict=True):
        for name in of_two.keys() - {"tokens_per_second", "flops_per_second", "utilisation", "seconds_left"}:
            assert of_two[name] == (of_one[name] if name == "event" else pytest.approx(of_one[name], rel=1e-5)), name


def test_of_two_ranks_one_speaks_and_writes(launched: Launched) -> None:
    assert [line for line in launched.said.splitlines() if line.startswith("[")] == ["[3/5] train"]
    lines = [json.loads(line) for line in (launched.run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert lines[-2]["epoch"] == pytest.approx(12 / 6)  # two lines a step, of twelve rows in six lines


def test_several_cpu_ranks_asked_of_accelerate_are_refused_because_it_starts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "True"}  # what its launcher sets, and all of it
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert train_main.main(["smollm2-quickstart", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "unless it is given --config_file" in said
    assert "cpu-processes.yaml (or use torchrun --standalone --nproc_per_node N -m eyas.train RECIPE)" in said


def test_the_extract_stage_on_two_processes_writes_the_store_of_one(launched: Launched, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(launched.before / "corpus", run / "corpus")
    (run / "stages").mkdir()
    shutil.copy(launched.before / "stages" / "synthesize.json", run / "stages")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command += ["eyas.train", str(launched.recipe), "--stage", "extract", "--out", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("[")] == ["[2/5] extract"]
    assert json.loads((run / "stages" / "extract.json").read_text())["finished"]
    written, expected = (
        {path.name: path.read_bytes() for path in (folder / "features").iterdir()} for folder in (run, launched.before)
    )
    assert written.keys() == expected.keys()
    assert [name for name in expected if written[name] != expected[name]] == []
