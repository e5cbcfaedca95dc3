"""Training-time test against its slow reference, and what may add to the loss."""

import copy
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_row import FeatureRow
from eyas.kernels import draft_gradients, ttt_attention_blocks
from eyas.kernels import ttt_attention as kernel_ttt
from eyas.kernels.triton_support import interpreted
from eyas.models.draft_head import DraftHead
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import Target
from eyas.models.target_head import TargetHead
from eyas.models.ttt_attention import TTT_ATTENTIONS
from eyas.models.warm_start import vocabulary_of
from eyas.tests.toys import tiny_eagle1, tiny_head, tiny_target
from eyas.tests.train.rows import feature_row, gradients, objective, random_row
from eyas.tests.train.slow_reference import slow_loss, trained_slots
from eyas.train import draft_loss
from eyas.train.losses import OBJECTIVES
from eyas.train.objective import TrainingTimeTest
from eyas.train.slot_weights import SlotWeighting

WEIGHTS = (1.0, 0.5, 0.25)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def head(target: Target) -> Eagle3Head:
    return tiny_head(target).train()


@pytest.fixture(scope="module")
def rows(target: Target) -> list[FeatureRow]:
    """Two turns in one row; a plain row; a reply of two tokens (one slot at step 0); a reply of one (none at all)."""
    ids = torch.randint(0, target.vocab_size, (19,), generator=torch.Generator().manual_seed(5)).tolist()
    return [
        feature_row(target, "two-turns", ids, [(4, 8), (13, 17)]),
        random_row(target, "plain", prompt=5, reply=7, seed=6),
        random_row(target, "short", prompt=3, reply=2, seed=7),
        random_row(target, "single", prompt=6, reply=1, seed=8),
    ]


def padded(rows: list[FeatureRow], *, length: int = 23) -> FeatureBatch:
    return collate([[row] for row in rows], length=length, dtype=torch.float32)


def packed(rows: list[FeatureRow], *, length: int = 53) -> FeatureBatch:
    return collate([rows], length=length, dtype=torch.float32)


def test_the_trained_slots_of_two_turns_are_those_of_the_contract(
    target: Target, head: Eagle3Head, rows: list[FeatureRow]
) -> None:
    module = objective(target, head, keep_oov=True)
    slots = [module._slots(padded(rows[:1]), step).nonzero().squeeze(-1).tolist() for step in range(3)]
    assert slots == [[3, 4, 5, 6, 12, 13, 14, 15], [3, 4, 5, 12, 13, 14], [3, 4, 12, 13]]
    assert module.counts(padded(rows[:1])).tolist() == [8.0, 6.0, 4.0]


@pytest.mark.parametrize("keep_oov", [False, True])
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_loss_and_gradients_equal_the_slow_reference(
    target: Target, head: Eagle3Head, rows: list[FeatureRow], loss: str, keep_oov: bool
) -> None:
    module = objective(target, head, loss=loss, weights=WEIGHTS, keep_oov=keep_oov)
    batch = padded(rows)
    value = module(batch, module.counts(batch))
    value.backward()
    found = gradients(head)
    expected = slow_loss(head, target, rows, loss=loss, weights=WEIGHTS, keep_oov=keep_oov)
    expected.backward()
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    of_reference = gradients(head)
    assert found.keys() == of_reference.keys() == {name for name, _ in head.named_parameters()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, of_reference[name], rtol=2e-4, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a machine with a GPU")
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_with_every_kernel_switched_on_they_equal_the_slow_reference_too(
    target: Target, head: Eagle3Head, rows: list[FeatureRow], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    launched = set()
    for module_, name in ((draft_gradients, "launch_gradients"), (kernel_ttt, "launch_forward")):
        original = getattr(module_, name)

        def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
            launched.add(_name)
            return _original(*args)

        monkeypatch.setattr(module_, name, counted)
    batch, module = packed(rows), objective(target, head, loss=loss, weights=WEIGHTS)
    with interpreted():
        value = module(batch, module.counts(batch))
        value.backward()
    assert launched == {"launch_gradients", "launch_forward"}
    found = gradients(head)
    expected = slow_loss(head, target, rows, loss=loss, weights=WEIGHTS, keep_oov=False)
    expected.backward()
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, gradient in gradients(head).items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_training_on_a_gpu_equals_training_on_the_cpu(
    target: Target, head: Eagle3Head, rows: list[FeatureRow], loss: str
) -> None:
    batch, module = packed(rows), objective(target, head, loss=loss, weights=WEIGHTS)
    value = module(batch, module.counts(batch))
    value.backward()
    expected = gradients(head)
    there = copy.deepcopy(module).cuda()
    there.head.use_embedding(copy.deepcopy(target.embedding).cuda())
    there.teacher = module.teacher.to(dtype=torch.float32, device="cuda")
    there.draft_ids_V = module.draft_ids_V.cuda()
    moved = FeatureBatch(**{name: tensor.cuda() for name, tensor in batch.__dict__.items()})
    there(moved, there.counts(moved)).backward()
    for name, gradient in gradients(there.head).items():
        torch.testing.assert_close(gradient.cpu(), expected[name], rtol=1e-3, atol=1e-5)


def test_counts_are_those_of_the_contract(target: Target, head: Eagle3Head, rows: list[FeatureRow]) -> None:
    drafted = set(vocabulary_of(head).token_ids_U.tolist())
    for keep_oov in (False, True):
        expected = [
            sum(len(trained_slots(row, step, drafted=None if keep_oov else drafted)) for row in rows)
            for step in range(3)
        ]
        module = objective(target, head, keep_oov=keep_oov)
        assert module.counts(padded(rows)).tolist() == expected
        assert module.counts(packed(rows)).tolist() == expected
    assert objective(target, head, keep_oov=True).counts(padded(rows)).tolist() == [15.0, 11.0, 8.0]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_packed_and_padded_rows_give_one_loss_and_gradient(
    target: Target, head: Eagle3Head, rows: list[FeatureRow], order: list[int]
) -> None:
    module = objective(target, head, loss="lk")
    module(padded(rows), module.counts(padded(rows))).backward()
    expected = gradients(head)
    ordered = packed([rows[i] for i in order])
    module(ordered, module.counts(ordered)).backward()
    for name, gradient in gradients(head).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_window_of_batches_adds_up_to_one_batch_of_all_its_rows(
    target: Target, head: Eagle3Head, rows: list[FeatureRow]
) -> None:
    module = objective(target, head)
    batch = padded(rows)
    module(batch, module.counts(batch)).backward()
    expected = gradients(head)
    pieces = [padded(rows[:1]), padded(rows[1:3], length=12), padded(rows[3:])]
    counts_S = torch.stack([module.counts(piece) for piece in pieces]).sum(0)
    for piece in pieces:
        module(piece, counts_S).backward()
    for name, gradient in gradients(head).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_target_token_outside_the_draft_vocabulary_adds_nothing_unless_it_is_kept(
    target: Target, head: Eagle3Head, rows: list[FeatureRow]
) -> None:
    row = rows[0]
    drafted = set(vocabulary_of(head).token_ids_U.tolist())
    outside = [p for p in range(len(row)) if int(row.argmax_T[p]) >= 0 and int(row.argmax_T[p]) not in drafted]
    assert outside, "the toy row has no such token: choose another seed"
    disturbed = FeatureRow(**{**row.__dict__, "final_hidden_TD": row.final_hidden_TD.clone()})
    disturbed.final_hidden_TD[outside] += 3.0

    def value(row: FeatureRow, *, keep_oov: bool) -> float:
        module = objective(target, head, keep_oov=keep_oov)
        return float(module(padded([row]), module.counts(padded([row]))).detach())

    assert value(disturbed, keep_oov=False) == value(row, keep_oov=False)
    assert abs(value(disturbed, keep_oov=True) - value(row, keep_oov=True)) > 1e-3


def test_a_row_trains_iff_some_slot_of_it_is_counted(target: Target, head: Eagle3Head, rows: list[FeatureRow]) -> None:
    drafted = set(vocabulary_of(head).token_ids_U.tolist())
    outside = next(token for token in range(target.vocab_size) if token not in drafted)
    undraftable = FeatureRow(
        **{**rows[1].__dict__, "argmax_T": torch.where(rows[1].argmax_T >= 0, outside, rows[1].argmax_T)}
    )
    for keep_oov, expected in ((False, [True, True, False, False]), (True, [True, True, False, True])):
        module = objective(target, head, keep_oov=keep_oov)
        asked = [rows[0], rows[1], rows[3], undraftable]
        assert [module.trains(row) for row in asked] == expected
        assert [bool(module.counts(padded([row])).any()) for row in asked] == expected


def test_a_batch_without_trained_slots_has_a_loss_of_zero_that_still_reaches_every_parameter(
    target: Target, head: Eagle3Head, rows: list[FeatureRow]
) -> None:
    module = objective(target, head)
    batch = padded(rows[3:])
    loss = module(batch, module.counts(batch))
    loss.backward()
    assert float(loss.detach()) == 0.0
    found = gradients(head)
    assert found.keys() == {name for name, _ in head.named_parameters()}  # data-parallel ranks wait for all of them
    assert all(not bool(gradient.any()) for gradient in found.values())


def test_the_teacher_is_asked_once_and_only_where_a_slot_is_supervised(
    target: Target, head: Eagle3Head, rows: list[FeatureRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tensor] = []
    logits = TargetHead.logits

    def watched(self: TargetHead, hidden: Tensor) -> Tensor:
        asked.append(hidden)
        return logits(self, hidden)

    monkeypatch.setattr(TargetHead, "logits", watched)
    module = objective(target, head, keep_oov=True)
    module(packed(rows[:1]), module.counts(packed(rows[:1])))
    # Slots 3 .. 6 and 12 .. 15 of the two turns: the distributions one position on.
    taught = [hidden for hidden in asked if not hidden.requires_grad]  # the others are the head's own states
    assert len(taught) == 1
    assert torch.equal(taught[0], rows[0].final_hidden_TD[[4, 5, 6, 7, 13, 14, 15, 16]])


class NoLargeTensor(TorchDispatchMode):
    """Fails on any operation whose result has `limit` elements or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not func.is_view:
                self.largest = max(self.largest, value.numel())
                assert value.numel() < self.limit, f"{func} returned {tuple(value.shape)}"
        return result


def test_no_tensor_of_rows_by_target_vocabulary_is_ever_made() -> None:
    vocab_size, length = 5000, 64
    target = tiny_target(vocab_size=vocab_size)
    head = tiny_head(target, draft_vocab_size=64).train()
    row = random_row(target, "long", prompt=4, reply=length - 4, seed=3)
    module = objective(target, head, keep_oov=True)
    batch = padded([row], length=length)
    with NoLargeTensor(8 * vocab_size) as seen:  # a few rows of full logits would already be seen
        module(batch, module.counts(batch)).backward()
    assert seen.largest >= 3 * 64 * (length - 6), "the hook saw less than the draft logits: it is not watching"
    with pytest.raises(AssertionError, match=r"returned \(64, 5000\)"), NoLargeTensor(8 * vocab_size):
        target.head.logits(row.final_hidden_TD)


def exact(target: Target, module: TrainingTimeTest) -> TrainingTimeTest:
    """Return the module in fp64: head, teacher and the embedding it borrows."""
    module.head.double().use_embedding(copy.deepcopy(target.embedding).double())
    module.teacher = module.teacher.to(dtype=torch.float64, device="cpu")
    return module


def in_double(batch: FeatureBatch) -> FeatureBatch:
    return replace(
        batch, aux_hidden_BTF=batch.aux_hidden_BTF.double(), final_hidden_BTD=batch.final_hidden_BTD.double()
    )


def loss_and_gradients(module: TrainingTimeTest, batches: list[FeatureBatch]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a window of batches and its gradients."""
    batches = [in_double(batch) for batch in batches]
    counts_S = torch.stack([module.counts(batch) for batch in batches]).sum(0)
    total = 0.0
    for batch in batches:
        loss = module(batch, counts_S)
        loss.backward()
        total += float(loss.detach())
    return total, gradients(module.head)


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_padded_packed_split_and_recomputed_agree_to_the_last_digits_of_fp64(
    target: Target, rows: list[FeatureRow], kind: str, normalisation: Literal["token", "sequence"], attention: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(draft_loss, "CHUNK_ELEMENTS", 300)
    monkeypatch.setattr(draft_gradients, "BLOCK_ELEMENTS", 130)
    monkeypatch.setattr(ttt_attention_blocks, "QUERY_BLOCK", 6)
    head: DraftHead = tiny_head(target) if kind == "eagle3" else tiny_eagle1(target)
    settings: dict[str, Any] = {
        "loss": "lk", "normalisation": normalisation, "attention": attention, "feature_weight": float(kind == "eagle1"),
    }  # fmt: skip
    module = exact(target, objective(target, head.train(), **settings))
    value, expected = loss_and_gradients(module, [padded(rows)])
    assert value > 0
    module.plan = replace(module.plan, recompute=True)
    windows = {
        "recomputed": [padded(rows)],
        "packed": [packed(rows)],
        "packed backwards": [packed(rows[::-1], length=61)],
        "accumulated": [padded(rows[:1], length=19), packed(rows[1:3]), padded(rows[3:])],
    }
    for name, window in windows.items():
        other, found = loss_and_gradients(module, window)
        assert other == pytest.approx(value, rel=1e-11), name
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-8, atol=1e-11, msg=f"{name}: {key}")


def test_two_batches_of_known_losses_have_the_hand_computed_mean(target: Target, rows: list[FeatureRow]) -> None:
    module = objective(target, tiny_head(target), weights=(1.0,), keep_oov=True)
    batches = [padded(rows[:2]), padded(rows[2:])]
    counts = [float(module.counts(batch)) for batch in batches]
    assert counts == [14.0, 1.0]
    one = torch.ones(1)
    sums = [float(module(batch, one).detach()) for batch in batches]
    window = torch.tensor([sum(counts)])
    together = sum(float(module(batch, window).detach()) for batch in batches)
    assert together == pytest.approx(sum(sums) / 15, rel=1e-6)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert abs(together - sum(means) / 2) > 1e-3


def test_every_reply_weighs_alike_under_sequence_normalisation(target: Target, rows: list[FeatureRow]) -> None:
    head = tiny_head(target)
    settings: dict[str, Any] = {"weights": (1.0,), "keep_oov": True}
    by_token = objective(target, head, **settings)
    by_reply = objective(target, head, normalisation="sequence", **settings)
    assert by_reply.counts(padded(rows)).tolist() == [3.0]  # the reply of one token has no slot
    means = [float(by_token(padded([row]), by_token.counts(padded([row]))).detach()) for row in rows[:3]]
    for batch in (padded(rows), packed(rows)):
        value = float(by_reply(batch, by_reply.counts(batch)).detach())
        assert value == pytest.approx(sum(means) / 3, rel=1e-5)


def test_supervising_everything_trains_the_prompt_too(target: Target, rows: list[FeatureRow]) -> None:
    module = objective(target, tiny_head(target), everywhere=True, keep_oov=True)
    assert module.counts(padded(rows)).tolist() == [sum(len(row) - 2 - s for row in rows) for s in range(3)]
    assert module.counts(packed(rows)).tolist() == module.counts(padded(rows)).tolist()


def test_weights_reach_the_loss_and_only_scale_pairs(target: Target, head: Eagle3Head, rows: list[FeatureRow]) -> None:
    batch = packed(rows)
    plain = objective(target, head)
    weighted = objective(target, head, weighting=SlotWeighting(pace=1.0))  # S - s in a reply's middle, less at its end
    counts = plain.counts(batch)
    assert float(weighted(batch, counts).detach()) > float(plain(batch, counts).detach())
    nothing = objective(target, head, weighting=SlotWeighting(top_k=61), keep_oov=True)
    kept = objective(target, head, keep_oov=True)
    drafted = set(vocabulary_of(head).token_ids_U.tolist())
    assert not all(token in drafted for row in rows for token in row.input_ids_T.tolist())
    assert float(nothing(batch, counts).detach()) < float(kept(batch, counts).detach())
    full = tiny_head(target, draft_vocab_size=97)
    everything = objective(target, full, weighting=SlotWeighting(top_k=97, start_floor=1.0))
    assert float(everything(batch, counts).detach()) == float(objective(target, full)(batch, counts).detach())
