"""What trackers are told: settings they can take, train/ and eval/ apart; and every installed tracker for real."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from eyas.models.errors import UserError
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train import accelerator as accelerator_module
from eyas.train.accelerator import TRACKERS, idle_gpus, make_accelerator, start_tracker, track
from eyas.train.context import RunContext
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder

STEP = {"event": "step", "step": 3, "steps": 9, "loss": 2.5, "tokens_per_second": 800.0, "utilisation": 0.5}
VALIDATION = {"event": "validation", "step": 3, "tau": 1.5, "tree_tau": 1.9, "alpha": [0.4, 0.3]}
INSTALLED = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"needs eyas[{name}]"))
    for name, package in TRACKERS.items()
]


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    model = save_tiny_model(tmp_path / "model")
    train = {"loss": {"kl": 0.5, "lk": 0.5}, "betas": [0.8, 0.9], "tracker": "none"}
    recipe = parse_recipe(tiny_recipe(model, tmp_path, train=train), where="here")
    return RunContext(recipe, RunFolder(tmp_path / "run"), Reporter(quiet=True))


class Watched:
    """In place of an accelerator: keeps what it is told."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int]] = []

    def init_trackers(self, project: str, *, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None:
        self.started = {"project": project, "config": config, "kwargs": init_kwargs}

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.append((values, step))


def test_settings_are_such_as_every_tracker_takes(context: RunContext) -> None:
    watched = Watched()
    start_tracker(watched, "wandb", context)  # type: ignore[arg-type]
    config = watched.started["config"]
    assert all(isinstance(value, bool | int | float | str) for value in config.values())
    assert (config["recipe"], config["kind"], config["ttt_steps"], config["draft_vocab_size"]) == (
        "tiny",
        "eagle3",
        7,
        128,
    )
    assert json.loads(config["loss"]) == {"kl": 0.5, "lk": 0.5}
    assert config["pace"] == "null"
    folder = context.folder.of("train")
    assert watched.started["kwargs"] == {"wandb": {"name": "tiny", "dir": str(folder)}}
    assert folder.is_dir()


def test_steps_and_validations_are_told_apart_and_lists_number_by_number() -> None:
    watched = Watched()
    for report in (STEP, VALIDATION):
        track(watched, report)  # type: ignore[arg-type]
    (step, at), (validation, then) = watched.logged
    assert (at, then) == (3, 3)
    assert step == {"train/steps": 9, "train/loss": 2.5, "train/tokens_per_second": 800.0, "train/utilisation": 0.5}
    assert validation == {"eval/tau": 1.5, "eval/tree_tau": 1.9, "eval/alpha_1": 0.4, "eval/alpha_2": 0.3}


def test_a_tracker_that_is_not_installed_is_named(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_module, "find_spec", lambda name: None)
    asked = context.recipe.train.model_copy(update={"tracker": "trackio"})
    wanting = RunContext(context.recipe.model_copy(update={"train": asked}), context.folder, context.reporter)
    with pytest.raises(UserError, match=r"needs the package trackio: pip install 'eyas\[trackio\]', or set it to none"):
        make_accelerator(wanting)


@pytest.mark.parametrize("tracker", INSTALLED)
def test_a_run_is_kept_without_a_network(
    context: RunContext, tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    asked = context.recipe.train.model_copy(update={"tracker": tracker})
    run = RunContext(context.recipe.model_copy(update={"train": asked}), context.folder, context.reporter)
    accelerator = make_accelerator(run)
    for report in (STEP, VALIDATION):
        track(accelerator, report)
    accelerator.end_training()
    folder = context.folder.of("train")
    kept = {
        "tensorboard": lambda: list(folder.rglob("events.out.tfevents.*")),
        "wandb": lambda: list((folder / "wandb").glob("offline-run-*/*.wandb")),
        "trackio": lambda: list((tmp_path / "trackio").rglob("eyas*")),
    }[tracker]()
    assert kept
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "eyas")).Reload()
        assert {"train/loss", "eval/tau", "eval/tree_tau", "eval/alpha_2"} <= set(events.Tags()["scalars"])
        assert [(event.step, event.value) for event in events.Scalars("eval/tau")] == [(3, 1.5)]


def test_gpus_that_stand_idle_beside_one_process_are_named() -> None:
    assert "one of 4 GPUs; accelerate launch --num_processes 4 -m eyas.train RECIPE" in idle_gpus(4, launched=False)
    assert [idle_gpus(4, launched=True), idle_gpus(1, launched=False), idle_gpus(0, launched=False)] == ["", "", ""]
