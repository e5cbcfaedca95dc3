"""Every launcher that works on CPU ranks trains the head that one process trains: DDP, FSDP2, DeepSpeed ZeRO-2."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.models.checkpoint import load_head
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import write_recipe
from eyas.train import __main__ as train_main
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe
from eyas.train.training_state import load_state

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"
LAUNCHERS = [
    "cpu-processes",
    "fsdp2",
    pytest.param(
        "deepspeed-zero2", marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs eyas[deepspeed]")
    ),
]
SETTINGS = ["--set", "train.ema=0.9", "--set", "train.checkpoint_every=3"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a tiny recipe and a run folder that is ready for training."""
    folder = tmp_path_factory.mktemp("launchers")
    recipe = write_recipe(save_tiny_model(folder / "model"), folder, train={"steps": 6, "validate_every": 3})
    run_stages(load_recipe(str(recipe)), folder / "before", last="extract", reporter=Reporter(quiet=True))
    return recipe, folder / "before"


@pytest.fixture(scope="module")
def alone(prepared: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of one process that takes the windows of two."""
    recipe, before = prepared
    run = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(before, run)
    assert train_main.main([str(recipe), "--out", str(run), "--set", "train.accumulate=2", *SETTINGS]) == 0
    return run


def launch(config: str, recipe: Path, run: Path, *more: str, processes: int = 2) -> None:
    """Run the documented command with a bundled accelerate config."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    command += ["--num_processes", str(processes), "-m", "eyas.train", str(recipe), "--out", str(run), *SETTINGS, *more]
    with subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its workers then, and only then
            raise
    assert process.returncode == 0, said[-6000:]


def weights(run: Path) -> dict[str, Tensor]:
    return dict(load_head(run / "training" / "best", dtype=torch.float32).state_dict())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("config", LAUNCHERS)
def test_two_processes_of_every_launcher_give_the_head_of_one(
    prepared: tuple[Path, Path], alone: Path, tmp_path: Path, config: str
) -> None:
    recipe, before = prepared
    run = tmp_path / "run"
    shutil.copytree(before, run)
    launch(config, recipe, run)
    record = json.loads((run / "stages" / "train.json").read_text())
    assert record["result"]["processes"] == 2
    assert_close(weights(run), weights(alone))
    state = load_state(run / "training" / "checkpoints", key=record["fingerprint"])
    assert state is not None
    assert state["position"]["step"] == 6
    assert all(type(tensor) is Tensor for tensor in state["head"].values())  # whole, not shards
    if config != "deepspeed-zero2":  # which keeps its moments in a folder of its own
        assert state["moments"]["state"].keys() == {n for n, t in state["head"].items() if t.is_floating_point()}


def test_a_run_goes_on_with_another_number_of_processes(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, before = prepared
    run = tmp_path / "run"
    shutil.copytree(before, run)
    launch("fsdp2", recipe, run)
    later = sorted((run / "training" / "checkpoints").glob("step-*.pt"))
    later[-1].unlink()  # back to step 3, as if the run had been killed before its end
    record = json.loads((run / "stages" / "train.json").read_text())
    (run / "stages" / "train.json").write_text(json.dumps({**record, "finished": False}))
    assert train_main.main([str(recipe), "--out", str(run), *SETTINGS]) == 0
    state = load_state(run / "training" / "checkpoints", key=record["fingerprint"])
    assert state is not None
    assert state["position"]["step"] == 6
    assert state["position"]["batches"] == 3 * 2 + 3  # three steps of two ranks, three of one
