"""The chunked loss against plain PyTorch on whole logits: values, gradients, output heads of every kind, memory."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.kernels import draft_gradients
from eyas.models.target_head import TargetHead
from eyas.train import draft_loss as op
from eyas.train.draft_loss import Lesson, draft_loss, draft_loss_reference, draft_outlook
from eyas.train.losses import LossMix

D, U, P = 6, 17, 5
POSITIONS = torch.tensor([0, 0, 0, 1, 3, 3, 4])  # position 2 teaches nothing
MIX = LossMix((("kl", 0.5), ("ce", 0.2), ("lk", 0.7)))
HEADS = {
    "plain": TargetHead(torch.randn(U, D, dtype=torch.float64), None, 1.0, None),
    "bias": TargetHead(torch.randn(U, D, dtype=torch.float64), torch.randn(U, dtype=torch.float64), 1.0, None),
    "scale and soft-cap": TargetHead(torch.randn(U, D, dtype=torch.float64), None, 0.3, 2.0),
}


def lesson() -> Lesson:
    generator = torch.Generator().manual_seed(2)
    teacher = TargetHead(torch.randn(U, D, dtype=torch.float64, generator=generator), None, 1.0, None)
    return Lesson(torch.randn(P, D, dtype=torch.float64, generator=generator), teacher, POSITIONS)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(len(POSITIONS), D, dtype=torch.float64, generator=generator).requires_grad_(),
        torch.rand(len(POSITIONS), dtype=torch.float64, generator=generator),
    )


def whole(states_MD: Tensor, output: TargetHead, weight_M: Tensor) -> Tensor:
    taught = lesson()
    p_MU = taught.teacher.logits(taught.final_PD).softmax(-1)[POSITIONS]
    return (draft_loss_reference(output.logits(states_MD), p_MU, MIX) * weight_M).sum()


@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (2 * U, U), (3 * U + 1, 2 * U), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_any_chunking_equals_whole_logits_in_value_and_gradients(
    head: TargetHead, chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(draft_gradients, "BLOCK_ELEMENTS", block)
    states_MD, weight_M = inputs()
    weight_UD = head.weight_VD.clone().requires_grad_()
    output = TargetHead(weight_UD, head.bias_V, head.scale, head.softcap)
    ours = draft_loss(states_MD, output, lesson(), weight_M, MIX)
    truth = whole(states_MD, output, weight_M)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(3.0 * truth, (states_MD, weight_UD))
    found = torch.autograd.grad(3.0 * ours, (states_MD, weight_UD))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that operations have allocated and nothing has freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            storage = value.untyped_storage() if isinstance(value, Tensor) else None
            if storage is not None and storage._cdata not in given | self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@pytest.mark.parametrize("trained", [True, False])
def test_memory_is_one_chunk_of_logits_and_the_gradients(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a chunk outlives it, and no distribution is kept for all of its positions at once."""
    wide, pairs, draft_ids, chunk = 80, 720, 4096, 240
    monkeypatch.setattr(op, "CHUNK_ROWS", chunk)
    monkeypatch.setattr(draft_gradients, "BLOCK_ELEMENTS", 3 * draft_ids)
    states_MD = torch.randn(pairs, wide, requires_grad=True)
    weight_UD = torch.randn(draft_ids, wide, requires_grad=trained)
    teacher = TargetHead(torch.randn(draft_ids, wide), None, 1.0, None)
    taught = Lesson(torch.randn(pairs // 3, wide), teacher, torch.arange(pairs) // 3)
    with LiveBytes() as counted:
        loss = draft_loss(states_MD, TargetHead(weight_UD, None, 1.0, None), taught, torch.ones(pairs), MIX)
    logits, teachers, gradients = chunk * draft_ids, chunk // 3 * draft_ids, (pairs + trained * draft_ids) * wide
    assert logits + gradients < counted.peak / 4 < 1.1 * (logits + teachers + gradients)
    assert gradients <= counted.live / 4 < 1.1 * gradients  # what is left for backward
    loss.backward()


def test_a_frozen_output_head_gets_no_gradient() -> None:
    states_MD, weight_M = inputs()
    draft_loss(states_MD, HEADS["plain"], lesson(), weight_M, MIX).backward()
    assert states_MD.grad is not None
    assert HEADS["plain"].weight_VD.grad is None


def test_no_pairs_are_a_loss_of_zero_with_gradients_of_zero() -> None:
    states_MD = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    weight_UD = HEADS["plain"].weight_VD.clone().requires_grad_()
    nothing = Lesson(torch.zeros(0, D, dtype=torch.float64), HEADS["plain"], torch.zeros(0, dtype=torch.int64))
    loss = draft_loss(states_MD, TargetHead(weight_UD, None, 1.0, None), nothing, torch.zeros(0), MIX)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert states_MD.grad is not None
    assert weight_UD.grad is not None
    assert not bool(weight_UD.grad.any())


def test_chunks_hold_whole_positions_and_cover_everything_once() -> None:
    taught = lesson()
    assert taught.chunks(1) == [
        (slice(0, 1), slice(0, 3)), (slice(1, 2), slice(3, 4)), (slice(2, 4), slice(4, 6)), (slice(4, 5), slice(6, 7)),
    ]  # fmt: skip
    assert taught.chunks(4) == [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7))]
    assert taught.chunks(6) == taught.chunks(4)  # two alike, not six and one
    assert taught.chunks(100) == [(slice(0, 5), slice(0, 7))]


def test_autocast_makes_products_in_bf16_and_everything_else_in_fp32() -> None:
    states_MD, weight_M = (x.detach().float() for x in inputs())
    states_MD.requires_grad_()
    head = HEADS["plain"].to(dtype=torch.float32, device="cpu")
    taught = lesson()
    taught = Lesson(taught.final_PD.float(), taught.teacher.to(dtype=torch.float32, device="cpu"), POSITIONS)
    exact = draft_loss(states_MD, head, taught, weight_M, MIX)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = draft_loss(states_MD, head, taught, weight_M, MIX)
    assert rounded.dtype == torch.float32
    assert 1e-6 < abs(float((rounded - exact).detach())) / float(exact.detach()) < 1e-2
    exact_grad, rounded_grad = (torch.autograd.grad(loss, states_MD)[0] for loss in (exact, rounded))
    assert float((exact_grad - rounded_grad).norm() / exact_grad.norm()) < 2e-2


def test_the_outlook_is_overlap_and_rank_of_the_texts_token() -> None:
    states_MD, _ = inputs()
    draft_ids = torch.tensor([3, 0, -1, 16, 5, 5, 2])
    overlap_M, rank_M = draft_outlook(states_MD, HEADS["bias"], lesson(), draft_ids)
    taught = lesson()
    p_MU = taught.teacher.logits(taught.final_PD).softmax(-1)[POSITIONS]
    logits_MU = HEADS["bias"].logits(states_MD.detach())
    torch.testing.assert_close(overlap_M, torch.minimum(p_MU, logits_MU.softmax(-1)).sum(-1))
    by_preference = logits_MU.argsort(-1, descending=True).tolist()
    assert rank_M.tolist() == [
        U if i < 0 else order.index(i) for i, order in zip(draft_ids.tolist(), by_preference, strict=True)
    ]
