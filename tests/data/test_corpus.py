"""Corpus rows and files: spans and masks, exact round trips, files written whole."""

from dataclasses import replace
from pathlib import Path

import pytest

from eyas.data.corpus import CorpusRow, load_corpus, load_split, to_jsonl, write_atomically
from eyas.models.errors import UserError

ROW = CorpusRow("r", "given", "maths", "train", 0.7, (5, 6, 7, 8, 2), ((3, 5),), "stop", "2+2?", ("4",))
TWO = replace(ROW, input_ids=(5, 6, 7, 8, 2, 9, 9, 4, 2), generated=((3, 5), (7, 9)), reply_texts=("4", "6"))
ODD_TEXTS = ["", "two\nlines\r\n", 'quote " and \\', "\u2028 and \x85", "\u00e9\U0001f980\ufffd", "\x00\x1f"]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_rows_come_back_exactly(tmp_path: Path, text: str) -> None:
    given = [replace(ROW, id="a", prompt_text=text, reply_texts=(text,)), replace(TWO, id="b"), ROW]
    write_atomically(tmp_path / "corpus.jsonl", to_jsonl(given))
    assert load_corpus(tmp_path / "corpus.jsonl") == given


def test_example_marks_the_reply_and_adds_nothing_to_a_cut_one() -> None:
    example = replace(ROW, input_ids=(5, 6, 7, 8, 9), finish_reason="length").example()
    assert example.input_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert example.generated_mask_T.tolist() == [False, False, False, True, True]


def test_example_of_several_turns_marks_each_and_not_what_stands_between() -> None:
    example = TWO.example()
    assert example.input_ids_T.tolist() == [5, 6, 7, 8, 2, 9, 9, 4, 2]
    assert example.generated_mask_T.nonzero().squeeze(1).tolist() == [3, 4, 7, 8]
    assert (TWO.prompt_ids, TWO.reply_ids) == ((5, 6, 7), (8, 2, 4, 2))


@pytest.mark.parametrize("spans", [(), ((3, 6),), ((2, 1),), ((3, 5), (4, 5)), ((-1, 2),)])
def test_spans_that_cannot_be_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError, match="row r has"):
        replace(ROW, generated=spans, reply_texts=("x",) * len(spans))


def test_a_split_is_its_rows_alone(tmp_path: Path) -> None:
    held = replace(ROW, id="h", split="heldout")
    write_atomically(tmp_path / "corpus.jsonl", to_jsonl([ROW, held, TWO]))
    assert load_split(tmp_path, "heldout") == [held]
    assert load_split(tmp_path, "train") == [ROW, TWO]


def test_missing_corpus_names_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no corpus .*run the synthesize stage first"):
        load_corpus(tmp_path / "corpus.jsonl")


def test_write_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    write_atomically(path, "newer")
    assert path.read_text() == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]
