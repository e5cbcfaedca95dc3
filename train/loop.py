"""The training loop: exact token-weighted averaging over accumulation and ranks, validation by replay, full resume.

Every optimizer step takes a window of batches. The trained slots of the whole window are counted first, over all ranks,
so each batch's loss is already its share of the exact mean over tokens, whatever the padding and however short the last
window. Which batches a step takes depends only on the seed and on how many were consumed before it, and every random
draw of a step on seed, step and rank: a resumed run continues the straight one. The best head is chosen by replayed
acceptance, never by loss.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch
from eyas.data.feature_row import FeatureRow, RowSource, SelectedRows, as_source
from eyas.inference.draft import DynamicTree
from eyas.models.checkpoint import save_head
from eyas.models.draft_head import DraftHead, copy_head
from eyas.models.errors import UserError
from eyas.train.batches import Batches, steps_for, untrained, window_numbers
from eyas.train.diagnosis import describe_window
from eyas.train.ema import WeightAverage
from eyas.train.objective import TrainingTimeTest
from eyas.train.optimizer import OPTIMIZERS, freeze_output_rows, set_learning_rate
from eyas.train.schedule import learning_rate_factor
from eyas.train.sharding import (
    load_deepspeed,
    load_moments,
    save_deepspeed,
    shards_weights,
    uses_deepspeed,
    whole_moments,
    whole_weights,
)
from eyas.train.stop_signal import EXIT_CODES, StoppedBySignal, StopRequest, stop_requested
from eyas.train.target_odds import TargetOdds
from eyas.train.training_state import Position, load_state, save_state
from eyas.train.validation import HeldOutAcceptance, held_out_acceptance

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LoopPlan:
    """All settings of the loop. `steps` are optimizer steps; `accumulate` batches make one on each rank.

    `epochs` > 0 replaces `steps` by those of so many whole epochs, the last window short if need be. `patience` > 0
    ends training after so many validations without a better tau. `ema` > 0 validates and keeps averaged weights.
    The best head is that of the best chain or tree, as `best_by` says; every `decode_every`-th validation decodes.
    """

    steps: int
    epochs: int
    accumulate: int
    line_length: int
    lines_per_batch: int
    packed: bool
    optimizer: str
    learning_rate: float
    lm_head_rate: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: str
    decay_share: float
    warmup_steps: int
    floor: float
    clip: float
    ema: float
    precision: str
    validate_every: int
    patience: int
    checkpoint_every: int
    validation_depth: int
    validation_tree: DynamicTree
    best_by: Literal["chain", "tree"]
    decode_every: int
    seed: int


def train_head(
    module: TrainingTimeTest,
    rows: RowSource | list[FeatureRow],
    validation_rows: RowSource | list[FeatureRow],
    plan: LoopPlan,
    folder: Path,
    *,
    accelerator: Accelerator,
    key: str,
    report: Report,
    odds: TargetOdds | None = None,
    decode: Callable[[DraftHead], dict[str, float]] | None = None,
    work: Callable[[FeatureBatch], float] | None = None,
) -> Position:
    """Train `module.head`, keep the best checkpoint by replayed tau in `folder/best`, return the final position.

    `odds` are the target's on the validation rows (for acceptance at T=1), `decode` decodes a few prompts with a head,
    `work` counts the operations a batch needs: with it, reports hold the FLOP/s of all ranks together.
    Resumes from `folder/checkpoints`. Raises FloatingPointError on a non-finite loss, UserError without trained slots,
    StoppedBySignal after a SIGTERM, with the state saved.
    """
    run = _Run(
        module, rows, validation_rows, plan, folder, accelerator=accelerator, key=key, report=report, odds=odds,
        decode=decode, work=work,
    )  # fmt: skip
    with stop_requested() as request:
        run.go(request)
    return run.position


class _Run:
    """One training run in one process: what `train_head` sets up once and every step uses."""

    def __init__(
        self, module: TrainingTimeTest, rows: RowSource | list[FeatureRow],
        validation_rows: RowSource | list[FeatureRow], plan: LoopPlan,
        folder: Path, *, accelerator: Accelerator, key: str, report: Report, odds: TargetOdds | None,
        decode: Callable[[DraftHead], dict[str, float]] | None, work: Callable[[FeatureBatch], float] | None,
    ) -> None:  # fmt: skip
        self.module, self.head, self.plan, self.folder = module, module.head, plan, folder
        self.accelerator, self.key, self.report = accelerator, key, report
        self.odds, self.decode, self.work = odds, decode, work
        self.ranks, self.rank = accelerator.num_processes, accelerator.process_index
        validation = as_source(validation_rows)
        self.validation_rows = SelectedRows(validation, range(self.rank, len(validation), self.ranks))
        self.batches = Batches(
            rows, line_length=plan.line_length, lines_per_batch=plan.lines_per_batch, packed=plan.packed, seed=plan.seed
        )
        self.last_batch = self.batches.in_epochs(plan.epochs) if plan.epochs else None
        accelerator.gradient_accumulation_steps = plan.accumulate
        freeze_output_rows(self.head, lm_head_rate=plan.lm_head_rate)
        optimizers = OPTIMIZERS[plan.optimizer](
            self.head, learning_rate=plan.learning_rate, lm_head_rate=plan.lm_head_rate, betas=plan.betas,
            weight_decay=plan.weight_decay,
        )  # fmt: skip
        state = load_state(folder / "checkpoints", key=key)
        if state:
            self.head.load_state_dict(state["head"])
        self.whole_head = copy_head(self.head) if shards_weights(accelerator) else self.head
        self.wrapped, *self.optimizers = accelerator.prepare(module, *optimizers)
        self.average = WeightAverage(self.head, decay=plan.ema) if plan.ema else None
        self.position = Position(**state["position"]) if state else Position()
        if state:
            self._restore(state)
        self.steps = self._total_steps()
        self.dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32

    def _restore(self, state: dict[str, Any]) -> None:
        """Take over moments and average, which are sharded only now."""
        if uses_deepspeed(self.accelerator):
            load_deepspeed(self.wrapped, self.folder / "checkpoints", step=self.position.step)
        else:
            load_moments(self.head, self.optimizers, state["moments"])
        if self.average:
            self.average.load_state_dict(state["average"])

    def _total_steps(self) -> int:
        """Return the optimizer steps of the whole run, as far as done plus what the batches left will make here."""
        if self.last_batch is None:
            return self.plan.steps
        left = max(0, self.last_batch - self.position.batches)
        return self.position.step + steps_for(left, ranks=self.ranks, accumulate=self.plan.accumulate)

    def go(self, request: StopRequest) -> None:
        """Train from the present position to the end, to an early stop or to a signal."""
        if self.position.step == 0:
            self.validate()
        started, done, seen, worked = time.perf_counter(), self.position.step, 0, 0.0
        while self.position.step < self.steps and not self._is_patient_no_more():
            stop, fields, tokens, flops = self._step(request)
            seen, worked = seen + tokens, worked + flops
            elapsed = time.perf_counter() - started
            fields |= {
                "tokens_per_second": seen / elapsed,
                "flops_per_second": worked / elapsed,
                "seconds_left": elapsed / (self.position.step - done) * (self.steps - self.position.step),
            }
            self.report(fields)
            last = self.position.step == self.steps
            if last or self.position.step % self.plan.validate_every == 0:
                self.validate()
                last = last or self._is_patient_no_more()
            if last or stop or self.position.step % self.plan.checkpoint_every == 0:
                self._save()
            if stop and not last:
                name = request.signal_name or "SIGTERM"  # the signal may have reached another rank only
                raise StoppedBySignal(
                    f"stopped by {name} after step {self.position.step}, with the state saved in "
                    f"{self.folder / 'checkpoints'}; run the same command again to go on.",
                    EXIT_CODES[name],
                )

    def _step(self, request: StopRequest) -> tuple[bool, dict[str, Any], int, float]:
        """Take one optimizer step; return whether any rank was asked to stop, what to report, tokens and operations."""
        plan, position, accelerator = self.plan, self.position, self.accelerator
        torch.manual_seed(plan.seed * 1_000_003 + position.step * self.ranks + self.rank)
        numbers = window_numbers(
            position.batches, rank=self.rank, ranks=self.ranks, accumulate=plan.accumulate, last=self.last_batch
        )
        window = [untrained(self.batches.get(0)) if number is None else self.batches.get(number) for number in numbers]
        real = [batch for batch, n in zip(window, numbers, strict=True) if n is not None]
        seen = sum(int((batch.document_BT >= 0).sum()) for batch in real)
        flops = sum(self.work(batch) for batch in real) if self.work else 0.0
        window = [batch.to(accelerator.device) for batch in window]
        counts = torch.stack([self.module.counts(batch) for batch in window]).sum(0)
        extra = torch.tensor([float(bool(request)), float(seen), flops / 1e9], device=counts.device)
        counts_S, (stop, tokens, gflops) = accelerator.reduce(torch.cat((counts, extra)), reduction="sum").split(
            [len(counts), 3]
        )
        if not bool(counts_S.any()):
            raise UserError(
                f"step {position.step}: no slot of the batch is trained; the replies are too short, or no target "
                "token is in the draft vocabulary."
            )
        factor = learning_rate_factor(
            position.step, steps=self.steps, warmup=plan.warmup_steps, floor=plan.floor, schedule=plan.schedule,
            decay_share=plan.decay_share,
        )  # fmt: skip
        set_learning_rate(self.optimizers, plan.learning_rate * factor)  # before backward: DeepSpeed steps within it
        loss = self._accumulate(window, counts_S)
        norm = torch.as_tensor(accelerator.clip_grad_norm_(self.head.parameters(), plan.clip))
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
            ids = [[row.id for line in self.batches.lines(n) for row in line] for n in numbers if n is not None]
            where = describe_window(real, ids, aux_layers=self.head.config.aux_layers) if real else "a batch of none"
            raise FloatingPointError(
                f"step {position.step}: loss {float(loss)}, gradient norm {float(norm)}; rank {self.rank} trained on "
                f"{where}. The last good checkpoint is in {self.folder / 'checkpoints'}. Lower train.learning_rate, or "
                "use head.fc_norm for very uneven features."
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(self.head)
        position.step += 1
        position.batches += self.ranks * plan.accumulate
        if self.last_batch is not None:
            position.batches = min(position.batches, self.last_batch)
        fields = {
            "event": "step",
            "step": position.step,
            "steps": self.steps,
            "loss": float(loss),
            "learning_rate": plan.learning_rate * factor,
            "gradient_norm": float(norm),
            "epoch": self.batches.epoch_of(position.batches),
        }
        return bool(stop), fields, int(tokens), 1e9 * float(gflops)

    def _accumulate(self, window: list[FeatureBatch], counts_S: Tensor) -> Tensor:
        """Back-propagate a window and return its loss over all ranks.

        Ranks average their gradients, accelerate (or DeepSpeed) those of a window: each share is scaled up by both.
        """
        accelerator, device = self.accelerator, self.accelerator.device.type
        scale = self.ranks * len(window)
        total = torch.zeros((), device=accelerator.device)
        for batch in window:
            with accelerator.accumulate(self.wrapped):
                with torch.autocast(device, dtype=self.dtype, enabled=self.dtype != torch.float32):
                    loss = self.wrapped(batch, counts_S)
                accelerator.backward(loss * scale)
                total += loss.detach()
        return accelerator.reduce(total, reduction="sum")

    def _is_patient_no_more(self) -> bool:
        """Return whether the last `patience` validations brought no better tau."""
        if not self.plan.patience:
            return False
        since = [point for point in self.position.history if point["step"] > self.position.best_step]
        return len(since) >= self.plan.patience

    def validate(self) -> None:
        """Replay the held-out rows, keep the head if it is the best so far, and report."""
        with self.average.applied(self.head) if self.average else nullcontext():
            if self.whole_head is not self.head:
                self.whole_head.load_state_dict(whole_weights(self.accelerator, self.head))
            self._validate(self.whole_head)

    def _validate(self, head: DraftHead) -> None:
        position, plan = self.position, self.plan
        found = held_out_acceptance(
            head, self.validation_rows, depth=plan.validation_depth, dtype=self.dtype, tree=plan.validation_tree,
            odds=self.odds,
        )  # fmt: skip
        result = sum_of_ranks(found)
        point = {"step": position.step, **result.taus()}
        decodes = self.decode is not None and plan.decode_every > 0 and len(position.history) % plan.decode_every == 0
        if self.decode is not None and decodes and self.accelerator.is_main_process:
            point |= self.decode(head)
        position.history.append(point)
        tau = point["tree_tau" if plan.best_by == "tree" else "tau"]
        if tau > position.best_tau:
            position.best_tau, position.best_step = tau, position.step
            if self.accelerator.is_main_process:
                save_head(
                    head, self.folder / "best", dtype=torch.float32,
                    metadata={"trained_steps": position.step, "validation": result.as_dict()},
                )  # fmt: skip
        self.report({"event": "validation", **point, "best_tau": position.best_tau, **result.per_step()})

    def _save(self) -> None:
        folder = self.folder / "checkpoints"
        head = whole_weights(self.accelerator, self.head)
        average = self.average.state_dict() if self.average else {}
        if uses_deepspeed(self.accelerator):
            moments: dict[str, Any] = {}
            save_deepspeed(self.wrapped, folder, step=self.position.step)
        else:
            moments = whole_moments(self.head, self.optimizers)
        if self.accelerator.is_main_process:
            save_state(folder, head=head, moments=moments, average=average, position=self.position, key=self.key)


def sum_of_ranks(found: HeldOutAcceptance) -> HeldOutAcceptance:
    """Return the acceptance over all ranks' rows: counts are added, so every rank weighs by its rounds."""
    first, *others = gather_object([found])
    for other in others:
        first += other
    return first
