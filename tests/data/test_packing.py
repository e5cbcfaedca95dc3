"""Epoch plans: every row once, lines within their length, the same plan for the same seed and epoch."""

from collections import Counter

import pytest
import torch

from eyas.data.packing import plan_epoch
from eyas.models.errors import UserError

LENGTHS = torch.randint(1, 60, (211,), generator=torch.Generator().manual_seed(4)).tolist()


def plan(*, packed: bool = True, seed: int = 0, epoch: int = 0, lines_per_batch: int = 3) -> list[list[list[int]]]:
    return plan_epoch(
        LENGTHS, line_length=64, lines_per_batch=lines_per_batch, packed=packed, seed=seed, epoch=epoch
    )  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_row_appears_exactly_once_per_epoch(packed: bool, epoch: int) -> None:
    rows = [row for batch in plan(packed=packed, epoch=epoch) for line in batch for row in line]
    assert Counter(rows) == dict.fromkeys(range(len(LENGTHS)), 1)


def test_packed_lines_stay_within_their_length_and_waste_little() -> None:
    lines = [line for batch in plan() for line in batch]
    used = [sum(LENGTHS[row] for row in line) for line in lines]
    assert max(used) <= 64
    assert sum(used) / (64 * len(lines)) > 0.85


def test_padded_lines_hold_one_row_each() -> None:
    assert {len(line) for batch in plan(packed=False) for line in batch} == {1}


@pytest.mark.parametrize("lines_per_batch", [1, 3, 1000])
def test_all_batches_but_the_last_are_full(lines_per_batch: int) -> None:
    batches = plan(packed=False, lines_per_batch=lines_per_batch)
    assert {len(batch) for batch in batches[:-1]} <= {lines_per_batch}
    assert 1 <= len(batches[-1]) <= lines_per_batch


@pytest.mark.parametrize("packed", [True, False])
def test_same_seed_and_epoch_give_the_same_plan_whatever_was_drawn_before(packed: bool) -> None:
    first = plan(packed=packed, seed=3, epoch=2)
    torch.rand(17)
    assert plan(packed=packed, seed=3, epoch=2) == first


@pytest.mark.parametrize("packed", [True, False])
def test_epochs_and_seeds_give_different_plans(packed: bool) -> None:
    plans = [plan(packed=packed, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({str(p) for p in plans}) == len(plans)


def test_rows_of_a_full_line_are_packed_alone_and_halves_in_pairs() -> None:
    batches = plan_epoch([10, 5, 10, 5], line_length=10, lines_per_batch=9, packed=True, seed=0, epoch=0)
    assert sorted(sorted(line) for line in batches[0]) == [[0], [1, 3], [2]]


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_longer_than_a_line_is_refused_by_number(packed: bool) -> None:
    with pytest.raises(UserError, match=r"row 1 has 11 tokens, more than train.line_length = 10"):
        plan_epoch([10, 11, 3], line_length=10, lines_per_batch=1, packed=packed, seed=0, epoch=0)


def test_more_open_lines_than_may_be_kept_lose_no_row() -> None:
    lengths = [6] * 150 + [5] * 150
    batches = plan_epoch(lengths, line_length=10, lines_per_batch=1, packed=True, seed=1, epoch=0)
    rows = [row for batch in batches for line in batch for row in line]
    assert sorted(rows) == list(range(300))
