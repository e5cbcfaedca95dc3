"""Learning-rate schedules: warm-up, cosine and warm-up-stable-decay, against values by hand."""

import pytest

from eyas.train.schedule import SCHEDULES, learning_rate_factor


def test_the_learning_rate_warms_up_linearly_and_falls_to_its_floor_as_a_cosine() -> None:
    factors = [learning_rate_factor(step, steps=12, warmup=4, floor=0.2) for step in range(13)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[8] == pytest.approx(0.6)  # half way down
    assert factors[12] == pytest.approx(0.2)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert learning_rate_factor(0, steps=5, warmup=0, floor=0.1) == 1.0
    assert learning_rate_factor(3, steps=3, warmup=9, floor=0.1) == pytest.approx(4 / 9)  # a run inside its warm-up


def test_wsd_is_flat_until_the_decay_and_then_falls_in_a_straight_line() -> None:
    factors = [
        learning_rate_factor(step, steps=24, warmup=4, floor=0.1, schedule="wsd", decay_share=0.25)
        for step in range(25)
    ]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[4:20] == pytest.approx(
        [1.0] * 16
    )  # 15 of the 20 steps behind the warm-up, and the first of the rest
    assert factors[20:] == pytest.approx([0.1 + 0.9 * share for share in (0.8, 0.6, 0.4, 0.2, 0.0)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_ends_at_its_floor_and_never_rises(name: str) -> None:
    factors = [learning_rate_factor(step, steps=50, warmup=5, floor=0.3, schedule=name) for step in range(5, 51)]
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.3)
    assert factors == sorted(factors, reverse=True)
