"""A whole training stage on a tiny target: a head of two layers, chosen by its trees, and what the run says of it."""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from eyas.models.checkpoint import load_head
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def said_and_done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what a run printed, and its folder. Its two held-out rows are also those that are really decoded."""
    folder = tmp_path_factory.mktemp("run")
    fields = tiny_recipe(
        save_tiny_model(folder / "model"), folder, head={"num_layers": 2},
        train={
            "steps": 40, "ttt_steps": 3, "validate_every": 10, "validation_depth": 3, "best_by": "tree",
            "validation_tree": {"depth": 3, "top_k": 4, "num_draft_tokens": 10}, "decode_every": 2, "decode_prompts": 2,
        },
    )  # fmt: skip
    said = io.StringIO()
    with redirect_stderr(said):
        run_stages(parse_recipe(fields, where="here"), folder / "run", last="train", reporter=Reporter())
    return " ".join(said.getvalue().split()), folder / "run"


def test_really_decoding_the_held_out_rows_gives_what_replay_gave(said_and_done: tuple[str, Path]) -> None:
    _, folder = said_and_done
    lines = [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line["event"] == "validation"]
    decoded = [line for line in validations if "decoded_tau" in line]
    assert [line["step"] for line in decoded] == [0, 20, 40]
    for line in decoded:
        assert line["decoded_tau"] == pytest.approx(line["tau"])
        assert line["decoded_tree_tau"] == pytest.approx(line["tree_tau"])
    last = decoded[-1]
    assert last["tree_tau"] > last["tau"] > 1.1
    assert last["tree_tau"] > validations[0]["tree_tau"]
    for line in validations:
        assert 1 < line["sampled_tau"] < 4
        assert line["sampled_tau"] < line["sampled_tree_tau"] < 4
        assert len(line["alpha"]) == len(line["tree_survival"]) == len(line["sampled_survival"]) == 3
    steps = [line for line in lines if line["event"] == "step"]
    assert all(0 < line["utilisation"] < 1 for line in steps[5:])
    assert steps[-1]["seconds_left"] == 0


def test_the_best_head_is_the_one_with_the_best_trees(said_and_done: tuple[str, Path]) -> None:
    said, folder = said_and_done
    result = RunFolder(folder).record("train")["result"]
    taus = {point["step"]: point["tree_tau"] for point in result["history"]}
    assert result["best_by"] == "tree"
    assert result["best_step"] == max(taus, key=lambda step: (taus[step], -step))
    assert result["best_validation_tree_tau"] == max(taus.values())
    head = load_head(folder / "training" / "best", dtype=torch.float32)
    assert head.config.num_layers == 2
    assert "layers.1.self_attn.q_proj.weight" in head.state_dict()
    for words in (
        "note: 2 layers: SGLang, the original EAGLE code and llama.cpp cannot serve it",
        f"held-out tree tau {taus[0]:.3f} before training, {max(taus.values()):.3f} after",
        "; at T=1 ",
        "; decoded: chain ",
    ):
        assert words in said
