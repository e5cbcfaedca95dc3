"""The prompt sources of a recipe: read with the target's template and limits, shown, saved, apart from evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.data.corpus import CorpusRow
from eyas.data.encode import ChatTemplate
from eyas.data.prompt_source import PromptSource
from eyas.data.row_datasets import DatasetName
from eyas.data.sources import RowsRefused, SourcesReport
from eyas.models.errors import CheckFailed, UserError
from eyas.tests.toys import byte_tokenizer
from eyas.train.progress import Reporter
from eyas.train.prompt_sources import check_apart, overlap_sets, read_given, source_hash, with_table
from eyas.train.recipe import Recipe
from eyas.train.recipe_io import parse_recipe

RUN = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu"


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def recipe(prompts: list[Any], evaluation: list[str], **synthesize: Any) -> Recipe:
    sections = {
        "synthesize": {"prompts": prompts, **synthesize},
        "evaluate": {"prompts": evaluation or ["bundled:eval"]},
    }
    return parse_recipe({"name": "x", "target": {"model": "m"}, **sections}, where="here")


def read(asked: Recipe, folder: Path, *, positions: int = 512) -> SourcesReport:
    template = ChatTemplate(byte_tokenizer())
    reporter = Reporter()
    return with_table(lambda: read_given(asked, template, positions=positions, reporter=reporter), reporter, folder)


def test_rows_are_read_shown_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", ["one", "two", f"tell me {RUN}", "x" * 300])
    evaluation = write(tmp_path / "e.jsonl", [RUN])
    report = read(recipe([path], [evaluation], max_drop_share=0.3), tmp_path / "corpus")
    assert [c.prompt().messages[0]["content"] for c in report.conversations] == ["one", "two"]
    saved = json.loads((tmp_path / "corpus" / "rows.json").read_text())
    assert saved == report.table.to_json()
    assert saved["sources"][0]["dropped"] == {"in an evaluation set": 1, "too long": 1}
    said = capsys.readouterr().err
    assert f"  {path}: schema prompt (fits 4 of the first 4 rows)" in said.replace("\n", "").replace("   ", "  ")
    assert all(line.startswith("  ") for line in said.splitlines() if line)
    for word in ("read", "kept", "dropped", "too long", "in an evaluation set"):
        assert word in said


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = recipe(["bundled:train", write(tmp_path / "[bold].jsonl", ["one"])], [], max_drop_share=0.5)
    read(asked, tmp_path)
    said = capsys.readouterr().err
    assert "  bundled:train: schema messages (fits 100 of the first 100 rows)\n" in said
    assert "\u2502 bundled:train " in said
    assert "[bold].jsonl" in said.partition("rows of the prompt sources")[2].replace("\n", "")


def test_refused_rows_leave_their_table_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", ["one", "", "three"])
    with pytest.raises(RowsRefused, match=r"33\.3% of the rows"):
        read(recipe([path], []), tmp_path / "corpus")
    assert json.loads((tmp_path / "corpus" / "rows.json").read_text())["dropped"] == 1
    assert "empty content" in capsys.readouterr().err
    with pytest.raises(RowsRefused, match=r"p\.jsonl line 2: empty content"):
        read(recipe([path], [], strict=True), tmp_path / "corpus")


@pytest.mark.parametrize(("positions", "used"), [(512, 2), (200, 1)])
def test_the_targets_positions_bound_a_prompt(tmp_path: Path, positions: int, used: int) -> None:
    path = write(tmp_path / "p.jsonl", ["one", "x" * 90])
    asked = recipe([path], [], max_prompt_tokens=256, max_reply_tokens=150, max_drop_share=0.5)
    assert len(read(asked, tmp_path, positions=positions).conversations) == used


def test_overlap_is_with_the_evaluation_sets_unless_others_are_named() -> None:
    assert overlap_sets(recipe(["a"], ["e"])) == ("e",)
    assert overlap_sets(recipe(["a"], ["e"], dedup={"overlap_with": ["f", "g"]})) == ("f", "g")
    assert overlap_sets(recipe(["a"], ["e"], dedup={"overlap_words": 0})) == ()


def corpus_row(text: str, **fields: Any) -> CorpusRow:
    values = {"source": "given", "split": "train", **fields}
    return CorpusRow("id", values["source"], "c", values["split"], 0.0, (1, 2), ((1, 2),), "stop", text, ("reply",))


def test_an_evaluation_set_that_changed_after_synthesis_may_not_hold_training_prompts(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "e.jsonl", [RUN, "something else"])
    asked = recipe(["a"], [evaluation])
    check_apart(asked, [corpus_row("one"), corpus_row(RUN, split="validation")])
    with pytest.raises(CheckFailed, match=r"^1 training prompts of the corpus .*, for example 'say"):
        check_apart(asked, [corpus_row("one"), corpus_row(f"say {RUN}"), corpus_row(f"say {RUN}")])
    check_apart(recipe(["a"], [evaluation], dedup={"overlap_words": 0}), [corpus_row(RUN)])


def test_the_hash_of_a_source_is_that_of_its_bytes(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", ["x"]), write(tmp_path / "b.jsonl", ["x"])
    assert source_hash(PromptSource(path=a)) == source_hash(PromptSource(path=b))
    before = source_hash(PromptSource(dataset=DatasetName(str(tmp_path))))
    write(tmp_path / "b.jsonl", ["y"])
    assert source_hash(PromptSource(path=a)) != source_hash(PromptSource(path=b))
    assert source_hash(PromptSource(dataset=DatasetName(str(tmp_path)))) != before
    assert source_hash(PromptSource(dataset=DatasetName("some/id", revision="v1"))) == ["some/id", "v1"]
    with pytest.raises(UserError, match="there is no prompt file"):
        source_hash(PromptSource(path="gone.jsonl"))
