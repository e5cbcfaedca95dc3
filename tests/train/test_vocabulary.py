"""The draft vocabulary of a run: what is counted, what is forced in, and the coverage table by prompt set and size."""

import json
from pathlib import Path

import pytest
import torch

from eyas.tests.toys import save_tiny_model
from eyas.tests.train.rows import corpus_row
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.context import RunContext
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder
from eyas.train.vocabulary import choose_vocabulary, coverage_table, token_counts

ROWS = [
    corpus_row("a", "train", [60], [61, 62, 62, 63, 63, 63, 64]),
    corpus_row("b", "validation", [60, 60], [63, 64, 64, 61], category="words"),
    corpus_row("c", "heldout", [60], [62, 63, 70, 70], category="letters"),
]


def run_in(tmp_path: Path) -> RunContext:
    fields = tiny_recipe(save_tiny_model(tmp_path / "model"), tmp_path, head={"draft_vocab_size": 4})
    return RunContext(parse_recipe(fields, where="here"), RunFolder(tmp_path / "run"), Reporter())


def test_only_generated_tokens_are_counted() -> None:
    counts_V = token_counts([ROWS[0], ROWS[2]], 97)
    assert {token: int(counts_V[token]) for token in counts_V.nonzero().squeeze(-1).tolist()} == {
        61: 1, 62: 3, 63: 4, 64: 1, 70: 2,
    }  # fmt: skip
    assert token_counts([], 97).tolist() == [0] * 97


def test_the_draft_vocabulary_holds_what_training_rows_say_and_the_end_of_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path)
    vocabulary, coverage = choose_vocabulary(run, ROWS, 258)
    assert len(vocabulary) == 4
    assert {62, 63, 257} <= set(vocabulary.token_ids_U.tolist())  # 257 ends a turn and is special
    assert coverage["train"] == pytest.approx(vocabulary.coverage(token_counts(ROWS[:1], 258)))
    assert "draft vocabulary: 4 of 258 tokens, covering" in capsys.readouterr().err
    table = json.loads((run.folder.of("train") / "coverage.json").read_text())
    assert table["chosen"] == 4
    assert table["sizes"] == [4, 258]
    assert set(table["sets"]) == {"all", "words", "letters"}
    assert (run.folder.of("train") / "coverage.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run.folder.of("train").glob(".*"))


def test_coverage_by_set_and_size_by_hand() -> None:
    table = coverage_table(ROWS, token_counts(ROWS[:1], 97), forced={2, 96}, chosen=5)
    # Size 5 holds the two forced tokens, then 63 (3), 62 (2) and 61 (1, before 64 by its lower id).
    assert table["sizes"] == [5, 97]
    assert table["sets"]["words"] == {"tokens": 4, "coverage": [2 / 4, 1.0]}
    assert table["sets"]["letters"] == {"tokens": 4, "coverage": [2 / 4, 1.0]}
    assert table["sets"]["all"] == {"tokens": 8, "coverage": [4 / 8, 1.0]}
    assert coverage_table(ROWS, torch.zeros(20000), forced={1}, chosen=7)["sizes"] == [
        7, 1024, 2048, 4096, 8192, 16384, 20000,
    ]  # fmt: skip
