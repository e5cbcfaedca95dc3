"""The training loop: exact averaging, which checkpoint is kept, what stops it, and that resuming changes nothing."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eyas.data.feature_batch import FeatureBatch
from eyas.data.feature_row import FeatureRow
from eyas.inference.acceptance import AcceptanceStats
from eyas.models.checkpoint import load_head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.toys import tiny_head, tiny_target
from eyas.tests.train.nested import equal
from eyas.tests.train.rows import greedy_row, loop_plan, objective, random_row
from eyas.train import loop
from eyas.train.batches import Batches
from eyas.train.loop import LoopPlan, train_head
from eyas.train.stop_signal import StoppedBySignal
from eyas.train.training_state import Position, load_state, save_state
from eyas.train.validation import HeldOutAcceptance

KEY = "settings"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def rows(target: Target) -> list[FeatureRow]:
    return [random_row(target, f"row-{i}", prompt=3 + i % 3, reply=4 + i, seed=i) for i in range(7)]


@pytest.fixture(scope="module")
def held_out(target: Target) -> list[FeatureRow]:
    return [greedy_row(target, "held-out", [5, 6, 7], new_tokens=12)]


def train(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], plan: LoopPlan, folder: Path, *,
    key: str = KEY, stop_at: int | None = None, signal_at: tuple[int, signal.Signals] | None = None,
    reports: list[dict[str, Any]] | None = None,
) -> tuple[Eagle3Head, Position]:  # fmt: skip
    """Train a fresh tiny head; `stop_at` breaks off after the report of that step, as a kill would.

    `signal_at` sends this process a signal at the report of a step: the step after it is the last.
    """
    head = tiny_head(target).train()

    def report(fields: dict[str, Any]) -> None:
        if reports is not None:
            reports.append(fields)
        if fields["event"] == "step" and fields["step"] == stop_at:
            raise KeyboardInterrupt
        if fields["event"] == "step" and signal_at and fields["step"] == signal_at[0]:
            os.kill(os.getpid(), signal_at[1])

    module, accelerator = objective(target, head), Accelerator(cpu=True)
    position = train_head(module, rows, held_out, plan, folder, accelerator=accelerator, key=key, report=report)
    return head, position


def batches_of(rows: list[FeatureRow], plan: LoopPlan) -> Batches:
    """Return the batches that a plan trains on."""
    return Batches(
        rows, line_length=plan.line_length, lines_per_batch=plan.lines_per_batch, packed=plan.packed, seed=plan.seed
    )


def saved_state(folder: Path) -> dict[str, Any]:
    state = load_state(folder / "checkpoints", key=KEY)
    assert state is not None
    return state


class ByHand(nn.Module):
    """A stand-in for the objective whose batches have known loss sums and trained slots."""

    SUMS = ((20.0, 10), (8.0, 2), (30.0, 3), (9.0, 3), (50.0, 5))

    def __init__(self, rows: list[FeatureRow]) -> None:
        super().__init__()
        self.head = nn.ModuleDict({"lm_head": nn.Linear(1, 1, bias=False)})
        nn.init.ones_(self.head.lm_head.weight)
        self.number_of = {tuple(row.input_ids_T.tolist()): i for i, row in enumerate(rows)}
        self.seen: list[int] = []

    def _number(self, batch: FeatureBatch) -> int:
        return self.number_of[tuple(batch.input_ids_BT[0, batch.document_BT[0] >= 0].tolist())]

    def counts(self, batch: FeatureBatch) -> Tensor:
        trained = bool(batch.generated_mask_BT.any())
        return torch.tensor([float(self.SUMS[self._number(batch)][1]) if trained else 0.0])

    def forward(self, batch: FeatureBatch, counts_S: Tensor) -> Tensor:
        trained = bool(batch.generated_mask_BT.any())
        if trained:
            self.seen.append(self._number(batch))
        return self.SUMS[self._number(batch)][0] * trained * self.head.lm_head.weight.sum() / counts_S[0]


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = HeldOutAcceptance(AcceptanceStats(1), AcceptanceStats(1))
    monkeypatch.setattr(loop, "held_out_acceptance", lambda *args, **settings: nothing)
    monkeypatch.setattr(loop, "save_head", lambda *args, **settings: None)


@pytest.mark.usefixtures("no_files")
def test_the_loss_of_a_step_is_the_mean_over_the_tokens_of_its_window(rows: list[FeatureRow], tmp_path: Path) -> None:
    module, reports = ByHand(rows[:5]), []
    plan = loop_plan(steps=5, accumulate=2, learning_rate=1e-12)
    train_head(module, rows[:5], [], plan, tmp_path, accelerator=Accelerator(cpu=True), key=KEY, report=reports.append)
    steps = [fields for fields in reports if fields["event"] == "step"]
    windows = [module.seen[i : i + 2] for i in range(0, 10, 2)]
    assert sorted(module.seen[:5]) == sorted(module.seen[5:]) == [0, 1, 2, 3, 4]  # each row once per epoch
    expected = [sum(ByHand.SUMS[n][0] for n in window) / sum(ByHand.SUMS[n][1] for n in window) for window in windows]
    assert [fields["loss"] for fields in steps] == pytest.approx(expected, rel=1e-6)
    assert [fields["gradient_norm"] for fields in steps] == pytest.approx(expected, rel=1e-6)
    assert [fields["epoch"] for fields in steps] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


@pytest.mark.usefixtures("no_files")
def test_two_known_batches_average_to_28_over_12(rows: list[FeatureRow], tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    plan = loop_plan(steps=1, accumulate=2)
    train_head(
        ByHand(rows[:2]), rows[:2], [], plan, tmp_path, accelerator=Accelerator(cpu=True), key=KEY,
        report=reports.append,
    )  # fmt: skip
    assert next(f["loss"] for f in reports if f["event"] == "step") == pytest.approx(28 / 12)


def test_the_gradient_of_a_window_equals_that_of_one_batch(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path
) -> None:
    states = []
    for name, changes in (("window", {"accumulate": 3}), ("batch", {"lines_per_batch": 3})):
        plan = loop_plan(steps=1, checkpoint_every=1, **changes)
        train(target, rows, held_out, plan, tmp_path / name)
        states.append(saved_state(tmp_path / name)["moments"]["state"])
    assert states[0].keys() == states[1].keys() != set()
    for number, moments in states[0].items():  # after one step the first moment is a tenth of the gradient
        torch.testing.assert_close(moments["exp_avg"], states[1][number]["exp_avg"], rtol=1e-4, atol=1e-7)
    assert any(float(moments["exp_avg"].abs().max()) > 1e-4 for moments in states[0].values())


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_of_batches_holds_every_row_once_and_is_the_same_after_a_restart(
    rows: list[FeatureRow], packed: bool
) -> None:
    plan = loop_plan(packed=packed, lines_per_batch=2, line_length=30)
    batches = batches_of(rows, plan)
    per_epoch = round(1 / batches.epoch_of(1))
    contents = []
    for number in range(2 * per_epoch):
        batch = batches.get(number)
        assert batch.input_ids_BT.shape[1] <= 30
        contents.append(
            [
                tuple(batch.input_ids_BT[b, batch.document_BT[b] == d].tolist())
                for b in range(len(batch.input_ids_BT))
                for d in range(int(batch.document_BT[b].max()) + 1)
            ]
        )
    expected = sorted(tuple(row.input_ids_T.tolist()) for row in rows)
    epochs = [
        sorted(ids for content in part for ids in content) for part in (contents[:per_epoch], contents[per_epoch:])
    ]
    assert epochs == [expected, expected]
    assert contents[:per_epoch] != contents[per_epoch:]  # shuffled anew
    assert equal(batches_of(rows, plan).get(per_epoch + 1).__dict__, batches.get(per_epoch + 1).__dict__)


@pytest.mark.parametrize("broken_off_at", [3, 13, 15])
def test_a_run_that_was_killed_and_resumed_equals_the_straight_run_bit_for_bit(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path, broken_off_at: int
) -> None:
    plan = loop_plan(
        steps=20, accumulate=3, packed=True, checkpoint_every=5, validate_every=4, warmup_steps=3, floor=0.1, clip=0.5,
        weight_decay=0.01,
    )  # fmt: skip
    straight, position = train(target, rows, held_out, plan, tmp_path / "straight")
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        train(target, rows, held_out, plan, folder, stop_at=broken_off_at)
    whole = sorted(path.name for path in (folder / "checkpoints").glob("step-*.pt")) if broken_off_at > 5 else []
    assert len(whole) == broken_off_at // 5 - (broken_off_at == 15)  # the report comes before the checkpoint
    torn = folder / "checkpoints" / ".step-0000099.pt.1.tmp"
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(b"half a file")
    resumed, position_2 = train(target, rows, held_out, plan, folder)
    assert equal(dict(resumed.state_dict()), dict(straight.state_dict()))
    assert equal(saved_state(folder), saved_state(tmp_path / "straight"))
    assert position_2 == position
    assert [point["step"] for point in position.history] == [0, 4, 8, 12, 16, 20]
    best = [load_head(tmp_path / name / "best", dtype=torch.float32) for name in ("straight", "killed")]
    assert equal(dict(best[0].state_dict()), dict(best[1].state_dict()))
    assert not torn.exists()
    assert not equal(dict(straight.state_dict()), dict(tiny_head(target).state_dict()))


def test_a_finished_run_started_again_does_nothing(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path
) -> None:
    plan = loop_plan(steps=4, checkpoint_every=2)
    _, position = train(target, rows, held_out, plan, tmp_path)
    reports: list[dict[str, Any]] = []
    head, again = train(target, rows, held_out, plan, tmp_path, reports=reports)
    assert again == position
    assert reports == []
    assert equal(dict(head.state_dict()), saved_state(tmp_path)["head"])


def test_a_checkpoint_holds_exactly_the_trainable_tensors_and_the_map(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path
) -> None:
    head, _ = train(target, rows, held_out, loop_plan(steps=3, checkpoint_every=1), tmp_path)
    trainable = {name for name, p in head.named_parameters() if p.requires_grad}
    state = saved_state(tmp_path)
    assert state["head"].keys() == trainable | {"d2t", "t2d"}
    assert len(state["moments"]["state"]) == len(trainable)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-0000002.pt", "step-0000003.pt"]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, head={}, moments={}, average={}, position=Position(step=5), key="these")
    assert load_state(tmp_path, key="these") is not None
    with pytest.raises(UserError, match=r"step-0000005\.pt was saved by a run with other settings or data; delete"):
        load_state(tmp_path, key="those")
    assert load_state(tmp_path / "nothing", key="these") is None


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    torch.save({"key": "these", "processes": 1}, tmp_path / "step-0000005.pt")
    with pytest.raises(UserError, match=r"has checkpoint schema None, this version reads 2; delete"):
        load_state(tmp_path, key="these")


def test_the_best_checkpoint_is_the_earliest_of_the_best_tau_not_the_lowest_loss(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.0, 3.3, 3.3, 3.1])

    def scripted(*args: Any, **settings: Any) -> HeldOutAcceptance:
        stats = AcceptanceStats(3, rounds=10, drafted=30, survived=[round((next(taus) - 1) * 10), 0, 0])
        return HeldOutAcceptance(stats, AcceptanceStats(3))

    monkeypatch.setattr(loop, "held_out_acceptance", scripted)
    reports: list[dict[str, Any]] = []
    plan = loop_plan(steps=9, validate_every=3, accumulate=7, learning_rate=3e-3)
    _, position = train(target, rows, held_out, plan, tmp_path, reports=reports)
    losses = [fields["loss"] for fields in reports if fields["event"] == "step"]
    assert losses[8] < losses[5] < losses[2]  # the loss alone would choose the last
    assert (position.best_step, position.best_tau) == (3, pytest.approx(3.3))
    saved = json.loads((tmp_path / "best" / "eyas.json").read_text())
    assert (saved["trained_steps"], saved["validation"]["replay"]["tau"]) == (3, pytest.approx(3.3))
    assert [point["tau"] for point in position.history] == pytest.approx([1.0, 3.3, 3.3, 3.1])


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_good_checkpoint(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path
) -> None:
    plan = loop_plan(steps=7, checkpoint_every=1)
    batches = batches_of(rows, plan)
    fourth = batches.get(3).input_ids_BT[0].tolist()
    poisoned = [
        FeatureRow(**{**row.__dict__, "aux_hidden_TF": row.aux_hidden_TF * math.nan})
        if row.input_ids_T.tolist() == fourth else row
        for row in rows
    ]  # fmt: skip
    with pytest.raises(
        FloatingPointError, match=r"step 3: loss nan.*rows row-\d; aux layer 1: nothing finite.*checkpoints"
    ):
        train(target, poisoned, held_out, plan, tmp_path)
    state = saved_state(tmp_path)
    assert state["position"]["step"] == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["head"].values())


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_the_head_over_the_vocabulary_learns_at_its_own_rate(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path, rate: float
) -> None:
    plan = loop_plan(steps=1, accumulate=3, learning_rate=1e-3, lm_head_rate=rate)
    trained, _ = train(target, rows, held_out, plan, tmp_path)
    before = tiny_head(target).state_dict()
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in trained.named_parameters()}
    # The first step of Adam moves every weight that has a gradient by the learning rate.
    assert moved["lm_head.weight"] == pytest.approx(1e-3 * rate, rel=1e-2)
    assert moved["fc.weight"] == pytest.approx(1e-3, rel=1e-2)


def test_a_corpus_without_trained_slots_is_refused(target: Target, held_out: list[FeatureRow], tmp_path: Path) -> None:
    single = [random_row(target, "single", prompt=4, reply=1, seed=0)]
    with pytest.raises(UserError, match="no slot of the batch is trained"):
        train(target, single, held_out, loop_plan(), tmp_path)


@pytest.mark.usefixtures("no_files")
def test_whole_epochs_end_with_a_short_window_of_full_weight(rows: list[FeatureRow], tmp_path: Path) -> None:
    module, reports = ByHand(rows[:5]), []
    plan = loop_plan(epochs=1, accumulate=2, learning_rate=1e-12)
    train_head(module, rows[:5], [], plan, tmp_path, accelerator=Accelerator(cpu=True), key=KEY, report=reports.append)
    losses = [fields["loss"] for fields in reports if fields["event"] == "step"]
    assert len(losses) == 3
    assert {fields["steps"] for fields in reports if fields["event"] == "step"} == {3}
    total, slots = ByHand.SUMS[module.seen[4]]
    assert losses[2] == pytest.approx(total / slots)  # not halved, though the window holds one batch of two
    assert sorted(module.seen[:5]) == [0, 1, 2, 3, 4]


def test_averaged_weights_are_validated_kept_and_resumed(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rising(head: Eagle3Head, *args: Any, **settings: Any) -> HeldOutAcceptance:
        seen.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
        return HeldOutAcceptance(AcceptanceStats(3, 10, 30, [len(seen), 0, 0]), AcceptanceStats(3))

    seen: list[dict[str, Tensor]] = []
    monkeypatch.setattr(loop, "held_out_acceptance", rising)
    plan = loop_plan(steps=6, ema=0.5, validate_every=3, checkpoint_every=3)
    head, _ = train(target, rows, held_out, plan, tmp_path / "straight")
    average = saved_state(tmp_path / "straight")["average"]
    assert torch.equal(seen[-1]["fc.weight"], average["average.fc.weight"])
    assert not torch.equal(seen[-1]["fc.weight"], head.fc.weight)
    best = load_head(tmp_path / "straight" / "best", dtype=torch.float32)
    assert torch.equal(best.fc.weight, average["average.fc.weight"])
    with pytest.raises(KeyboardInterrupt):
        train(target, rows, held_out, plan, tmp_path / "killed", stop_at=5)
    train(target, rows, held_out, plan, tmp_path / "killed")
    assert equal(saved_state(tmp_path / "killed")["average"], average)


def test_training_ends_early_when_patience_is_spent(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([10, 20, 20, 19, 99])

    def scripted(*args: Any, **settings: Any) -> HeldOutAcceptance:
        return HeldOutAcceptance(AcceptanceStats(3, 10, 30, [next(taus) // 2, 0, 0]), AcceptanceStats(3))

    monkeypatch.setattr(loop, "held_out_acceptance", scripted)
    plan = loop_plan(steps=40, validate_every=2, patience=2)
    _, position = train(target, rows, held_out, plan, tmp_path)
    assert (position.step, position.best_step) == (6, 2)
    assert saved_state(tmp_path)["position"]["step"] == 6
    _, again = train(target, rows, held_out, plan, tmp_path)  # a finished run stays finished
    assert again == position


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_finishes_the_step_saves_and_resumes_to_the_straight_run(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path, sent: signal.Signals
) -> None:
    plan = loop_plan(steps=8, validate_every=4)
    straight, _ = train(target, rows, held_out, plan, tmp_path / "straight")
    former = signal.getsignal(sent)
    with pytest.raises(StoppedBySignal, match=f"{sent.name} after step 4, with the state saved in") as stopped:
        train(target, rows, held_out, plan, tmp_path / "stopped", signal_at=(3, sent))
    assert stopped.value.exit_code == 128 + sent
    assert signal.getsignal(sent) is former
    assert saved_state(tmp_path / "stopped")["position"]["step"] == 4
    resumed, _ = train(target, rows, held_out, plan, tmp_path / "stopped")
    assert equal(dict(resumed.state_dict()), dict(straight.state_dict()))
