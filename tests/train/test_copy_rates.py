"""The count of right copies, on a row where every case can be counted by hand."""

import pytest
import torch

from eyas.data.corpus import CorpusRow
from eyas.tests.inference.heads import fixed_head
from eyas.tests.toys import tiny_target
from eyas.train.copy_rates import measure_copies

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))


def row(ids: list[int], *spans: tuple[int, int]) -> CorpusRow:
    return CorpusRow("a", "self", "code", "heldout", 0.0, tuple(ids), spans, "stop", "", ("",) * len(spans))


def test_every_generated_token_but_the_first_of_its_span_is_judged() -> None:
    """The head says 8 with .6 wherever it is asked."""
    logits = torch.full((97,), 0.4 / 96).log()
    logits[8] = torch.tensor(0.6).log()
    head = fixed_head(TARGET, logits)
    #                     0  1  2  3 | 4  5  6  7  8  9
    found = measure_copies(TARGET, head, [row([1, 7, 8, 2, 7, 8, 8, 2, 7, 9], (4, 10))], progress=lambda *_: None)
    assert found.tokens == 5
    # 5: behind 7 stood 8: right, as the head says, then 2 stood: 8 came. 6: behind 7 8 stood 2, the head says 8: wrong.
    # 7: behind 8 stood the 8 at 6: wrong, as the head says; 8: behind 8 2 stood 7: right, then 8 stood: 9 came.
    # 9: behind 8 2 7 stood 8: wrong, as the head says.
    by = {name: [(one.cases, one.right) for one in getattr(found, name)][:3] for name in ("alone", "agreed", "opposed")}
    assert by == {
        "alone": [(2, 1), (2, 1), (1, 0)],
        "agreed": [(2, 1), (0, 0), (1, 0)],
        "opposed": [(0, 0), (2, 1), (0, 0)],
    }
    assert [(one.cases, one.right) for one in found.following][:3] == [(1, 0), (1, 0), (0, 0)]
    assert found.agreed[0].rate == 0.5
    assert found.agreed[0].doubt_taken == pytest.approx(1 - 0.5 / 0.4, abs=1e-3)
    assert found.agreed[3].rate is None


def test_spans_of_several_turns_are_judged_apart() -> None:
    head = fixed_head(TARGET, torch.zeros(97))
    found = measure_copies(
        TARGET, head, [row([1, 2, 3, 4, 5, 6, 7], (1, 3), (5, 7)), row([1, 2], (1, 2))], progress=lambda *_: None
    )
    assert found.tokens == 2
    assert sum(one.cases for one in found.alone) == 0
