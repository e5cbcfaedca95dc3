"""The accelerator of a training run: devices, precision, ranks and trackers, all through accelerate."""

import json
import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from eyas.models.errors import UserError
from eyas.train.context import RunContext
from eyas.train.recipe import TrainSection

TRACKERS = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}  # tracker -> the module it needs


def make_accelerator(context: RunContext) -> Accelerator:
    """Return the accelerator of a training run, as the launcher's environment asks, with a tracker or none.

    Raises UserError for a tracker that is not installed and for settings that DeepSpeed cannot honour.
    """
    section = context.recipe.train
    launched = os.environ.get("WORLD_SIZE") is not None
    if remark := idle_gpus(torch.cuda.device_count() if context.device.startswith("cuda") else 0, launched=launched):
        context.reporter.say(f"  note: {remark}")
    tracker = None if section.tracker == "none" else section.tracker
    if tracker and find_spec(TRACKERS[tracker]) is None:
        raise UserError(
            f"train.tracker {tracker} needs the package {TRACKERS[tracker]}: pip install 'eyas[{tracker}]', or set it "
            "to none."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = Accelerator(
            cpu=context.device == "cpu" and not _asked_for("DEEPSPEED"),  # accelerate's DeepSpeed finds the CPU itself
            mixed_precision="no",  # the loop casts by itself, the same way on every launcher
            log_with=tracker,
            project_dir=context.folder.of("train"),
        )
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1")), "the ranks do not know of each other"
    if _asked_for("FSDP") and context.device == "cpu":
        shard_on_cpu(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        set_up_deepspeed(accelerator, section)
    if tracker:
        start_tracker(accelerator, tracker, context)
    return accelerator


def idle_gpus(count: int, *, launched: bool) -> str:
    """Return what to say of a machine's GPUs where one process trains on one of them, "" where none stands idle."""
    if launched or count < 2:
        return ""
    return (
        f"this process trains on one of {count} GPUs; accelerate launch --num_processes {count} -m eyas.train RECIPE "
        "uses them all."
    )


def start_tracker(accelerator: Accelerator, tracker: str, context: RunContext) -> None:
    """Start the tracker's run: project eyas, the recipe's name, head and train section as its settings."""
    recipe = context.recipe
    settings: dict[str, bool | int | float | str] = {"recipe": recipe.name}
    for section in (recipe.head, recipe.train):
        for name, value in section.model_dump(mode="json").items():
            settings[name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    folder = context.folder.of("train")
    folder.mkdir(parents=True, exist_ok=True)
    own = {"wandb": {"name": recipe.name, "dir": str(folder)}, "trackio": {"name": recipe.name}}.get(tracker, {})
    accelerator.init_trackers("eyas", config=settings, init_kwargs={tracker: own})


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Make accelerate shard by FSDP2 on CPU ranks, which it does on accelerators only and otherwise drops unsaid."""
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError("eyas shards by FSDP2; set fsdp_version: 2 in the accelerate config.")
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def set_up_deepspeed(accelerator: Accelerator, section: TrainSection) -> None:
    """Fill DeepSpeed's configuration from the recipe: the window, the clipping; raise UserError for what it lacks."""
    if section.optimizer != "adamw":
        raise UserError(f"train.optimizer {section.optimizer} does not run under DeepSpeed; use adamw, DDP or FSDP2.")
    plugin: Any = accelerator.state.deepspeed_plugin
    if section.ema and plugin.zero_stage == 3:
        raise UserError("train.ema needs whole weights on every rank, ZeRO-3 has none; use ZeRO-2, FSDP2 or ema 0.")
    if section.epochs:
        raise UserError("train.epochs may end with a short window, which DeepSpeed cannot weight; use train.steps.")
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = section.lines_per_batch
    plugin.deepspeed_config["gradient_accumulation_steps"] = section.accumulate
    plugin.deepspeed_config["gradient_clipping"] = section.clip


def _asked_for(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def track(accelerator: Accelerator, values: dict[str, Any]) -> None:
    """Hand a report to the trackers: validations under eval/, steps under train/; of lists one number per entry."""
    space = "eval" if values["event"] == "validation" else "train"
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            numbers |= {f"{name}_{place}": number for place, number in enumerate(value, start=1)}
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = value
    accelerator.log({f"{space}/{name}": value for name, value in numbers.items()}, step=values["step"])
