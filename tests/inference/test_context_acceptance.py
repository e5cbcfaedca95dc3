"""Acceptance by context: every round is counted where the text stood before it."""

import pytest

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.context_acceptance import acceptance_by_context, context_class
from eyas.inference.evaluation import Measurement


@pytest.mark.parametrize(
    ("context", "shortest"), [(1, 0), (63, 0), (64, 64), (127, 64), (128, 128), (255, 128), (5000, 4096)]
)
def test_classes_are_doublings(context: int, shortest: int) -> None:
    assert context_class(context) == shortest


def measured(method: str, temperature: float, prompt_tokens: int, rounds: list[list[int]]) -> Measurement:
    stats = AcceptanceStats(3)
    for accepted, drafted, _ in rounds:
        stats.record(accepted, drafted=drafted)
    return Measurement(
        prompt_id="a", prompt_set="code", method=method, temperature=temperature, token_ids=[], accepted=[],
        prompt_tokens=prompt_tokens, rounds=rounds, finish_reason="length", stats=stats.as_dict(), seconds=1.0,
        prefill_seconds=0.1, identical_to_plain=True, gap=None,
    )  # fmt: skip


def test_rounds_move_from_class_to_class_as_the_text_grows() -> None:
    # Behind a prompt of 59 and the first token: contexts 60, 63, 64, 66.
    found = acceptance_by_context(
        [
            measured("plain", 0.0, 59, [[0, 0, 1]] * 9),
            measured("tree", 0.0, 59, [[2, 4, 3], [0, 4, 1], [1, 4, 2], [3, 4, 4]]),
            measured("tree", 0.0, 126, [[1, 4, 2], [3, 4, 4]]),  # 127, 129
            measured("tree", 1.0, 10, [[0, 4, 1]]),
            measured("chain", 0.0, 300, [[3, 3, 4]]),
        ]
    )
    assert [tuple(entry.values()) for entry in found] == [
        ("chain", 0.0, 256, 512, 4.0, 1),
        ("tree", 0.0, 0, 64, 2.0, 2),
        ("tree", 0.0, 64, 128, pytest.approx(1 + 5 / 3), 3),
        ("tree", 0.0, 128, 256, 4.0, 1),
        ("tree", 1.0, 0, 64, 1.0, 1),
    ]
