"""A small training run that can be killed while it writes: by SIGKILL, with half of a file on disk."""

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from eyas.inference.draft import DynamicTree
from eyas.models import head_files
from eyas.models.eagle3 import Eagle3Head
from eyas.tests.toys import tiny_head, tiny_target
from eyas.tests.train.rows import greedy_row, loop_plan, objective, random_row
from eyas.train.loop import train_head
from eyas.train.training_state import Position

STEPS = 20
PLAN = loop_plan(
    steps=STEPS, accumulate=3, packed=True, checkpoint_every=5, validate_every=4, warmup_steps=3, floor=0.1, clip=0.5,
    weight_decay=0.01, ema=0.5, learning_rate=5e-3, best_by="tree", validation_tree=DynamicTree(2, 12, 30),
)  # fmt: skip


def train(folder: Path, *, at_step: Callable[[int], None] = lambda step: None) -> tuple[Eagle3Head, Position]:
    """Train a tiny head for a target with tied embeddings, resuming what lies in the folder."""
    target = tiny_target(tie_word_embeddings=True)
    held_out = [greedy_row(target, "held-out", [5, 6, 7], new_tokens=24)]
    rows = [random_row(target, f"row-{i}", prompt=3 + i % 3, reply=4 + i, seed=i) for i in range(7)] + held_out
    head = tiny_head(target).train()

    def report(fields: dict[str, Any]) -> None:
        if fields["event"] == "step":
            at_step(fields["step"])

    position = train_head(
        objective(target, head), rows, held_out, PLAN, folder, accelerator=Accelerator(cpu=True), key="killed",
        report=report,
    )  # fmt: skip
    return head, position


def train_and_die(folder: Path, step: int, what: str, threads: int) -> None:
    """Be a process that is killed in the midst of writing its checkpoint ("state") or best head after a step."""
    torch.set_num_threads(threads)
    save, save_file = torch.save, head_files.save_file
    reached: list[int] = []

    def die(written: bytes, path: Path) -> None:
        path.write_bytes(written[: len(written) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_save(state: Any, file: Any) -> None:
        if what == "state" and reached[-1] >= step:
            buffer = io.BytesIO()
            save(state, buffer)
            die(buffer.getvalue(), Path(file.name))
        save(state, file)

    def dying_save_file(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata=metadata)
        if what == "best" and reached and reached[-1] >= step:
            die(path.read_bytes(), path)

    torch.save, head_files.save_file = dying_save, dying_save_file  # type: ignore[assignment]
    train(folder, at_step=reached.append)
    os._exit(0)
