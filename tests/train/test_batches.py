"""Which batches a step takes: whole windows, the short last one, and any number of ranks."""

import pytest
import torch

from eyas.data.feature_row import FeatureRow
from eyas.models.target import Target
from eyas.tests.toys import tiny_target
from eyas.tests.train.rows import random_row
from eyas.train.batches import Batches, steps_for, untrained, window_numbers


@pytest.fixture(scope="module")
def rows() -> list[FeatureRow]:
    target: Target = tiny_target()
    return [random_row(target, f"row-{i}", prompt=3, reply=4 + i, seed=i) for i in range(5)]


def batches(rows: list[FeatureRow]) -> Batches:
    return Batches(rows, line_length=64, lines_per_batch=1, packed=False, seed=0)


def test_five_batches_by_twos_are_three_steps_and_the_last_is_short() -> None:
    assert steps_for(5, ranks=1, accumulate=2) == 3
    windows = [window_numbers(cursor, rank=0, ranks=1, accumulate=2, last=5) for cursor in (0, 2, 4)]
    assert windows == [[0, 1], [2, 3], [4, None]]


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (7, 1)])
def test_all_ranks_together_take_every_batch_once(ranks: int, accumulate: int) -> None:
    steps = steps_for(11, ranks=ranks, accumulate=accumulate)
    taken = [
        number
        for step in range(steps)
        for rank in range(ranks)
        for number in window_numbers(step * ranks * accumulate, rank=rank, ranks=ranks, accumulate=accumulate, last=11)
    ]
    assert [number for number in taken if number is not None] == list(range(11))
    assert len(taken) == steps * ranks * accumulate  # every rank takes part in every step


def test_an_endless_run_has_only_whole_windows() -> None:
    assert window_numbers(1_000, rank=1, ranks=2, accumulate=2, last=None) == [1002, 1003]


def test_an_untrained_batch_keeps_its_tokens_and_loses_its_slots(rows: list[FeatureRow]) -> None:
    batch = batches(rows).get(0)
    empty = untrained(batch)
    assert bool(batch.supervised(0).any())
    assert not bool(empty.supervised(0).any())
    assert torch.equal(empty.input_ids_BT, batch.input_ids_BT)


def test_epochs_count_their_batches(rows: list[FeatureRow]) -> None:
    assert batches(rows).in_epochs(3) == 15
    assert sorted(row.id for n in range(5) for line in batches(rows).lines(n) for row in line) == [
        f"row-{i}" for i in range(5)
    ]
