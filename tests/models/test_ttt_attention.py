"""TTT attention against one dense softmax over all T*S keys under a mask written down from the contract's sentence."""

import pytest
import torch
from torch import Tensor

from eyas.kernels import ttt_attention_blocks
from eyas.kernels.ttt_attention import first_visible
from eyas.models.ttt_attention import TTT_ATTENTIONS, TTTContext

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


def unrolled(steps: list[list[Tensor]], documents: list[list[int]], attention: str) -> Tensor:
    context = TTTContext(torch.tensor(documents), attention=attention)
    return torch.cat([context.attend(*step) for step in steps], dim=2)


@pytest.fixture(params=[1, 4, 256], ids="blocks of {}".format)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ttt_attention_blocks, "QUERY_BLOCK", request.param)
    return request.param


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.parametrize("documents", [ONE, PACKED], ids=["one document", "packed"])
@pytest.mark.usefixtures("block")
def test_unrolled_steps_equal_dense_attention_and_its_gradients(documents: list[list[int]], attention: str) -> None:
    steps = inputs()
    leaves = [leaf for step in steps for leaf in step]
    weight = torch.randn(B, HEADS, S * T, DIM, dtype=torch.float64)
    ours, truth = unrolled(steps, documents, attention), dense(steps, documents)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)
    ours_grads = torch.autograd.grad((ours * weight).sum(), leaves)
    true_grads = torch.autograd.grad((truth * weight).sum(), leaves)
    torch.testing.assert_close(ours_grads, true_grads, rtol=1e-9, atol=1e-11)
    assert all(bool(grad.abs().max() > 0) for grad in true_grads[2::3])


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.usefixtures("block")
def test_a_packed_document_equals_the_document_alone(attention: str) -> None:
    steps = inputs()
    packed = unrolled(steps, PACKED, attention).view(B, HEADS, S, T, DIM)
    for b, (start, stop) in ((0, (0, 4)), (0, (4, 6)), (0, (6, 9)), (1, (0, 5)), (1, (5, 7))):
        alone = TTTContext(torch.zeros(1, stop - start, dtype=torch.int64), attention=attention)
        for s, step in enumerate(steps):
            out = alone.attend(*(x[b : b + 1, :, start:stop] for x in step))
            torch.testing.assert_close(packed[b, :, s, start:stop], out[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.parametrize("wanted", [[0, 2, 3, 7, 8, 9, 13, 14], [4], [16, 17], list(range(18)), []], ids=str)
@pytest.mark.usefixtures("block")
def test_wanted_slots_alone_have_the_outputs_and_gradients_they_have_among_all(
    wanted: list[int], attention: str
) -> None:
    steps, wanted_N = inputs(), torch.tensor(wanted, dtype=torch.int64)
    leaves = [leaf for step in steps for leaf in step]
    context = TTTContext(torch.tensor(PACKED), attention=attention, wanted_N=wanted_N)
    some = [context.attend(*steps[0])]
    assert torch.equal(context.kept(steps[0][0][:, 0])[0], steps[0][0][:, 0].flatten(0, 1)[wanted_N])
    for step in steps[1:]:
        some.append(context.attend(*(x.transpose(0, 1).flatten(1, 2)[None, :, wanted_N] for x in step)))
    ours = torch.stack(some)[:, 0]
    truth = dense(steps, PACKED).view(B, HEADS, S, T, DIM).permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, wanted_N]
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)
    weight = torch.randn(ours.shape, dtype=torch.float64)
    ours_grads = torch.autograd.grad((ours * weight).sum(), leaves)
    true_grads = torch.autograd.grad((truth * weight).sum(), leaves)
    torch.testing.assert_close(ours_grads, true_grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
def test_other_documents_and_other_slots_do_not_reach_a_query(attention: str) -> None:
    steps = inputs()
    target = unrolled(steps, PACKED, attention).view(B, HEADS, S, T, DIM)[0, :, 3, 5].sum()
    for s, step in enumerate(steps):
        for x in step[1:]:
            (grad,) = torch.autograd.grad(target, x, retain_graph=True)
            reached = {(b, t) for b, _, t, _ in grad.nonzero().tolist()}
            assert reached == ({(0, 4), (0, 5)} if s == 0 else {(0, 5)})


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
def test_padding_slots_are_finite_and_see_themselves(attention: str) -> None:
    steps = inputs()
    out = unrolled(steps, PACKED, attention).view(B, HEADS, S, T, DIM)
    assert bool(out.isfinite().all())
    expected = steps[0][2][1, :, 7].repeat_interleave(HEADS // KV, 0)
    torch.testing.assert_close(out[1, :, 0, 7], expected)


def test_the_first_visible_slot_is_the_documents_first() -> None:
    assert first_visible(torch.tensor(PACKED)).tolist() == [[0, 0, 0, 0, 4, 4, 6, 6, 6], [0, 0, 0, 0, 0, 5, 5, 7, 8]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_is_as_near_to_the_truth_as_dense_attention(dtype: torch.dtype) -> None:
    steps = inputs()
    truth = dense(steps, PACKED).detach()
    cast = [[x.detach().to(dtype) for x in step] for step in steps]
    errors = {name: float((unrolled(cast, PACKED, name).double() - truth).abs().mean()) for name in TTT_ATTENTIONS}
    assert errors["blocks"] <= 1.1 * errors["dense"] + 1e-7


def test_scores_larger_than_exp_can_hold_are_no_trouble() -> None:
    steps = [[x.detach() * 40 for x in step] for step in inputs()]
    out = unrolled(steps, PACKED, "blocks")
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, dense(steps, PACKED), rtol=1e-9, atol=1e-9)


def test_blocks_keep_nothing_the_size_of_the_scores() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    length, steps = 64, 4
    context = TTTContext(torch.zeros(1, length, dtype=torch.int64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(steps):
            q, k, v = (torch.randn(1, heads, length, 2, requires_grad=True) for heads in (HEADS, KV, KV))
            context.attend(q, k, v)
    assert kept
    assert max(kept) == HEADS * length * 2  # q and the output; scores would be HEADS * length * length
