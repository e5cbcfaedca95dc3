"""A whole run of an EAGLE-1 head on a tiny target: extracted, trained, saved, decoded, exported."""

import json
from pathlib import Path

import torch

from eyas.models.checkpoint import load_head
from eyas.models.eagle1 import Eagle1Head
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.prompt_sources import prompt_file_hash
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder


def test_an_eagle1_recipe_runs_from_synthesis_to_export(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    fields = tiny_recipe(
        model, tmp_path, head={"kind": "eagle1", "draft_vocab_size": None, "init": "random"},
        train={"steps": 40, "ttt_steps": 3, "validate_every": 20},
    )  # fmt: skip
    folder = tmp_path / "run"
    recipe = parse_recipe(fields, where="here")
    run_stages(recipe, folder, first="synthesize", last="export", reporter=Reporter())
    head = load_head(folder / "training" / "best", dtype=torch.float32)
    assert isinstance(head, Eagle1Head)
    results = RunFolder(folder).record("evaluate")["result"]["results"]
    greedy = [entry for entry in results if entry["temperature"] == 0 and entry["prompt_set"] == "all"]
    assert {entry["method"] for entry in greedy} == {"plain", "chain", "tree"}
    assert all(entry["identical_to_plain"] == entry["prompts"] for entry in greedy)
    assert max(entry["tau"] for entry in greedy) > 1.1
    card = json.loads((folder / "head" / "eyas.json").read_text())
    (source,) = recipe.evaluate.prompts
    assert card["evaluation_prompts"] == {source: prompt_file_hash(source)}
    readme = (folder / "head" / "README.md").read_text()
    assert '"method": "eagle"' in readme
    assert "--speculative-algorithm EAGLE " in readme
