"""The target's probability of drafted tokens, from stored final states and the draft vocabulary's rows alone."""

import pytest
import torch

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.target import Target
from eyas.tests.models.families import family_model
from eyas.tests.toys import tiny_target
from eyas.tests.train.rows import feature_row
from eyas.train import target_odds
from eyas.train.target_odds import measure_odds

VOCABULARY = DraftVocabulary(torch.arange(1, 97, 3), 97)
TEXTS = {"long": ([5, 8, 1, 40, 22, 13, 60, 7, 9], [(3, 8)]), "turns": ([9, 4, 61, 33, 2, 70], [(1, 2), (4, 5)])}


@pytest.mark.parametrize("family", ["llama tied", "gemma2", "granite", "cohere", "phi"])
@pytest.mark.parametrize("chunk", [97, 500, 1 << 24])
def test_odds_are_the_softmax_over_the_whole_vocabulary(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_odds, "CHUNK_ELEMENTS", chunk)
    target = Target(family_model(family), aux_layers=())
    if family == "phi":  # its head has a bias
        assert target.head.bias_V is not None
    rows = [feature_row(target, name, ids, spans) for name, (ids, spans) in TEXTS.items()]
    teacher = target.head.rows(VOCABULARY.token_ids_U)
    odds = measure_odds(target.head, teacher, VOCABULARY.draft_ids_V, rows).of(rows[::-1])
    taught = [(1, position) for position in range(3, 8)] + [(0, 1), (0, 4)]
    pairs = torch.tensor([(row, position, int(token)) for row, position in taught for token in VOCABULARY.token_ids_U])
    found = odds(*pairs.T)
    states = [rows[::-1][row].final_hidden_TD[position] for row, position, _ in pairs.tolist()]
    expected = target.head.logits(torch.stack(states)).float().softmax(-1).gather(1, pairs[:, 2:])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert 0.05 < float(found.sum()) / len(taught) < 0.95  # part of the mass lies outside the draft vocabulary
    assert odds(*pairs[:0].T).shape == (0,)


def test_what_was_never_stored_cannot_be_asked_for() -> None:
    target = tiny_target(aux_layers=())
    rows = [feature_row(target, "row", *TEXTS["long"])]
    odds = measure_odds(target.head, target.head.rows(VOCABULARY.token_ids_U), VOCABULARY.draft_ids_V, rows).of(rows)
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="a token outside the draft vocabulary"):
        odds(0 * one, 4 * one, 2 * one)
    with pytest.raises(AssertionError, match="a position without a final state"):
        odds(0 * one, 2 * one, one)
