"""The benchmark compares like with like: the same tokens from both, in turns, with the ratio of every turn."""

import pytest
import torch

from eyas.data.generate_bench import SpeedComparison, compare_speed
from eyas.data.styles import GREEDY, AnswerStyle
from eyas.tests.toys import tiny_target

PROMPTS = [(5, 6, 7), (9,), (11, 12, 13, 14, 15, 16, 17), (20, 21), (3, 4, 5, 6)]


@pytest.mark.parametrize(("style", "same"), [(GREEDY, 5), (AnswerStyle(0.8, top_p=0.95), None)])
def test_both_write_as_many_tokens_and_greedily_the_same(style: AnswerStyle, same: int | None) -> None:
    turns: list[int] = []
    result = compare_speed(
        tiny_target(aux_layers=()), tiny_target(aux_layers=()), PROMPTS, style, new_tokens=9, turns=2,
        progress=turns.append,
    )  # fmt: skip
    assert (result.rows, len(result.eyas), len(result.transformers)) == (5, 2, 2)
    assert turns == [1, 2, 3]
    assert min(*result.eyas, *result.transformers) > 0
    if same is not None:
        assert result.same == same
    else:
        assert result.same < 5


def test_other_weights_do_not_write_the_same() -> None:
    ours, theirs = tiny_target(aux_layers=(), seed=1), tiny_target(aux_layers=(), seed=2)
    result = compare_speed(ours, theirs, PROMPTS, GREEDY, new_tokens=9, turns=1, progress=lambda _: None)
    assert result.same == 0


def test_the_ratio_is_the_median_of_the_turns() -> None:
    assert SpeedComparison(0.0, 1.0, (10.0, 30.0, 8.0), (10.0, 10.0, 4.0), 1, 1).ratio == 2.0


def test_sampling_of_transformers_is_not_cut_to_its_own_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tiny_target(aux_layers=()), []
    generate = target.model.generate

    def spy(*args: object, **fields: object) -> torch.Tensor:
        seen.append(target.model.generation_config)
        return generate(*args, **fields)  # type: ignore[no-any-return]

    monkeypatch.setattr(target.model, "generate", spy)
    style = AnswerStyle(0.8, top_p=0.95)
    compare_speed(tiny_target(aux_layers=()), target, PROMPTS, style, new_tokens=3, turns=1, progress=lambda _: None)
    assert [(one.top_k, one.top_p, one.temperature, one.do_sample) for one in seen] == [(0, 0.95, 0.8, True)] * 2
