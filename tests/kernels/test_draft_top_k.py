"""The draft head's top-k: ties, NaN, and the kernel against the reference at odd sizes."""

from collections.abc import Callable

import pytest
import torch

from eyas.kernels.draft_top_k import DraftTopK, _launch_draft_top_k, draft_top_k, draft_top_k_reference

PICKERS = {"reference": draft_top_k_reference, "kernel": _launch_draft_top_k}


@pytest.mark.parametrize("pick", PICKERS.values(), ids=PICKERS)
@pytest.mark.usefixtures("poisoned_empty")
def test_equal_logits_come_in_the_order_of_their_ids(pick: Callable[..., DraftTopK], device: torch.device) -> None:
    logits = torch.zeros(1, 3, 300)
    logits[0, 0, [7, 150, 290]] = torch.tensor([2.0, 3.0, 2.0])
    logits[0, 1, 5] = -0.0
    logits[0, 2] = -torch.inf
    logits[0, 2, 299] = 1.0
    best = pick(logits.to(device), 5)
    assert best.ids_BNK.tolist() == [[[150, 7, 290, 0, 1], [0, 1, 2, 3, 4], [299, 0, 1, 2, 3]]]
    assert best.log_probs_BNK[0, 2].tolist() == [0.0, *[-torch.inf] * 4]
    torch.testing.assert_close(best.log_probs_BNK[0, 1].cpu(), torch.full((5,), 1 / 300).log())


@pytest.mark.parametrize("pick", PICKERS.values(), ids=PICKERS)
def test_nan_logits_come_last_and_leave_no_score(pick: Callable[..., DraftTopK], device: torch.device) -> None:
    logits = torch.tensor([[[1.0, torch.nan, 3.0, 2.0], [torch.nan] * 4]], device=device)
    best = pick(logits, 4)
    assert best.ids_BNK.tolist() == [[[2, 3, 0, 1], [0, 1, 2, 3]]]
    assert best.log_probs_BNK.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "vocabulary", "k"), [(1, 1, 1), (5, 8, 8), (7, 60, 5), (1, 130, 60), (3, 8192, 7)])
@pytest.mark.usefixtures("poisoned_empty")
def test_kernel_equals_reference(nodes: int, vocabulary: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(1 if nodes == 1 else 2, nodes, vocabulary) * 4).to(dtype)
    expected = draft_top_k_reference(logits, k)
    best = _launch_draft_top_k(logits.to(device), k)
    assert torch.equal(best.ids_BNK.cpu(), expected.ids_BNK)
    torch.testing.assert_close(best.log_probs_BNK.cpu(), expected.log_probs_BNK, atol=1e-5, rtol=1e-5)
    topk = logits.float().log_softmax(-1).topk(k)
    torch.testing.assert_close(expected.log_probs_BNK, topk.values, atol=1e-5, rtol=1e-5)


def test_the_op_says_what_is_wrong() -> None:
    logits = torch.randn(1, 2, 5)
    assert torch.equal(draft_top_k(logits, 3).ids_BNK, draft_top_k_reference(logits, 3).ids_BNK)
    with pytest.raises(ValueError, match="k is 6: give 1 to 5 for 5 draft tokens"):
        draft_top_k(logits, 6)
    with pytest.raises(ValueError, match="k is 65: give 1 to 64"):
        draft_top_k(torch.randn(1, 1, 100), 65)
    with pytest.raises(ValueError, match=r"logits_BNU is torch\.float64"):
        draft_top_k(logits.double(), 1)


@pytest.mark.gpu
def test_the_op_runs_the_kernel_on_a_gpu() -> None:
    logits = torch.randn(8, 10, 32000).bfloat16()
    best, expected = draft_top_k(logits.cuda(), 10), draft_top_k_reference(logits, 10)
    assert torch.equal(best.ids_BNK.cpu(), expected.ids_BNK)
    torch.testing.assert_close(best.log_probs_BNK.cpu(), expected.log_probs_BNK, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("poisoned_empty")
def test_32000_draft_tokens_in_fp16(device: torch.device) -> None:
    logits = torch.randn(1, 1, 32000).half()
    assert torch.equal(
        _launch_draft_top_k(logits.to(device), 10).ids_BNK.cpu(), draft_top_k_reference(logits, 10).ids_BNK
    )
