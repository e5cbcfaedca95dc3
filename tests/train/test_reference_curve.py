"""The shipped curves: what a run is compared with, and when it is said to stay behind."""

import json
from pathlib import Path

import pytest

from eyas.models.errors import UserError
from eyas.train.curves import draw_curves
from eyas.train.recipe_io import bundled_recipes, load_recipe
from eyas.train.reference_curve import (
    BESIDE,
    CURVES,
    ReferenceCurve,
    behind,
    curve_of,
    main,
    reference_of,
    references,
    training_settings,
    what_is_normal,
)
from eyas.train.stage_train import validation_line

POINTS = ({"step": 0, "tau": 1.0, "tree_tau": 1.1}, {"step": 100, "tau": 1.5, "tree_tau": 2.0})
CURVE = ReferenceCurve("some", "abc", "a target", 5000, 10, POINTS, "0123", 0, "2 cores", "today")
VALUES = {"step": 50, "slot_tau": 1.4, "tree_tau": 1.5, "sampled_tau": 1.1, "sampled_tree_tau": 1.2, "best_tau": 1.3}


@pytest.mark.parametrize("path", sorted(CURVES.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_curve_is_that_of_the_recipe_as_it_is_now(path: Path) -> None:
    """Fails when a recipe is changed: run it again and write its curve, or take the curve away."""
    curve = next(curve for curve in references() if curve.recipe == path.stem)
    assert path.stem in bundled_recipes()
    assert reference_of(load_recipe(path.stem)) is curve
    steps = [point["step"] for point in curve.points]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert curve.commit, "of which code"
    assert curve.points[0]["tau"] < 1.1 < 1.4 < curve.last["tau"] < curve.last["tree_tau"]


def test_only_what_changes_the_curve_makes_another_recipe() -> None:
    same = ["train.validate_every=7", "train.tracker=wandb", "extract.mode=online", "evaluate.max_new_tokens=9"]
    assert reference_of(load_recipe("smollm2-quickstart", same)) is not None
    for other in ("train.learning_rate=5e-4", "synthesize.self_prompts=401", "head.init=random", "train.seed=1"):
        assert reference_of(load_recipe("smollm2-quickstart", [other])) is None, other


def test_every_setting_said_to_change_nothing_is_one_of_the_recipe() -> None:
    fields = load_recipe("smollm2-quickstart").model_dump()
    for section, names in BESIDE.items():
        assert names <= fields[section].keys()


def test_between_validations_the_reference_is_a_line_and_behind_its_last_nothing() -> None:
    assert [CURVE.at(step, "tau") for step in (0, 50, 100)] == [1.0, pytest.approx(1.25), 1.5]
    assert CURVE.at(75, "tree_tau") == pytest.approx(1.1 + 0.75 * 0.9)
    assert CURVE.at(101, "tau") is None


def test_a_run_that_stays_behind_is_told_and_one_as_good_or_better_hears_the_number() -> None:
    assert behind(CURVE, {"step": 50, "tau": 1.16}) == "reference 1.250"
    assert behind(CURVE, {"step": 50, "tau": 1.9}) == "reference 1.250"
    assert behind(CURVE, {"step": 50, "tau": 1.14}).startswith("reference 1.250: 0.11 behind the run of this recipe")
    assert behind(CURVE, {"step": 200, "tau": 1.0}) == ""
    assert validation_line({**VALUES, "tau": 1.2}, CURVE).endswith("; best 1.300; reference 1.250")
    assert validation_line({**VALUES, "tau": 1.2}).endswith("; best 1.300")
    assert "eyas doctor RECIPE" in validation_line({**VALUES, "tau": 1.0}, CURVE)


def test_a_run_of_another_recipe_hears_how_far_the_references_came() -> None:
    said = what_is_normal(12345)
    assert said.startswith("12,345 taught tokens.")
    for curve in references():
        assert f"{curve.last['tau']:.2f} and {curve.last['tree_tau']:.2f} with {curve.taught_tokens:,}" in said


def test_the_picture_holds_the_reference(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"event": "step", "step": 1, "loss": 2.0}, {"event": "validation", "tau": 1.2, "alpha": [0.2], **VALUES}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name, reference in (("without", None), ("with", CURVE)):
        draw_curves(metrics, tmp_path / f"{name}.png", reference)
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_a_run_makes_its_curve_and_a_torn_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "head").mkdir()
    with pytest.raises(UserError, match="no run whose training has finished"):
        curve_of(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: mine\ntarget: {model: some/target}\n", encoding="utf-8")
    history = [{"step": 0, "tau": 1.01234567, "tree_tau": 1.1, "slot_tau": 1.2}]
    result = {"history": history, "supervised_tokens": 9, "head_parameters": 3}
    (tmp_path / "summary.json").write_text(json.dumps({"results": {"train": result}}), encoding="utf-8")
    with pytest.raises(UserError, match="no exported head"):
        curve_of(tmp_path)
    made = {"machine": {"cores": 2, "cpu": "chip", "gpus": []}, "commit": "c", "written": "then"}
    (tmp_path / "head" / "eyas.json").write_text(json.dumps({"provenance": made}), encoding="utf-8")
    curve = curve_of(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["taught_tokens"] == 9
    assert main([str(tmp_path / "none")]) == 2
    assert "no run whose training has finished" in capsys.readouterr().err
    assert curve.points == ({"step": 0, "tau": 1.0123, "tree_tau": 1.1},)
    assert (curve.recipe, curve.target, curve.machine) == ("mine", "some/target", "2 cores chip, no GPU")
    assert curve.settings == training_settings(load_recipe(str(tmp_path / "recipe.yaml")))
