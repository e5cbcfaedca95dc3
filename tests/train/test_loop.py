"""The training loop: exact averaging, which checkpoint is kept, what stops it, and that resuming changes nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eyas.data.feature_batch import FeatureBatch
from eyas.data.feature_store import FeatureRow
from eyas.inference.acceptance import AcceptanceStats
from eyas.models.checkpoint import load_head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.toys import tiny_head, tiny_target
from eyas.tests.train.rows import greedy_row, loop_plan, objective, random_row
from eyas.train import loop
from eyas.train.loop import Batches, LoopPlan, MetricsFile, train_head
from eyas.train.schedule import learning_rate_factor
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
    key: str = KEY, stop_at: int | None = None, reports: list[dict[str, Any]] | None = None,
) -> tuple[Eagle3Head, Position]:  # fmt: skip
    """Train a fresh tiny head; `stop_at` breaks off after the report of that step, as a kill would."""
    head = tiny_head(target).train()

    def report(fields: dict[str, Any]) -> None:
        if reports is not None:
            reports.append(fields)
        if fields["event"] == "step" and fields["step"] == stop_at:
            raise KeyboardInterrupt

    module, accelerator = objective(target, head), Accelerator(cpu=True)
    position = train_head(module, rows, held_out, plan, folder, accelerator=accelerator, key=key, report=report)
    return head, position


def saved_state(folder: Path) -> dict[str, Any]:
    state = load_state(folder / "checkpoints", key=KEY, processes=1)
    assert state is not None
    return state


def equal(a: Any, b: Any) -> bool:
    """Return whether two nested states are bit-equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


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
        return torch.tensor([float(self.SUMS[self._number(batch)][1])])

    def forward(self, batch: FeatureBatch, counts_S: Tensor) -> Tensor:
        self.seen.append(self._number(batch))
        return self.SUMS[self._number(batch)][0] * self.head.lm_head.weight.sum() / counts_S[0]


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
        states.append(saved_state(tmp_path / name)["optimizer"]["state"])
    assert states[0].keys() == states[1].keys() != set()
    for number, moments in states[0].items():  # after one step the first moment is a tenth of the gradient
        torch.testing.assert_close(moments["exp_avg"], states[1][number]["exp_avg"], rtol=1e-4, atol=1e-7)
    assert any(float(moments["exp_avg"].abs().max()) > 1e-4 for moments in states[0].values())


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_of_batches_holds_every_row_once_and_is_the_same_after_a_restart(
    rows: list[FeatureRow], packed: bool
) -> None:
    plan = loop_plan(packed=packed, lines_per_batch=2, line_length=30)
    batches = Batches(rows, plan)
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
    assert equal(Batches(rows, plan).get(per_epoch + 1).__dict__, batches.get(per_epoch + 1).__dict__)


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
    assert len(state["optimizer"]["state"]) == len(trainable)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-0000002.pt", "step-0000003.pt"]


def test_a_checkpoint_of_other_settings_or_process_counts_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, head={}, optimizer={}, position=Position(step=5), key="these", processes=2)
    assert load_state(tmp_path, key="these", processes=2) is not None
    with pytest.raises(UserError, match=r"step-0000005\.pt was saved by a run with other settings or data; delete"):
        load_state(tmp_path, key="those", processes=2)
    with pytest.raises(UserError, match=r"saved by a run of 2 processes, this one has 1; launch as many again"):
        load_state(tmp_path, key="these", processes=1)
    assert load_state(tmp_path / "nothing", key="these", processes=1) is None


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
    assert (saved["trained_steps"], saved["validation"]["tau"]) == (3, pytest.approx(3.3))
    assert [point["tau"] for point in position.history] == pytest.approx([1.0, 3.3, 3.3, 3.1])


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_good_checkpoint(
    target: Target, rows: list[FeatureRow], held_out: list[FeatureRow], tmp_path: Path
) -> None:
    plan = loop_plan(steps=7, checkpoint_every=1)
    batches = Batches(rows, plan)
    fourth = batches.get(3).input_ids_BT[0].tolist()
    poisoned = [
        FeatureRow(**{**row.__dict__, "aux_hidden_TF": row.aux_hidden_TF * math.nan})
        if row.input_ids_T.tolist() == fourth else row
        for row in rows
    ]  # fmt: skip
    with pytest.raises(FloatingPointError, match=r"step 3: loss nan.*last good checkpoint is in .*checkpoints"):
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


def test_the_learning_rate_warms_up_linearly_and_falls_to_its_floor_as_a_cosine() -> None:
    factors = [learning_rate_factor(step, steps=12, warmup=4, floor=0.2) for step in range(13)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[8] == pytest.approx(0.6)  # half way down
    assert factors[12] == pytest.approx(0.2)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert learning_rate_factor(0, steps=5, warmup=0, floor=0.1) == 1.0
    assert learning_rate_factor(3, steps=3, warmup=9, floor=0.1) == pytest.approx(4 / 9)  # a run inside its warm-up


def test_metrics_of_steps_that_will_be_repeated_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    metrics = MetricsFile(path, resume_step=-1)
    for step in range(5):
        metrics.write({"event": "step", "step": step})
    metrics.file.write('{"event": "step", "st')
    metrics.file.close()
    resumed = MetricsFile(path, resume_step=2)
    resumed.write({"event": "step", "step": 3, "again": True})
    resumed.file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], "again" in line) for line in lines] == [(0, False), (1, False), (2, False), (3, True)]
