"""`accelerate launch -m eyas.train RECIPE [--stage S] [--out DIR] [--set k=v]...`: one stage, on all ranks launched.

The configs of recipes/accelerate cover one process, DDP, FSDP2, ZeRO-2 and ZeRO-3, several nodes and several CPU ranks;
torchrun works too.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from eyas.models.errors import CheckFailed, UserError
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe
from eyas.train.run_folder import default_run_folder
from eyas.train.stop_signal import StoppedBySignal

CPU_CONFIG = Path(__file__).resolve().parent.parent / "recipes" / "accelerate" / "cpu-processes.yaml"

SHARED_STAGES = ("synthesize", "extract", "train")  # those whose work ranks divide


def main(arguments: list[str] | None = None) -> int:
    """Run one stage of a recipe, "train" unless another is named, and return the exit code."""
    for chatty in ("torchao", "torch.utils._pytree"):  # on import they tell every user which GPU libraries are missing
        logging.getLogger(chatty).setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(prog="python -m eyas.train", description="Run a stage of a recipe on many ranks.")
    parser.add_argument("recipe", help="a YAML file or the name of a bundled recipe")
    parser.add_argument("--stage", choices=SHARED_STAGES, default="train", help="the stage to run (default: train)")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a value")
    options = parser.parse_args(arguments)
    reporter = Reporter(quiet=int(os.environ.get("RANK", "0")) != 0)
    try:
        check_launch()
        recipe = load_recipe(options.recipe, options.set)
        folder = options.out or default_run_folder(recipe.name)
        run_stages(recipe, folder, first=options.stage, last=options.stage, reporter=reporter)
    except (UserError, CheckFailed, FloatingPointError) as error:
        reporter.error(str(error))
        return 2 if isinstance(error, UserError) else 1
    except StoppedBySignal as stopped:
        reporter.say(str(stopped))
        return stopped.exit_code
    return 0


def check_launch() -> None:
    """Raise UserError where accelerate was asked for several CPU ranks and started one, as it does without MPI."""
    several = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if several and os.environ.get("ACCELERATE_USE_CPU") == "True":
        raise UserError(
            "accelerate launch starts a single process on CPUs, whatever --num_processes says, unless it is given "
            f"--config_file {CPU_CONFIG} (or use torchrun --standalone --nproc_per_node N -m eyas.train RECIPE)."
        )


if __name__ == "__main__":
    sys.exit(main())
