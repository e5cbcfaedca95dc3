"""Corpus files: exact round trips, parts written whole, what is left by a kill."""

from dataclasses import replace
from pathlib import Path

import pytest

from eyas.data.corpus import CorpusRow, PartWriter, load_corpus, read_rows, to_jsonl, write_atomically
from eyas.models.errors import UserError

ROW = CorpusRow("r", "given", "maths", "train", 0.7, (5, 6, 7), (8, 2), "stop", "2+2?", "4")
ODD_TEXTS = ["", "two\nlines\r\n", 'quote " and \\', "\u2028 and \x85", "\u00e9\U0001f980\ufffd", "\x00\x1f"]


def rows(count: int) -> list[CorpusRow]:
    return [replace(ROW, id=f"r{n}") for n in range(count)]


def parts(folder: Path) -> dict[str, list[str]]:
    return {path.name: [row.id for row in read_rows(path)] for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_rows_come_back_exactly(tmp_path: Path, text: str) -> None:
    given = [replace(ROW, id="a", prompt_text=text, reply_text=text), replace(ROW, id="b", reply_ids=())]
    write_atomically(tmp_path / "corpus.jsonl", to_jsonl(given))
    assert load_corpus(tmp_path / "corpus.jsonl") == given


def test_example_marks_the_reply_and_adds_nothing_to_a_cut_one() -> None:
    example = replace(ROW, reply_ids=(8, 9), finish_reason="length").example()
    assert example.input_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert example.generated_mask_T.tolist() == [False, False, False, True, True]


def test_missing_corpus_names_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no corpus .*run the synthesize stage first"):
        load_corpus(tmp_path / "corpus.jsonl")


def test_parts_hold_a_fixed_number_of_rows_and_close_writes_the_rest(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "parts", rows_per_part=3)
    for row in rows(7):
        writer.add(row)
    assert parts(tmp_path / "parts") == {"part-00000.jsonl": ["r0", "r1", "r2"], "part-00001.jsonl": ["r3", "r4", "r5"]}
    writer.close()
    writer.close()
    assert parts(tmp_path / "parts")["part-00002.jsonl"] == ["r6"]
    assert writer.written() == {row.id: row for row in rows(7)}


def test_a_new_writer_goes_on_behind_the_last_part_and_overwrites_none(tmp_path: Path) -> None:
    first = PartWriter(tmp_path, rows_per_part=1)
    for row in rows(3):
        first.add(row)
    (tmp_path / "part-00000.jsonl").unlink()
    (tmp_path / ".part-00003.jsonl.77.tmp").write_text('{"id": "torn')
    second = PartWriter(tmp_path, rows_per_part=1)
    assert set(second.written()) == {"r1", "r2"}
    second.add(rows(1)[0])
    assert set(PartWriter(tmp_path, rows_per_part=1).written()) == {"r0", "r1", "r2"}


def test_write_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    write_atomically(path, "newer")
    assert path.read_text() == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]
