"""TTT attention against one dense softmax over all T*S keys under a mask written down from the contract's sentence."""

import pytest
import torch
from torch import Tensor

from eyas.models.ttt_attention import TTTContext

B, HEADS, KV, T, DIM, S = 2, 4, 2, 9, 8, 4
ONE = [[0] * 9, [0] * 9]
PACKED = [[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1, -1, -1]]


def inputs() -> list[list[Tensor]]:
    """Return leaf tensors q, k, v of every step, in fp64."""
    shapes = ((B, HEADS, T, DIM), (B, KV, T, DIM), (B, KV, T, DIM))
    return [[torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes] for _ in range(S)]


def dense_mask(documents: list[list[int]]) -> Tensor:
    """Return [B, S*T queries, S*T keys]: query (t, s) sees (j, 0) for j <= t in its document, and (t, 1) .. (t, s)."""
    mask = torch.zeros(B, S * T, S * T, dtype=torch.bool)
    for b, document in enumerate(documents):
        for s in range(S):
            for t in range(T):
                for j in range(t + 1):
                    if (document[j] == document[t] and document[t] >= 0) or j == t:
                        mask[b, s * T + t, j] = True
                for later in range(1, s + 1):
                    mask[b, s * T + t, later * T + t] = True
    return mask


def dense(steps: list[list[Tensor]], documents: list[list[int]]) -> Tensor:
    q, k, v = (torch.cat([step[i] for step in steps], dim=2) for i in range(3))
    k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
    scores = (q @ k.transpose(-1, -2)) / DIM**0.5
    weights = scores.masked_fill(~dense_mask(documents)[:, None], float("-inf")).softmax(-1)
    return weights @ v


def unrolled(steps: list[list[Tensor]], documents: list[list[int]]) -> Tensor:
    context = TTTContext(torch.tensor(documents))
    return torch.cat([context.attend(*step) for step in steps], dim=2)


@pytest.mark.parametrize("documents", [ONE, PACKED], ids=["one document", "packed"])
def test_unrolled_steps_equal_dense_attention_and_its_gradients(documents: list[list[int]]) -> None:
    steps = inputs()
    leaves = [leaf for step in steps for leaf in step]
    weight = torch.randn(B, HEADS, S * T, DIM, dtype=torch.float64)
    ours, truth = unrolled(steps, documents), dense(steps, documents)
    # Scores pass through fp32 on their way to the softmax, so fp64 inputs agree to single precision.
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)
    ours_grads = torch.autograd.grad((ours * weight).sum(), leaves)
    true_grads = torch.autograd.grad((truth * weight).sum(), leaves)
    torch.testing.assert_close(ours_grads, true_grads, rtol=1e-4, atol=1e-5)
    assert all(bool(grad.abs().max() > 0) for grad in true_grads[2::3])


def test_a_packed_document_equals_the_document_alone() -> None:
    steps = inputs()
    packed = unrolled(steps, PACKED).view(B, HEADS, S, T, DIM)
    for b, (start, stop) in ((0, (0, 4)), (0, (4, 6)), (0, (6, 9)), (1, (0, 5)), (1, (5, 7))):
        alone = TTTContext(torch.zeros(1, stop - start, dtype=torch.int64))
        for s, step in enumerate(steps):
            out = alone.attend(*(x[b : b + 1, :, start:stop] for x in step))
            torch.testing.assert_close(packed[b, :, s, start:stop], out[0], rtol=1e-5, atol=1e-5)


def test_other_documents_and_other_slots_do_not_reach_a_query() -> None:
    steps = inputs()
    target = unrolled(steps, PACKED).view(B, HEADS, S, T, DIM)[0, :, 3, 5].sum()
    for s, step in enumerate(steps):
        for x in step[1:]:
            (grad,) = torch.autograd.grad(target, x, retain_graph=True)
            reached = {(b, t) for b, _, t, _ in grad.nonzero().tolist()}
            assert reached == ({(0, 4), (0, 5)} if s == 0 else {(0, 5)})


def test_padding_slots_are_finite_and_see_themselves() -> None:
    steps = inputs()
    out = unrolled(steps, PACKED).view(B, HEADS, S, T, DIM)
    assert bool(out.isfinite().all())
    expected = steps[0][2][1, :, 7].repeat_interleave(HEADS // KV, 0)
    torch.testing.assert_close(out[1, :, 0, 7], expected)
