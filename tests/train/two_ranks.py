"""What the test of several processes runs in each of them.

torchrun --standalone --nproc_per_node 2 -m eyas.tests.train.two_ranks FOLDER RECIPE RUN
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from eyas.tests.toys import tiny_head, tiny_target
from eyas.tests.train.rows import greedy_row, loop_plan, objective, random_row
from eyas.train import __main__ as train_main
from eyas.train.loop import train_head


def train_two_rows(folder: Path, *, accumulate: int, stop_at: int | None = None) -> None:
    """Train a tiny head on one good row and one without any trained slot.

    Two batches make a step, on one process or on two: of two ranks one has the masked row alone in its window.
    `stop_at` breaks off at the report of a step, as a kill would.
    """
    target = tiny_target()
    rows = [
        random_row(target, "good", prompt=4, reply=9, seed=0),
        random_row(target, "masked", prompt=5, reply=1, seed=1),
    ]
    accelerator = Accelerator(cpu=True)
    module = objective(target, tiny_head(target).train())
    plan = loop_plan(steps=4, accumulate=accumulate, validate_every=2, checkpoint_every=2)
    held_out = [
        greedy_row(target, str(n), prompt, new_tokens=6 + n) for n, prompt in enumerate(([5, 6, 7], [9], [4, 4]))
    ]

    def report(fields: dict[str, Any]) -> None:
        if fields["event"] == "step" and fields["step"] == stop_at:
            raise KeyboardInterrupt

    train_head(module, rows, held_out, plan, folder, accelerator=accelerator, key="two", report=report)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_two_rows(Path(sys.argv[1]) / "straight", accumulate=1)
    with suppress(KeyboardInterrupt):
        train_two_rows(Path(sys.argv[1]) / "resumed", accumulate=1, stop_at=3)
    train_two_rows(Path(sys.argv[1]) / "resumed", accumulate=1)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # the command must find the ranks by itself
    sys.exit(train_main.main([sys.argv[2], "--out", sys.argv[3]]))
