"""The whole pipeline on a tiny model, from two prompt files to an exported head, as a user runs it."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from eyas.data.corpus import load_corpus
from eyas.data.feature_store import FeatureStore
from eyas.inference.calibration import Calibration, prompt_hash
from eyas.inference.evaluation import read_measurements
from eyas.models.checkpoint import load_head
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import EVAL_PROMPTS, TRAIN_PROMPTS, be_eyas, write_recipe
from eyas.train.run_folder import STAGES

# What a stage writes first: the moment it is killed at. The export stage writes its folder at once, so there it is the
# note that the stage has begun.
FIRST_OUTPUT = {
    "synthesize": "corpus/replies/part-000-00000.jsonl",
    "extract": "features/shard-00000.safetensors",
    "train": "training/checkpoints/step-0000002.pt",
    "evaluate": "evaluation/measurements.jsonl",
    "export": "stages/export.json",
}


class Finished(NamedTuple):
    recipe: Path
    folder: Path
    out: str
    err: str


def run(recipe: Path, folder: Path, *arguments: str) -> Finished:
    """Run the command to its end, as on a machine without a terminal."""
    command = [sys.executable, "-m", "eyas.scripts.cli", "run", str(recipe), "--out", str(folder), *arguments]
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return Finished(recipe, folder, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("end-to-end")
    model = save_tiny_model(folder / "model")
    return run(write_recipe(model, folder), folder / "run")


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "evaluation" / "report.json").read_text()))


def entries(folder: Path, prompt_set: str, temperature: float) -> dict[str, dict[str, Any]]:
    """Return the report's entries of one prompt set and temperature by method."""
    results = report(folder)["results"]
    return {e["method"]: e for e in results if (e["prompt_set"], e["temperature"]) == (prompt_set, temperature)}


def test_everything_promised_is_in_the_run_folder(finished: Finished) -> None:
    for name in (
        "recipe.yaml", "summary.json", "corpus/corpus.jsonl", "features/manifest.json", "training/metrics.jsonl",
        "training/best/model.safetensors", "evaluation/report.json", "evaluation/report.html",
        "evaluation/acceptance.png", "head/config.json", "head/model.safetensors", "head/eyas.json", "head/README.md",
    ):  # fmt: skip
        assert (finished.folder / name).stat().st_size > 0, name
    leftovers = [path for path in finished.folder.rglob("*") if path.name.endswith(".tmp")]
    assert leftovers == []


def test_the_corpus_holds_every_prompt_in_every_style(finished: Finished) -> None:
    rows = load_corpus(finished.folder / "corpus" / "corpus.jsonl")
    splits = [row.split for row in rows]
    assert (splits.count("validation"), splits.count("train")) == (2, 2 * (TRAIN_PROMPTS - 2))
    assert all(1 <= len(row.reply_ids) <= 24 for row in rows)
    store = FeatureStore(finished.folder / "features")
    assert store.row_ids == [row.id for row in rows]
    assert store.manifest.spec.aux_layers == (2, 4, 5)


def test_greedy_output_is_plain_decodings_and_the_numbers_add_up(finished: Finished) -> None:
    for prompt_set, prompts in (("all", EVAL_PROMPTS), ("letters", 2), ("words", 2)):
        at_zero = entries(finished.folder, prompt_set, 0.0)
        assert at_zero.keys() == {"plain", "chain", "tree"}
        for method, entry in at_zero.items():
            assert (entry["prompts"], entry["identical_to_plain"], entry["differences"]) == (prompts, prompts, [])
            assert entry["tau"] == pytest.approx(1 + entry["accepted"] / entry["rounds"])
            assert entry["accepted"] == sum(entry["survived"])
            assert (entry["tau"] == 1.0) == (method == "plain")
    assert entries(finished.folder, "all", 1.0)["tree"]["prompts"] == 2  # one per set


def test_the_report_says_what_was_run_and_on_what(finished: Finished) -> None:
    found = report(finished.folder)
    assert found["command"] == f"eyas run {finished.recipe} --out {finished.folder}"
    assert found["recipe"] == "tiny"
    for key in ("target_fingerprint", "template_fingerprint", "prompt_hash"):
        assert len(found[key]) == 16
    assert found["versions"]["torch"] == torch.__version__
    training = found["training"]
    assert [point["step"] for point in training["history"]] == [0, 10, 20, 30]
    assert training["best_validation_tau"] == max(point["tau"] for point in training["history"])
    assert (training["rows"], training["rows_without_slots"]) == (12, 0)


def test_the_exported_head_is_the_best_one_and_carries_its_numbers(finished: Finished) -> None:
    exported = load_head(finished.folder / "head", dtype=torch.bfloat16)
    best = load_head(finished.folder / "training" / "best", dtype=torch.bfloat16)
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, best.state_dict()[name]), name
    card = json.loads((finished.folder / "head" / "eyas.json").read_text())
    measured = {(entry["method"], entry["temperature"]): entry["tau"] for entry in card["acceptance"]}
    assert measured[("tree", 0.0)] == entries(finished.folder, "all", 0.0)["tree"]["tau"]
    assert '"method": "eagle3"' in (finished.folder / "head" / "README.md").read_text()


def test_training_logged_every_step_and_the_loss_fell(finished: Finished) -> None:
    lines = [json.loads(line) for line in (finished.folder / "training" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert steps[0]["learning_rate"] == pytest.approx(1.5e-3)  # the first of two warm-up steps


def test_what_the_user_sees_is_whole_and_quiet(finished: Finished) -> None:
    lines = finished.err.splitlines()
    titles = [line for line in lines if line.startswith("[")]
    assert titles == [f"[{number}/5] {name}" for number, name in enumerate(STAGES, start=1)]
    for line in lines:  # no bars, warnings or tracebacks of the libraries: every line is a title or indented under one
        assert line.startswith(("[", "  ")), line
    coverage = next(line for line in lines if line.startswith("  draft vocabulary: 128 of 258 tokens"))
    assert coverage.endswith("of generated validation tokens")
    assert "Loading weights" not in finished.err
    assert finished.out.startswith("tiny: stages")
    assert finished.out.endswith(
        f"everything is in {finished.folder} (evaluation/report.html to look at, head/ to serve)\n"
    )


def test_run_again_every_stage_is_skipped_and_json_is_alone_on_stdout(finished: Finished) -> None:
    again = run(finished.recipe, finished.folder, "--json")
    assert again.err.splitlines() == [
        f"[{number}/5] {name}: unchanged, skipped" for number, name in enumerate(STAGES, start=1)
    ]
    assert json.loads(again.out) == json.loads((finished.folder / "summary.json").read_text())


def outcome(folder: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions: texts, features, weights and decoded tokens."""
    rows = load_corpus(folder / "corpus" / "corpus.jsonl")
    features = FeatureStore(folder / "features").all_rows()
    measured = read_measurements(folder / "evaluation" / "measurements.jsonl")
    return {
        "corpus": [(row.id, row.split, row.prompt_ids, row.reply_ids, row.finish_reason) for row in rows],
        "features": [(row.id, row.input_ids_T.tolist(), row.argmax_T.tolist()) for row in features],
        "weights": load_head(folder / "training" / "best", dtype=torch.float32).state_dict(),
        "history": json.loads((folder / "summary.json").read_text())["results"]["train"]["history"],
        "decoded": sorted((m.prompt_id, m.method, m.temperature, m.token_ids) for m in measured),
    }


def start(recipe: Path, folder: Path) -> multiprocessing.process.BaseProcess:
    """Start the command in a process of its own, forked from one that has the libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(f"eyas.train.stage_{stage}" for stage in STAGES), "eyas.tests.train.tiny_run"])
    arguments = ["run", str(recipe), "--out", str(folder)]
    process = context.Process(target=be_eyas, args=(arguments, folder.with_suffix(".txt")))
    process.start()
    return process


def kill_in(stage: str, recipe: Path, folder: Path) -> None:
    """Start the run, SIGKILL it as soon as a stage has written its first output, and check that it was not done."""
    process, started = start(recipe, folder), time.monotonic()
    while not (folder / FIRST_OUTPUT[stage]).exists():
        assert process.is_alive(), folder.with_suffix(".txt").read_text()
        assert time.monotonic() - started < 300, f"{stage} wrote nothing"
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not json.loads((folder / "stages" / f"{stage}.json").read_text())["finished"], f"{stage} was too quick"


def test_a_run_killed_in_every_stage_in_turn_ends_like_one_that_was_left_alone(finished: Finished) -> None:
    folder = finished.folder.with_name("killed")
    for stage in STAGES:
        kill_in(stage, finished.recipe, folder)
    last = start(finished.recipe, folder)
    last.join(timeout=300)
    assert last.exitcode == 0
    assert folder.with_suffix(".txt").read_text().splitlines()[:5] == [
        *(f"[{number}/5] {name}: unchanged, skipped" for number, name in enumerate(STAGES[:4], start=1)),
        "[5/5] export: resuming",
    ]
    killed, alone = outcome(folder), outcome(finished.folder)
    weights, expected = killed.pop("weights"), alone.pop("weights")
    assert killed == alone
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
    assert (folder / "head" / "model.safetensors").is_file()


def test_the_head_is_calibrated_on_prompts_that_are_not_measured(finished: Finished) -> None:
    card = json.loads((finished.folder / "head" / "eyas.json").read_text())
    found = Calibration.from_card(card, where="eyas.json")
    assert found is not None
    assert found.target == card["target_fingerprint"]
    rows = load_corpus(finished.folder / "corpus" / "corpus.jsonl")
    validation = {prompt_hash(row.prompt_ids) for row in rows if row.split == "validation"}
    trained = {prompt_hash(row.prompt_ids) for row in rows if row.split == "train"}
    assert set(found.prompts) <= validation - trained
    assert [fit.temperature for fit in found.fits] == [0.0, 1.0]
    assert all(fit.rounds > 0 for fit in found.fits)
    assert report(finished.folder)["calibration"]["prompts"] == len(found.prompts) == 2


def test_calibrated_and_cost_aware_trees_are_measured_where_asked_for(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    settings = ("evaluate.tree.calibrated=true", "evaluate.auto.depth=3", "evaluate.auto.num_draft_tokens=9")
    again = run(finished.recipe, tmp_path / "run", *(word for setting in settings for word in ("--set", setting)))
    found = entries(again.folder, "all", 0.0)
    assert list(found) == ["plain", "chain", "tree", "cost-aware tree"]
    assert all(entry["identical_to_plain"] == EVAL_PROMPTS for entry in found.values())
    assert found["tree"]["drafted"] == 8 * found["tree"]["rounds"]
    page = (again.folder / "evaluation" / "report.html").read_text()
    assert "The cost-aware tree " in page, "the report leads with it"
    assert report(again.folder)["by_context"][0]["method"] == "chain"
