"""The command line: wrong input is one clear sentence on stderr and exit code 2, results are alone on stdout."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.scripts import cli
from eyas.tests.scripts.command import Eyas, refused
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import write_recipe
from eyas.train import __main__ as train_main
from eyas.train import machine, pipeline
from eyas.train.context import RunContext
from eyas.train.machine import Speed
from eyas.train.run_folder import STAGES


@pytest.fixture
def short_stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the stages by ones that only note their name; the notes are returned."""
    ran: list[str] = []

    def stage(name: str) -> Callable[[RunContext], dict[str, Any]]:
        def run(context: RunContext) -> dict[str, Any]:
            ran.append(name)
            usual = {"rows": 1, "reply_tokens": 2, "cut_replies": 0, "tokens": 3, "bytes": 4, "prompts": 1}
            trained = {
                "steps": 1,
                "head_parameters": 1,
                "best_validation_tau": 1.0,
                "best_step": 0,
                "best_validation_tree_tau": 1.0,
                "best_by": "chain",
            }
            return {**usual, **trained, "folder": str(context.folder.of(name))}

        return run

    monkeypatch.setattr(pipeline, "_stage", stage)
    return ran


@pytest.fixture
def quick_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the measurement of the machine short and out of the user's cache."""
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine, "measure", lambda device: Speed(1e11, 2e11, 1e10, 1e-6))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.stepz=5", ["unknown key 'train.stepz'", "allowed here: steps, epochs", "Did you mean 'steps'?"]),
        ("trian.steps=5", ["unknown key 'trian'", "allowed here: name, target", "Did you mean 'train'?"]),
        ("train.steps=-5", ["train.steps", "greater than 0", "given -5"]),
        ("head.aux_layers=[2,4,9]", ["aux layer 9 is out of range", "8 layers", "from 0 (embeddings) to 8"]),
        ("target.model=/no/such/model", ["no model folder '/no/such/model'", "existing folder, a Hub id"]),
        ("target.model=smollm2-135m-instrukt", ["no model folder", "Did you mean 'smollm2-135m-instruct'?"]),
        ("head.draft_vocab_size=999", ["draft vocabulary size 999", "258", "set head.draft_vocab_size to at most 258"]),
        ("synthesize.prompts=[gone.jsonl]", ["no prompt file 'gone.jsonl'", "bundled:train or bundled:eval"]),
        ("evaluate.tree.num_draft_tokens=99", ["36 candidates", "between 1 and", "given 99"]),
        ("train.line_length=100", ["train.line_length 100", "max_prompt_tokens + max_reply_tokens = 120"]),
        ("nonsense", ["--set takes section.key=value", "given 'nonsense'"]),
    ],
)
def test_a_wrong_recipe_value_is_one_sentence(eyas: Eyas, recipe: Path, override: str, parts: list[str]) -> None:
    sentence = refused(eyas("run", recipe, "--out", "run", "--set", override))
    for part in parts:
        assert part in sentence
    assert not Path("run").exists()


@pytest.mark.parametrize("section", ["synthesize", "evaluate"])
def test_an_empty_prompt_file_is_named(eyas: Eyas, recipe: Path, section: str) -> None:
    Path("empty.jsonl").write_text("\n")
    sentence = refused(eyas("run", recipe, "--out", "run", "--set", f"{section}.prompts=[empty.jsonl]"))
    assert sentence == "prompt file 'empty.jsonl' is empty; it needs at least one line with \"messages\"."


def test_a_missing_recipe_names_the_bundled_ones(eyas: Eyas) -> None:
    assert "there is no recipe 'smolm2-quickstart'" in refused(eyas("run", "smolm2-quickstart"))


@pytest.mark.parametrize("verb", STAGES[1:])
def test_a_stage_whose_input_is_missing_says_what_to_run_first(eyas: Eyas, recipe: Path, verb: str) -> None:
    sentence = refused(eyas(verb, recipe, "--out", "run"))
    assert sentence == "stage 'synthesize' is not finished in run; run it first: eyas synthesize RECIPE --out run"


@pytest.mark.parametrize("option", ["--from", "--until"])
def test_an_unknown_stage_names_the_nearest(eyas: Eyas, recipe: Path, option: str) -> None:
    assert "Did you mean 'extract'?" in refused(eyas("run", recipe, "--out", "run", option, "extrat"))


def test_a_feature_store_made_for_another_target_is_refused(
    eyas: Eyas, model: Path, recipe: Path, tmp_path: Path
) -> None:
    assert eyas("run", recipe, "--out", "run", "--until", "extract").code == 0
    other = save_tiny_model(tmp_path / "other", seed=1, layers=9)
    other_recipe = write_recipe(other, tmp_path / "elsewhere")
    assert eyas("run", other_recipe, "--out", "other-run", "--until", "extract").code == 0
    shutil.rmtree("run/features")
    shutil.copytree("other-run/features", "run/features")
    outcome = eyas("train", recipe, "--out", "run")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith(
        "error: the feature store 'run/features' was made of something else: target is '"
    )
    assert "aux_layers is (2, 4, 6) there, (2, 4, 5) here" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["unheard-of"], ["run"], ["run", "a", "--unheard-of"]])
def test_bad_usage_has_exit_code_2_and_leaves_stdout_alone(eyas: Eyas, arguments: list[str]) -> None:
    outcome = eyas(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("Usage: eyas ")


def test_help_lists_run_and_one_verb_per_stage() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    listed = {line.strip("│ ").split(" ")[0] for line in result.stdout.splitlines() if line.startswith("│")}
    assert {"run", *STAGES} <= listed


@pytest.mark.usefixtures("short_stages")
def test_json_is_alone_on_stdout(eyas: Eyas, recipe: Path) -> None:
    outcome = eyas("run", recipe, "--out", "run", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out) == json.loads(Path("run/summary.json").read_text())
    assert "[1/5] synthesize" in outcome.err


@pytest.mark.usefixtures("short_stages")
def test_the_summary_is_on_stdout_and_the_progress_on_stderr(eyas: Eyas, recipe: Path) -> None:
    outcome = eyas("run", recipe, "--out", "run")
    assert outcome.out.startswith("tiny: stages")
    assert "[5/5] export" not in outcome.out
    assert "[5/5] export\n" in outcome.err


def test_each_verb_runs_its_stage_alone(eyas: Eyas, recipe: Path, short_stages: list[str]) -> None:
    for number, verb in enumerate(STAGES, start=1):
        assert eyas(verb, recipe, "--out", "run", "--json").code == 0
        assert short_stages == list(STAGES[:number])


def test_the_default_folder_is_named_after_the_recipe(eyas: Eyas, recipe: Path, short_stages: list[str]) -> None:
    assert eyas("synthesize", recipe).code == 0
    assert Path("runs/tiny/summary.json").is_file()
    assert short_stages == ["synthesize"]


def test_from_and_until_bound_the_run(eyas: Eyas, recipe: Path, short_stages: list[str]) -> None:
    assert eyas("run", recipe, "--out", "run", "--until", "train").code == 0
    assert eyas("run", recipe, "--out", "run", "--from", "train", "--until", "evaluate").code == 0
    assert short_stages == ["synthesize", "extract", "train", "evaluate"]


def test_training_as_a_module_takes_the_same_arguments(
    recipe: Path, short_stages: list[str], eyas: Eyas, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main.main([str(recipe), "--out", "run", "--set", "train.stepz=1"]) == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err
    assert train_main.main([str(recipe), "--out", "run"]) == 2
    assert "stage 'synthesize' is not finished" in capsys.readouterr().err
    assert eyas("run", recipe, "--out", "run", "--until", "extract").code == 0
    assert train_main.main([str(recipe), "--out", "run"]) == 0
    assert short_stages == ["synthesize", "extract", "train"]


def test_a_fault_of_ours_keeps_its_traceback(eyas: Eyas, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Callable[[RunContext], dict[str, Any]]:
        raise ValueError("a fault, no mistake of the user's")

    monkeypatch.setattr(pipeline, "_stage", broken)
    with pytest.raises(ValueError, match="a fault"):
        eyas("run", recipe, "--out", "run")


def test_a_real_command_line_ends_with_exit_code_2_and_no_traceback(recipe: Path) -> None:
    command = [sys.executable, "-m", "eyas.scripts.cli", "run", str(recipe), "--set", "head.aux_layers=[9]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: aux layer 9 is out of range")


def test_a_plan_is_printed_before_anything_is_loaded(eyas: Eyas, recipe: Path, quick_speed: None) -> None:
    outcome = eyas("plan", recipe)
    assert outcome.code == 0
    for stage in STAGES:
        assert f"│ {stage}" in outcome.out
    assert "corpus: at most 14 rows" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("fits: ")
    assert not Path("runs").exists()


def test_a_plan_that_does_not_fit_has_exit_code_1_and_says_what_would(
    eyas: Eyas, recipe: Path, quick_speed: None
) -> None:
    outcome = eyas("plan", recipe, "--disk", "1MB", "--json")
    assert outcome.code == 1
    made = json.loads(outcome.out)
    assert (made["fits"], made["disk_limit_bytes"]) == (False, 1_000_000)
    assert "more on disk" in made["refusals"][0]
    assert set(made["stages"]) == set(STAGES)
    assert "but 1.0 MB may be used" in eyas("run", recipe, "--set", "plan.disk=1MB").err
    assert eyas("run", recipe, "--set", "plan.disk=1MB").code == 1


def test_a_plan_for_another_card_measures_nothing_here(
    eyas: Eyas, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(device: str) -> Speed:
        raise AssertionError("this machine was measured")

    monkeypatch.setattr(machine, "measured_speed", measured)
    outcome = eyas("plan", recipe, "--card", "h200")
    assert outcome.code == 0, outcome.err
    assert "planned for one H200 SXM, 141 GB" in outcome.out
    assert "time: the card's data sheet" in outcome.out
    assert outcome.out.splitlines()[-1].endswith(" of 141 GB memory")
    assert "Did you mean 'h100'?" in refused(eyas("plan", recipe, "--card", "h101"))


def test_a_limit_that_is_no_size_is_bad_usage(eyas: Eyas, recipe: Path) -> None:
    assert "plan.disk" in refused(eyas("plan", recipe, "--disk", "much"))


def test_doctor_checks_a_recipe_and_fails_with_exit_code_1(eyas: Eyas, recipe: Path) -> None:
    outcome = eyas("doctor", recipe)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == "ready"
    assert "tokens that are trained in" in outcome.out
    outcome = eyas("doctor", recipe, "--set", "head.aux_layers=[9]", "--json")
    assert outcome.code == 1
    found = json.loads(outcome.out)
    assert (found["ok"], found["preview"]) == (False, None)
    assert found["checks"][0]["verdict"] == "failed"


def test_doctor_takes_recipes_only(eyas: Eyas, model: Path) -> None:
    assert "is checked as a head, which needs --target MODEL" in refused(eyas("doctor", model))
