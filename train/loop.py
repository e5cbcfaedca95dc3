"""The training loop: exact token-weighted averaging over accumulation and ranks, validation by replay, full resume.

Every optimizer step takes a window of batches. The trained slots of the whole window are counted first, over all ranks,
so each batch's loss is already its share of the exact mean over tokens, whatever the padding. Which batches a step
takes depends only on seed and step number, so a resumed run continues the straight one.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_store import FeatureRow
from eyas.data.packing import plan_epoch
from eyas.models.checkpoint import save_head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.train.objective import TrainingTimeTest
from eyas.train.schedule import learning_rate_factor
from eyas.train.training_state import Position, load_state, save_state
from eyas.train.validation import HeldOutAcceptance, held_out_acceptance

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LoopPlan:
    """All settings of the loop. `steps` are optimizer steps; `accumulate` batches make one on each rank."""

    steps: int
    accumulate: int
    line_length: int
    lines_per_batch: int
    packed: bool
    learning_rate: float
    lm_head_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    floor: float
    clip: float
    validate_every: int
    checkpoint_every: int
    validation_depth: int
    seed: int


class Batches:
    """The endless, seeded sequence of batches over the training rows; batch n is the same on every rank and restart."""

    def __init__(self, rows: list[FeatureRow], plan: LoopPlan) -> None:
        self.rows = rows
        self.plan = plan
        self.epochs: dict[int, list[list[list[int]]]] = {}
        self.starts = [0]

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        if epoch not in self.epochs:
            plan = self.plan
            self.epochs[epoch] = plan_epoch(
                [len(row) for row in self.rows],
                line_length=plan.line_length,
                lines_per_batch=plan.lines_per_batch,
                packed=plan.packed,
                seed=plan.seed,
                epoch=epoch,
            )
        return self.epochs[epoch]

    def get(self, number: int) -> FeatureBatch:
        """Return batch `number`, counted over all epochs."""
        while number >= self.starts[-1]:
            self.starts.append(self.starts[-1] + len(self._epoch(len(self.starts) - 1)))
        epoch = next(e for e in range(len(self.starts) - 1) if number < self.starts[e + 1])
        lines = [[self.rows[i] for i in line] for line in self._epoch(epoch)[number - self.starts[epoch]]]
        longest = max(sum(len(row) for row in line) for line in lines)
        return collate(lines, length=longest, dtype=torch.float32)

    def epoch_of(self, number: int) -> float:
        """Return how many epochs batch `number` stands at."""
        return number / max(1, len(self._epoch(0)))


def train_head(
    module: TrainingTimeTest,
    rows: list[FeatureRow],
    validation_rows: list[FeatureRow],
    plan: LoopPlan,
    folder: Path,
    *,
    accelerator: Accelerator,
    key: str,
    report: Report,
) -> Position:
    """Train `module.head`, keep the best checkpoint by replayed tau in `folder/best`, return the final position.

    Resumes from `folder/checkpoints`. Raises FloatingPointError on a non-finite loss, UserError without trained slots.
    """
    head = module.head
    optimizer = make_optimizer(head, plan)
    position = Position()
    ranks, rank = accelerator.num_processes, accelerator.process_index
    state = load_state(folder / "checkpoints", key=key, processes=ranks)
    if state:
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        position = Position(**state["position"])
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    batches = Batches(rows, plan)
    started, seen = time.perf_counter(), 0
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32

    def validate() -> HeldOutAcceptance:
        result = held_out_acceptance(head, validation_rows, depth=plan.validation_depth, dtype=dtype)
        position.history.append({"step": position.step, "tau": result.replay.tau, "slot_tau": result.slot_average.tau})
        if result.replay.tau > position.best_tau:
            position.best_tau, position.best_step = result.replay.tau, position.step
            if accelerator.is_main_process:
                save_head(
                    head, folder / "best", dtype=torch.float32,
                    metadata={"trained_steps": position.step, "validation": result.replay.as_dict()},
                )  # fmt: skip
        report({"event": "validation", "step": position.step, **position.history[-1], "best_tau": position.best_tau})
        return result

    if position.step == 0:
        validate()
    while position.step < plan.steps:
        first = (position.step * ranks + rank) * plan.accumulate
        window = [batches.get(first + i).to(accelerator.device) for i in range(plan.accumulate)]
        counts_S = accelerator.reduce(torch.stack([module.counts(batch) for batch in window]).sum(0), reduction="sum")
        if not bool(counts_S.any()):
            raise UserError(
                f"step {position.step}: no slot of the batch is trained; the replies are too short, or no target "
                "token is in the draft vocabulary."
            )
        loss = _accumulate(accelerator, wrapped, window, counts_S)
        norm = accelerator.clip_grad_norm_(head.parameters(), plan.clip)
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
            raise FloatingPointError(
                f"step {position.step}: loss {float(loss)}, gradient norm {float(norm)}; the last good checkpoint is "
                f"in {folder / 'checkpoints'}. Lower train.learning_rate, or use head.fc_norm for very uneven features."
            )
        factor = learning_rate_factor(position.step, steps=plan.steps, warmup=plan.warmup_steps, floor=plan.floor)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * factor * group["rate"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        position.step += 1
        seen += sum(int((batch.document_BT >= 0).sum()) for batch in window) * ranks
        report(
            {
                "event": "step",
                "step": position.step,
                "loss": float(loss),
                "learning_rate": plan.learning_rate * factor,
                "gradient_norm": float(norm),
                "tokens_per_second": seen / (time.perf_counter() - started),
                "epoch": batches.epoch_of(position.step * ranks * plan.accumulate),
            }
        )
        last = position.step == plan.steps
        if last or position.step % plan.validate_every == 0:
            validate()
        if (last or position.step % plan.checkpoint_every == 0) and accelerator.is_main_process:
            save_state(
                folder / "checkpoints",
                head=head.state_dict(),
                optimizer=optimizer.state_dict(),
                position=position,
                key=key,
                processes=ranks,
            )
    return position


def make_optimizer(head: Eagle3Head, plan: LoopPlan) -> torch.optim.Optimizer:
    """Return AdamW over the head; lm_head learns at `lm_head_rate` times the rate of the rest, 0 freezes it."""
    head.lm_head.requires_grad_(plan.lm_head_rate > 0)
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if not name.startswith("lm_head.")], "rate": 1.0},
        {"params": [p for name, p in trained.items() if name.startswith("lm_head.")], "rate": plan.lm_head_rate},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=plan.learning_rate,
        betas=plan.betas,
        weight_decay=plan.weight_decay,
        fused=True,
    )


def _accumulate(
    accelerator: Accelerator, wrapped: torch.nn.Module, window: list[FeatureBatch], counts_S: Tensor
) -> Tensor:
    """Back-propagate a window and return its loss over all ranks.

    Data-parallel ranks average their gradients, so each rank's share is scaled up by their number.
    """
    ranks = accelerator.num_processes
    total = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(window):
        with accelerator.no_sync(wrapped) if i + 1 < len(window) else _nothing():
            loss = wrapped(batch, counts_S)
            accelerator.backward(loss * ranks)
            total += loss.detach()
    return accelerator.reduce(total, reduction="sum")


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


class MetricsFile:
    """Appends reports to a JSONL file; on resume, lines of steps that will be repeated are dropped."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        kept = [line for line in lines if _step_of(line) <= resume_step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")

    def write(self, fields: dict[str, Any]) -> None:
        """Append one line."""
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")
