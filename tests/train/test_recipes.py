"""Every bundled recipe: planned on its target's public config, and run dry on a tiny copy of that architecture."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from eyas.models.checkpoint import load_head
from eyas.models.head_config import default_aux_layers
from eyas.tests.recipe_table import DOCS, markdown, plan_of, planned, write_domain
from eyas.tests.recipe_targets import TARGETS, TINY_LAYERS
from eyas.tests.train.tiny_run import write_prompts
from eyas.train.pipeline import run_stages
from eyas.train.plan import advice, human
from eyas.train.progress import Reporter
from eyas.train.recipe import Recipe
from eyas.train.recipe_io import bundled_recipes, load_recipe
from eyas.train.stage_evaluate import COST_AWARE

RECIPES = bundled_recipes()
FAMILY_OF = {name: (target.text["model_type"], target.template) for name, target in TARGETS.items()}
FIRST = {family: name for name, family in reversed(FAMILY_OF.items())}.values()
TREE_TAUS: list[float] = []  # of the recipes run dry so far
LARGE = [name for name in RECIPES if TARGETS[name].parameters > 1e9]


@pytest.mark.parametrize("name", ["smollm2-eagle1", "smollm2-eagle3.1", "smollm2-lk"])
def test_heads_that_are_compared_are_trained_and_measured_on_the_same(name: str) -> None:
    recipe, plain = load_recipe(name), load_recipe("smollm2-eagle3")
    assert (recipe.synthesize, recipe.extract, recipe.evaluate) == (plain.synthesize, plain.extract, plain.evaluate)
    budget = ("steps", "epochs", "line_length", "lines_per_batch", "accumulate")
    assert all(getattr(recipe.train, key) == getattr(plain.train, key) for key in budget)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_counts_target_and_head_as_published(name: str) -> None:
    plan, target = planned(name), TARGETS[name]
    facts = plan.facts
    assert facts.weight_file == 0
    assert facts.target.parameters == target.parameters
    assert facts.head.parameters == target.head
    assert plan.refusals == ()
    if facts.recipe.head.kind == "eagle3":
        assert facts.head_config.aux_layers == default_aux_layers(target.layers)


@pytest.mark.parametrize("name", LARGE)
def test_a_machine_too_small_for_the_target_is_refused_with_advice(name: str) -> None:
    plan = plan_of(name, "plan.memory=12GB")
    refused = [sentence.split()[1] for sentence in plan.refusals]
    assert {"synthesize", "evaluate"} <= set(refused)
    assert all("but 12.0 GB may be used" in sentence for sentence in plan.refusals)
    assert "No smaller setting of the recipe fits" in advice(plan)
    assert f"weights alone take {human(2 * TARGETS[name].parameters)}" in advice(plan)


def test_the_table_in_the_documentation_is_what_the_plans_say() -> None:
    assert markdown() in DOCS.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model per family, for all recipes that name it."""
    saved: dict[tuple[str, str], Path] = {}
    for name, family in FAMILY_OF.items():
        if family not in saved:
            saved[family] = TARGETS[name].save_tiny(tmp_path_factory.mktemp("models") / family[0])
    return {name: saved[family] for name, family in FAMILY_OF.items()}


def shrunk(name: str, model: Path, folder: Path) -> Recipe:
    """Return a bundled recipe with its sizes taken down, and nothing else of it changed."""
    whole = load_recipe(name)
    values: dict[str, Any] = {
        "target.model": str(model), "target.device": "cpu",
        "synthesize.validation": 2, "synthesize.max_prompt_tokens": 144, "synthesize.max_reply_tokens": 16,
        "synthesize.batch": 8, "synthesize.dtype": "float32",
        "extract.tokens_per_batch": 256, "extract.dtype": "float32",
        "train.ttt_steps": 3, "train.line_length": 160, "train.lines_per_batch": 1, "train.accumulate": 1,
        "train.warmup_steps": 1, "train.validate_every": 3, "train.checkpoint_every": 4, "train.steps": 6,
        "evaluate.max_new_tokens": 10, "evaluate.sampled_prompts": 1, "evaluate.dtype": "float32",
        "evaluate.chain": "{depth: 3}", "evaluate.tree": "{depth: 3, top_k: 3, num_draft_tokens: 7}",
    }  # fmt: skip
    if whole.train.epochs:
        values["train.epochs"] = 2
    if whole.head.kind == "eagle3":
        values |= {"head.draft_vocab_size": 150, "head.aux_layers": "[]"}
    if whole.head.intermediate_size:
        values["head.intermediate_size"] = 48
    if whole.synthesize.self_prompts:  # of recipes that share a tiny target only the first lets it write prompts
        few = 12 if not whole.synthesize.prompts else 4 if name in FIRST else 0
        values |= {"synthesize.self_prompts": few, "synthesize.self_prompt_tokens": 96}
        values["synthesize.self_heldout"] = min(1, few)
    settings = [f"{key}={value}" for key, value in values.items()]
    folder.mkdir()
    if name == "smollm2-domain":
        return load_recipe(name, [*settings, *write_domain(folder, rows=5, words=4)])
    if whole.synthesize.prompts:
        settings.append(f"synthesize.prompts=[{write_prompts(folder / 'train.jsonl', 'train', 4)}]")
    settings.append(f"evaluate.prompts=[{write_prompts(folder / 'eval.jsonl', 'eval', 2)}]")
    return load_recipe(name, settings)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures empty: half of the time of a tiny run goes into drawing, which other tests look at."""

    from matplotlib.figure import Figure

    def savefig(figure: Figure, target: Any, **settings: Any) -> None:
        if isinstance(target, str | Path):
            Path(target).touch()

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_to_its_end_on_a_tiny_target_of_its_architecture(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    recipe, folder = shrunk(name, models[name], tmp_path / "recipe"), tmp_path / "run"
    summary = run_stages(recipe, folder, reporter=Reporter(quiet=True))
    assert all(stage["finished"] for stage in summary["stages"].values())
    layers = default_aux_layers(TINY_LAYERS) if recipe.head.kind == "eagle3" else ()
    assert tuple(summary["results"]["extract"]["aux_layers"]) == layers

    trained = summary["results"]["train"]
    steps = [point["step"] for point in trained["history"]]
    assert (steps[0], steps[-1]) == (0, trained["steps"])
    assert trained["steps"] >= 3
    assert all(point["tau"] >= 1 for point in trained["history"])
    assert trained["best_validation_tau"] == max(point["tau"] for point in trained["history"])

    greedy = [entry for entry in summary["results"]["evaluate"]["results"] if entry["temperature"] == 0]
    cost_aware = set() if recipe.evaluate.auto is None else {COST_AWARE}
    assert {entry["method"] for entry in greedy} == {"plain", "chain", "tree", *cost_aware}
    for entry in greedy:
        assert entry["identical_to_plain"] == entry["prompts"], entry["differences"]
    (tree,) = (entry for entry in greedy if (entry["method"], entry["prompt_set"]) == ("tree", "all"))
    TREE_TAUS.append(tree["tau"])

    head = load_head(folder / "head", dtype=torch.float32)
    assert head.config.aux_layers == layers
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(head.config, flag) == getattr(recipe.head, flag)
    card = json.loads((folder / "head" / "eyas.json").read_text())
    assert card["template_arguments"] == recipe.target.template_arguments


def test_of_the_heads_run_dry_most_are_accepted_now_and_then() -> None:
    assert median(TREE_TAUS or [math.inf]) > 1.1
