"""Which stages of a run are done, skipped, resumed or thrown away. The stages themselves are stand-ins here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.models.errors import UserError
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe, write_prompts
from eyas.train import pipeline
from eyas.train.context import RunContext
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe, parse_recipe
from eyas.train.run_folder import FOLDERS, STAGES, RunFolder

ALL = list(STAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class FakeStages:
    """Stages that write one line to their folder per call, and break where asked."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.breaks_in: str | None = None

    def __call__(self, name: str) -> Callable[[RunContext], dict[str, Any]]:
        def stage(context: RunContext) -> dict[str, Any]:
            self.ran.append(name)
            folder = context.folder.of(name)
            with (folder / "lines").open("a") as file:
                file.write(f"{len(self.ran)}\n")
            if name == self.breaks_in:
                raise KeyboardInterrupt
            return {"line": len(self.ran)}

        return stage

    def fresh(self) -> list[str]:
        """Return the stages run since the last call."""
        ran, self.ran = self.ran, []
        return ran


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    fake = FakeStages()
    monkeypatch.setattr(pipeline, "_stage", fake)
    return fake


@pytest.fixture
def fields(model: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_recipe(model, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def run(fields: dict[str, Any], folder: Path, **span: str) -> dict[str, Any]:
    return run_stages(parse_recipe(fields, where="here"), folder, reporter=Reporter(quiet=True), **span)


def changed(fields: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return the fields with one dotted key set."""
    copy = json.loads(json.dumps(fields))
    *sections, last = key.split(".")
    place = copy
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    return copy


def test_a_run_does_every_stage_once_and_then_nothing(
    stages: FakeStages, fields: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(fields, folder)
    assert stages.fresh() == ALL
    assert all(stage["finished"] for stage in summary["stages"].values())
    assert summary["results"]["train"] == {"line": 3}
    run_stages(parse_recipe(fields, where="here"), folder, reporter=Reporter())
    assert stages.fresh() == []
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"[{i}/5] {name}: unchanged, skipped" for i, name in enumerate(ALL, start=1)]
    assert captured.out == ""


def test_the_folder_holds_the_whole_recipe_and_the_summary(
    stages: FakeStages, fields: dict[str, Any], folder: Path
) -> None:
    summary = run(fields, folder)
    assert load_recipe(str(folder / "recipe.yaml")) == parse_recipe(fields, where="here")
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert {path.name for path in folder.iterdir()} == {*FOLDERS.values(), "stages", "recipe.yaml", "summary.json"}


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [
        ("synthesize.seed", 1, "synthesize"),
        ("synthesize.answers", [{"temperature": 0.5, "top_p": 0.9}], "synthesize"),
        ("synthesize.backend.token_ids", False, "synthesize"),
        ("synthesize.backend.concurrency", 3, None),
        ("synthesize.backend.retries", 0, None),
        ("extract.state_dtype", "bfloat16", "extract"),
        ("extract.mode", "online", "extract"),
        ("target.quantization", "int8", "synthesize"),
        ("head.draft_vocab_size", 64, "train"),
        ("head.aux_layers", [1, 4, 6], "extract"),
        ("head.fc_norm", True, "train"),
        ("train.steps", 31, "train"),
        ("train.validation_depth", 2, "train"),
        ("evaluate.tree.top_k", 3, "evaluate"),
        ("evaluate.max_new_tokens", 17, "evaluate"),
        ("evaluate.chain.depth", 2, "evaluate"),
        ("export.dtype", "float32", "export"),
        ("target.device", "cpu", None),
        ("name", "other", None),
    ],
)
def test_a_changed_key_reruns_its_stage_and_those_after_it(
    stages: FakeStages, fields: dict[str, Any], folder: Path, key: str, value: object, first: str | None
) -> None:
    run(fields, folder)
    stages.fresh()
    run(changed(fields, key, value), folder)
    expected = ALL[ALL.index(first) :] if first else []
    assert stages.fresh() == expected
    for name in expected:
        assert len((folder / FOLDERS[name] / "lines").read_text().split()) == 1  # what was there before is gone


def test_the_evaluated_tree_concerns_training_only_where_it_chooses_the_head(
    fields: dict[str, Any], folder: Path
) -> None:
    chosen = changed(fields, "train.best_by", "tree")
    own = changed(chosen, "train.validation_tree", {"depth": 2, "top_k": 2, "num_draft_tokens": 3})
    for recipe, differs in ((fields, False), (chosen, True), (own, False)):
        keys = [
            RunContext(parse_recipe(r, where="here"), RunFolder(folder), Reporter(quiet=True)).fingerprints["train"]
            for r in (recipe, changed(recipe, "evaluate.tree.top_k", 3))
        ]
        assert (keys[0] != keys[1]) == differs


def test_template_arguments_are_part_of_every_stages_fingerprint(fields: dict[str, Any], folder: Path) -> None:
    keys = [
        RunContext(parse_recipe(recipe, where="here"), RunFolder(folder), Reporter(quiet=True)).fingerprints
        for recipe in (fields, changed(fields, "target.template_arguments", {"enable_thinking": False}))
    ]
    assert all(keys[0][stage] != keys[1][stage] for stage in ALL)


@pytest.mark.parametrize(("name", "first"), [("train.jsonl", "synthesize"), ("eval.jsonl", "evaluate")])
def test_the_contents_of_a_prompt_file_count_not_its_name(
    stages: FakeStages, fields: dict[str, Any], folder: Path, tmp_path: Path, name: str, first: str
) -> None:
    run(fields, folder)
    stages.fresh()
    path = tmp_path / name
    text = path.read_text()
    path.write_text(text.replace("say aaa", "say aab"))
    run(fields, folder)
    assert stages.fresh() == ALL[ALL.index(first) :]
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / name).write_text(path.read_text())
    path.write_text(text)
    run(fields, folder)
    assert stages.fresh() == ALL[ALL.index(first) :]


def test_another_target_starts_over(stages: FakeStages, fields: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    run(fields, folder)
    stages.fresh()
    other = save_tiny_model(tmp_path / "other", layers=9)
    run(changed(fields, "target.model", str(other)), folder)
    assert stages.fresh() == ALL


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_broke_off_is_resumed_in_its_own_folder(
    stages: FakeStages, fields: dict[str, Any], folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.breaks_in = name
    with pytest.raises(KeyboardInterrupt):
        run(fields, folder)
    assert stages.fresh() == ALL[: ALL.index(name) + 1]
    assert not RunFolder(folder).record(name)["finished"]
    spent = RunFolder(folder).record(name)["seconds"]
    assert spent > 0
    stages.breaks_in = None
    run_stages(parse_recipe(fields, where="here"), folder, reporter=Reporter())
    assert stages.fresh() == ALL[ALL.index(name) :]
    assert len((folder / FOLDERS[name] / "lines").read_text().split()) == 2
    assert f"[{ALL.index(name) + 1}/5] {name}: resuming\n" in capsys.readouterr().err
    assert RunFolder(folder).record(name)["seconds"] > spent


def test_a_stage_that_broke_off_is_not_resumed_with_other_settings(
    stages: FakeStages, fields: dict[str, Any], folder: Path
) -> None:
    stages.breaks_in = "train"
    with pytest.raises(KeyboardInterrupt):
        run(fields, folder)
    stages.breaks_in = None
    run(changed(fields, "train.steps", 31), folder)
    assert len((folder / "training" / "lines").read_text().split()) == 1


def test_a_finished_stage_whose_output_was_deleted_is_done_again(
    stages: FakeStages, fields: dict[str, Any], folder: Path
) -> None:
    run(fields, folder)
    stages.fresh()
    (folder / "features" / "lines").unlink()
    (folder / "features").rmdir()
    run(fields, folder)
    assert stages.fresh() == ["extract"]


@pytest.mark.parametrize(
    ("span", "expected"),
    [({"last": "extract"}, ALL[:2]), ({"first": "synthesize", "last": "synthesize"}, ALL[:1]), ({}, ALL)],
)
def test_until_ends_the_run_after_a_stage(
    stages: FakeStages, fields: dict[str, Any], folder: Path, span: dict[str, str], expected: list[str]
) -> None:
    summary = run(fields, folder, **span)
    assert stages.fresh() == expected
    assert [name for name, stage in summary["stages"].items() if stage["finished"]] == expected


def test_from_needs_what_comes_before_it(stages: FakeStages, fields: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UserError, match=r"stage 'synthesize' is not finished in .*; run it first: eyas synthesize"):
        run(fields, folder, first="train")
    assert not folder.exists()
    run(fields, folder, last="extract")
    stages.fresh()
    run(fields, folder, first="train", last="train")
    assert stages.fresh() == ["train"]
    with pytest.raises(UserError, match=r"stage 'extract' was made with other settings in .*; run it first"):
        run(changed(fields, "extract.rows_per_shard", 5), folder, first="evaluate")
    assert stages.fresh() == []


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"first": "trian"}, r"unknown stage 'trian'; the stages are synthesize, .* Did you mean 'train'\?"),
        ({"last": "exprot"}, r"unknown stage 'exprot'.*Did you mean 'export'\?"),
        ({"first": "train", "last": "extract"}, "nothing to run: stage 'train' comes after 'extract'"),
    ],
)
def test_a_span_that_is_none_is_refused(
    stages: FakeStages, fields: dict[str, Any], folder: Path, span: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(fields, folder, **span)
    assert stages.fresh() == []


def test_results_of_other_settings_are_not_shown_as_those_of_this_run(
    stages: FakeStages, fields: dict[str, Any], folder: Path
) -> None:
    run(fields, folder)
    summary = run(changed(fields, "train.steps", 31), folder, last="train")
    assert summary["results"]["train"] == {"line": 6}
    assert summary["results"]["evaluate"] == {}
    assert summary["stages"]["evaluate"] == {"finished": False, "seconds": 0.0}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("target.model", "/no/such/model", "there is no model folder '/no/such/model'"),
        ("target.device", "gpu", "target.device 'gpu' cannot be used here"),
        ("head.aux_layers", [2, 4, 9], r"aux layer 9 is out of range: this target has 8 layers.*from 0 .* to 8"),
        ("head.aux_layers", [4, 2], r"aux layers \[4, 2\] must be .*ascending; write \[2, 4\]"),
        ("head.draft_vocab_size", 259, r"draft vocabulary size 259 .*258.*at most 258"),
        ("evaluate.tree.num_draft_tokens", 37, r"num_draft_tokens must be between 1 and .*given 37"),
        ("synthesize.prompts", ["nothing.jsonl"], r"there is no prompt file 'nothing\.jsonl'"),
        ("evaluate.prompts", ["nothing.jsonl"], r"there is no prompt file 'nothing\.jsonl'"),
        ("evaluate.prompts", ["bundled:evil"], "there is no prompt file 'bundled:evil'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_stage(
    stages: FakeStages, fields: dict[str, Any], folder: Path, key: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(changed(fields, key, value), folder)
    assert stages.fresh() == []
    assert not folder.exists()


def test_prompt_files_are_read_before_the_first_stage(
    stages: FakeStages, fields: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    evaluation = tmp_path / "eval.jsonl"
    good = evaluation.read_text()
    for text, message in (
        ("", r"prompt file '.*eval\.jsonl' is empty"),
        (good.replace("letters", "all"), "evaluation category 'all' is a name of the report's own"),
        (good + '{"messages": []}\n', r"eval\.jsonl line 5: empty conversation\."),
    ):
        evaluation.write_text(text)
        with pytest.raises(UserError, match=message):
            run(fields, folder)
    evaluation.write_text(good)
    twin = write_prompts(tmp_path / "twin.jsonl", "eval", 1)
    with pytest.raises(
        UserError, match=r"prompt id 'eval-0' occurs twice in .*eval\.jsonl, .*twin\.jsonl; ids must be"
    ):
        run(changed(fields, "evaluate.prompts", [str(evaluation), str(twin)]), folder)
    assert stages.fresh() == []


def test_a_run_folder_that_is_a_file_is_refused(stages: FakeStages, fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"taken' is a file; --out takes a folder"):
        run(fields, tmp_path / "taken")


def test_the_rank_that_follows_finds_the_attempt_of_the_first_and_deletes_nothing(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert not first.begin("train", "key")
    (first.of("train") / "metrics.jsonl").write_text("line")
    assert second.begin("train", "key")
    assert (first.of("train") / "metrics.jsonl").read_text() == "line"


def test_other_ranks_do_not_mark_a_stage_finished(
    stages: FakeStages, fields: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    run(fields, folder, last="synthesize")
    assert stages.fresh() == ["synthesize"]
    assert not RunFolder(folder).record("synthesize")["finished"]


def test_the_recipe_written_is_the_recipe_run(stages: FakeStages, fields: dict[str, Any], folder: Path) -> None:
    run(fields, folder)
    run(changed(fields, "train.steps", 12), folder, first="train", last="train")
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"]["steps"] == 12
