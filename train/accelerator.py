"""The accelerator of a training run: devices, precision, ranks and trackers, all through accelerate."""

import os
import warnings
from importlib.util import find_spec
from typing import Any

from accelerate import Accelerator

from eyas.models.errors import UserError
from eyas.train.context import RunContext

TRACKERS = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}  # tracker -> the module it needs


def make_accelerator(context: RunContext) -> Accelerator:
    """Return the accelerator of a training run: bf16 autocast or fp32, tracker or none.

    Raises UserError for a tracker that is not installed.
    """
    section = context.recipe.train
    tracker = None if section.tracker == "none" else section.tracker
    if tracker and find_spec(TRACKERS[tracker]) is None:
        raise UserError(f"train.tracker {tracker} needs the package {TRACKERS[tracker]}; pip install it, or set none.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = Accelerator(
            cpu=context.device == "cpu",
            mixed_precision="bf16" if section.precision == "bf16" else "no",
            log_with=tracker,
            project_dir=context.folder.of("train"),
        )
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1")), "the ranks do not know of each other"
    if tracker:
        settings = {key: value for key, value in section.model_dump(mode="json").items() if not isinstance(value, list)}
        accelerator.init_trackers("eyas", config={"recipe": context.recipe.name, **settings})
    return accelerator


def track(accelerator: Accelerator, values: dict[str, Any]) -> None:
    """Hand a report to the trackers: validations under eval/, steps under train/."""
    space = "eval" if values["event"] == "validation" else "train"
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
    accelerator.log({f"{space}/{name}": value for name, value in numbers.items()}, step=values["step"])
