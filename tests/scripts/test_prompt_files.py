"""Prompt files on the command line: a dirty one ends in a table, strict mode in exit code 1, and `eyas preview`."""

import json
from pathlib import Path

import pytest
import yaml

from eyas.data.corpus import load_corpus
from eyas.data.supervision import CLOSE, OPEN
from eyas.tests.data.test_sources import DIRTY
from eyas.tests.data.test_supervision import Page
from eyas.tests.scripts.command import Eyas, refused
from eyas.tests.toys import byte_tokenizer

GOOD = [json.dumps({"id": f"good-{n}", "question": f"what is {n} and {n}?"}) for n in range(4)]


@pytest.fixture
def dirty(recipe: Path) -> list[str]:
    """Write sixteen dirty lines; return the arguments that use them and let more than nine in ten be bad."""
    recipe.with_name("dirty.jsonl").write_bytes(b"".join(line + b"\n" for line, _, _ in DIRTY))
    return [str(recipe), "--out", "run", "--set", f"synthesize.prompts=[{recipe.with_name('dirty.jsonl')}]"]


def test_a_dirty_file_runs_with_its_table_and_every_used_row_is_answered(eyas: Eyas, dirty: list[str]) -> None:
    outcome = eyas("run", *dirty, "--set", "synthesize.max_drop_share=0.9")
    assert outcome.code == 0, outcome.err
    table = json.loads(Path("run/corpus/rows.json").read_text())
    assert (table["read"], table["kept"], table["repaired"], table["dropped"], table["unused"]) == (16, 1, 6, 9, 0)
    ids = {row.id.rpartition("/")[0] for row in load_corpus(Path("run/corpus/corpus.jsonl"))}
    assert len(ids) == table["used"] == 7
    assert "rows of the prompt sources" in outcome.err
    for reason in (reason for part in ("repaired", "dropped") for reason in table["sources"][0][part]):
        assert reason.split()[0] in outcome.err
    assert all(line.startswith(("  ", "[")) for line in outcome.err.splitlines())
    assert "smoke run" in outcome.err


def test_strict_mode_ends_at_the_first_bad_line_with_exit_code_1(eyas: Eyas, dirty: list[str]) -> None:
    outcome = eyas("synthesize", *dirty, "--set", "synthesize.strict=true")
    assert outcome.code == 1
    assert outcome.out == ""
    last = outcome.err.splitlines()[-1]
    assert last.startswith("error: dirty.jsonl line 2: broken JSON")
    assert not Path("run/corpus/corpus.jsonl").exists()


def test_too_many_bad_rows_end_with_the_table_and_exit_code_1(eyas: Eyas, dirty: list[str]) -> None:
    outcome = eyas("synthesize", *dirty)
    assert outcome.code == 1
    assert "rows of the prompt sources" in outcome.err
    assert "error: 56.2% of the rows of" in outcome.err
    assert json.loads(Path("run/corpus/rows.json").read_text())["read"] == 16


def test_preview_shows_given_prompts_then_the_corpus(eyas: Eyas, recipe: Path) -> None:
    prompts = recipe.with_name("given.jsonl")
    prompts.write_text("\n".join(GOOD))
    arguments = [str(recipe), "--out", "run", "--set", f"synthesize.prompts=[{prompts}]"]
    before = eyas("preview", *arguments, "--rows", 2)
    assert before.code == 0, before.err
    assert before.out.startswith("The given conversations; there is no corpus of this recipe yet")
    assert before.out.count(OPEN) == before.out.count(CLOSE) == 2
    assert f"<|im_start|>assistant\n{OPEN}(the target's reply)<|im_end|>{CLOSE}" in before.out
    assert not Path("run").exists()
    assert eyas("synthesize", *arguments).code == 0
    after = json.loads(eyas("preview", *arguments, "--rows", 3, "--json", "--html", "p.html").out)
    assert after["origin"] == "Rows of the corpus in run/corpus."
    rows = {row.id: row for row in load_corpus(Path("run/corpus/corpus.jsonl"))}
    assert len(after["rows"]) == 3
    for row in after["rows"]:
        reply = rows[row["id"]]
        assert row["supervised_tokens"] == len(reply.reply_ids)
        assert row["tokens"] == len(reply.prompt_ids) + len(reply.reply_ids)
        assert [span["supervised"] for span in row["spans"]] == [False, True]
    page = Page(Path("p.html").read_text(encoding="utf-8"))
    assert page.marked == [row["spans"][1]["text"] for row in after["rows"]]


def test_preview_of_a_recipe_without_prompts_shows_an_example(eyas: Eyas, recipe: Path) -> None:
    changes = ["--set", "synthesize.prompts=[]", "--set", "synthesize.self_prompts=4"]
    outcome = eyas("preview", recipe, *changes, "--json")
    assert outcome.code == 0, outcome.err
    shown = json.loads(outcome.out)
    assert shown["origin"].startswith("A built-in example")
    trained = [span["text"] for span in shown["rows"][0]["spans"] if span["supervised"]]
    assert trained == ["4.<|im_end|>", "6.<|im_end|>"]


@pytest.mark.parametrize("verb", ["preview", "synthesize"])
def test_a_template_that_supervises_everything_stops_before_the_target_is_loaded(
    eyas: Eyas, recipe: Path, model: Path, tmp_path: Path, verb: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((model / "config.json").read_text())  # no weights: nothing can be loaded
    replies = "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    byte_tokenizer(replies).save_pretrained(broken)
    outcome = eyas(verb, recipe, "--out", "run", "--set", f"target.model={broken}")
    assert outcome.code == 1
    assert "error: every token is supervised in the" in outcome.err
    assert f"{OPEN}(the target's reply)<|im_end|>" in outcome.err


def test_preview_says_what_it_cannot_do(eyas: Eyas, recipe: Path) -> None:
    assert refused(eyas("preview", recipe, "--rows", 0)) == "--rows takes a number of rows from 1 on, given 0."
    assert "there is no recipe" in refused(eyas("preview", "nothing"))
    arguments = ["--set", "target.template_arguments.enable_thinking=false"]
    assert "does not read 'enable_thinking'" in refused(eyas("preview", recipe, *arguments))


def test_several_sources_with_weights_in_one_recipe(eyas: Eyas, recipe: Path) -> None:
    fields = yaml.safe_load(recipe.read_text())
    (recipe.parent / "q.jsonl").write_text("\n".join(GOOD))
    first = fields["synthesize"]["prompts"][0]
    both = (first, str(recipe.parent / "q.jsonl"))
    fields["synthesize"]["prompts"] = [{"path": path, "weight": 1} for path in both]
    recipe.write_text(yaml.safe_dump(fields))
    assert eyas("synthesize", recipe, "--out", "run").code == 0
    ids = {row.id.rpartition("/")[0] for row in load_corpus(Path("run/corpus/corpus.jsonl"))}
    assert sorted(name.split("-")[0] for name in ids) == ["good"] * 4 + ["train"] * 4
