"""Weights of slots by what the head drafts there: numbers by hand, and replay itself where acceptance is certain."""

import pytest
import torch

from eyas.inference.replay import replay_chain
from eyas.train.slot_weights import SlotWeighting, pace_weights, round_starts

ALL = torch.ones(1, 3, dtype=torch.bool)


def test_pace_by_hand() -> None:
    accept = torch.tensor([[0.5, 0.8, 0.25]], dtype=torch.float64)
    # Running products .5, .4, .1: what is expected from each step on is 1.0, .5, .1.
    assert pace_weights(accept, ALL, smoothing=0.0)[0].tolist() == pytest.approx([1.0, 0.5, 0.1])
    # Smoothed by a half: .75, .9, .625 -> .75, .675, .421875.
    assert pace_weights(accept, ALL, smoothing=0.5)[0].tolist() == pytest.approx([1.846875, 1.096875, 0.421875])
    assert pace_weights(accept, ALL, smoothing=1.0)[0].tolist() == [3.0, 2.0, 1.0]
    ends = torch.tensor([[True, True, False]])
    assert pace_weights(accept, ends, smoothing=0.0)[0].tolist() == pytest.approx([0.9, 0.4, 0.0])


def test_pace_is_the_derivative_of_the_expected_accepted_length() -> None:
    log_accept = torch.tensor([[0.5, 0.8, 0.25]], dtype=torch.float64).log().requires_grad_()
    (gradient,) = torch.autograd.grad(log_accept.exp().cumprod(-1).sum(), log_accept)
    torch.testing.assert_close(gradient, pace_weights(log_accept.detach().exp(), ALL, smoothing=0.0))


def test_a_step_counts_only_below_drafted_tokens() -> None:
    rank = torch.tensor([[0, 4, 0], [1, 2, 9], [5, 0, 0]])
    weights = SlotWeighting(top_k=3).weights(torch.ones(3, 3), rank, ALL.expand(3, 3), 3)
    assert weights.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]


def test_certain_acceptance_gives_the_starts_of_replayed_rounds() -> None:
    torch.manual_seed(4)
    T, S, first, last = 30, 3, 4, 26
    hits = torch.rand(T, S) < 0.6
    supervised = torch.zeros(T, dtype=torch.bool)
    supervised[first - 1 : last - 1] = True
    for step in range(S):
        hits[last - 1 - step :, step] = False
    visits = round_starts(hits.double(), supervised, T)
    assert set(visits.tolist()) == {0.0, 1.0}
    assert int(visits.sum()) == replay_chain(hits, first=first, last=last).rounds
    slot, starts = first - 1, []
    while slot < last - 1:
        starts.append(slot)
        slot += int(hits[slot].long().cumprod(0).sum()) + 1
    assert visits.nonzero().squeeze(-1).tolist() == starts


def test_uncertain_acceptance_by_hand() -> None:
    # One reply of four slots, one step: from slot 0 a round goes on at 1 (missed) or 2 (hit).
    accept = torch.tensor([[0.5], [0.25], [0.5], [0.0]], dtype=torch.float64)
    visits = round_starts(accept, torch.ones(4, dtype=torch.bool), 4)
    assert visits.tolist() == pytest.approx([1.0, 0.5, 0.5 + 0.5 * 0.75, 0.5 * 0.25 + 0.875 * 0.5])


def test_replies_and_lines_begin_with_a_round_of_their_own() -> None:
    supervised = torch.tensor([True, True, False, True, True, True])  # lines of three: the second starts at slot 3
    visits = round_starts(torch.zeros(6, 2), supervised, 3)
    assert visits.tolist() == [1, 1, 0, 1, 1, 1]
    sure = round_starts(torch.ones(6, 2), supervised, 3)
    assert sure.tolist() == [1, 0, 0, 1, 0, 0]


def test_weights_multiply_and_the_floor_holds() -> None:
    accept, rank = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.zeros(2, 2, dtype=torch.int64)
    supervised = torch.tensor([[True, True], [True, False]])
    weights = SlotWeighting(pace=0.0, start_floor=0.2).weights(accept, rank, supervised, 2)
    assert weights.tolist() == [[2.0, 1.0], [pytest.approx(0.2), 0.0]]
    assert not SlotWeighting().active
    assert SlotWeighting(pace=0.0).active
