"""The train stage's own decisions: which rows are used, which tokens can be drafted, how the head begins."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.toys import save_tiny_model, tiny_head, tiny_target
from eyas.tests.train.rows import feature_row, objective, random_row
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.context import RunContext
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder
from eyas.train.stage_train import build_head, choose_vocabulary, loop_plan, token_counts, usable_rows


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def context(model: Path, folder: Path, **changes: dict[str, Any]) -> RunContext:
    recipe = parse_recipe(tiny_recipe(model, folder, **changes), where="here")
    return RunContext(recipe, RunFolder(folder / "run"), Reporter())


def test_rows_without_a_slot_are_left_out_and_counted(
    target: Target, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = random_row(target, "good", prompt=4, reply=9, seed=0)
    single = random_row(target, "single", prompt=4, reply=1, seed=1)
    run = context(model, tmp_path)
    module = objective(target, tiny_head(target))
    assert usable_rows(run, module, [single, good, single]).rows([0]) == [good]
    assert capsys.readouterr().err.startswith("  left out 2 of 3 rows without slots (replies of a single token, ")
    assert usable_rows(run, module, [good]).rows([0]) == [good]
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"none of the 1 training rows has a slot to train"):
        usable_rows(run, module, [single])


def test_only_generated_tokens_are_counted(target: Target) -> None:
    row = feature_row(target, "row", [9, 9, 9, 5, 6, 6, 2, 9], [(3, 5), (6, 6)])
    counts_V = token_counts([row, row], target.vocab_size)
    assert {token: int(counts_V[token]) for token in counts_V.nonzero().squeeze(-1).tolist()} == {5: 2, 6: 4, 2: 2}
    assert len(counts_V) == target.vocab_size


def test_the_draft_vocabulary_holds_what_training_rows_say_and_the_end_of_turn(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = context(model, tmp_path, head={"draft_vocab_size": 4})
    target = run.load_target("float32", tapped=True)
    training = [feature_row(target, "a", [60, 61, 62, 62, 63, 63, 63, 64], [(1, 7)])]
    validation = [feature_row(target, "b", [60, 63, 64, 64, 61], [(1, 4)])]
    vocabulary, coverage = choose_vocabulary(run, target, training, validation)
    assert vocabulary.token_ids_U.tolist() == [61, 62, 63, 257]  # 64 was as frequent as 61; 257 ends a turn
    assert coverage == {"train": pytest.approx(6 / 7), "validation": pytest.approx(2 / 4)}
    assert "4 of 258 tokens, covering 85.71% of generated train tokens, 50.00%" in capsys.readouterr().err


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_head_begins_as_the_recipe_says(model: Path, tmp_path: Path, init: str) -> None:
    run = context(
        model, tmp_path, head={"init": init, "draft_vocab_size": 100, "aux_layers": [1, 4, 8], "fc_norm": True}
    )
    target = run.load_target("float32", tapped=True)
    rows = [feature_row(target, "a", list(range(8)), [(1, 7)])]
    vocabulary, _ = choose_vocabulary(run, target, rows, rows)
    head = build_head(run, target, vocabulary)
    assert (head.config.aux_layers, head.config.fc_norm, head.config.draft_vocab_size) == ((1, 4, 8), True, 100)
    assert torch.equal(head.to_target_ids(torch.arange(100)), vocabulary.token_ids_U)
    of_target = target.head.rows(vocabulary.token_ids_U).weight_VD
    assert torch.equal(head.lm_head.weight, of_target) == (init == "target")
    assert torch.equal(head.embed(torch.arange(8)[None]), target.embedding(torch.arange(8)[None]))


def test_every_setting_of_the_loop_comes_from_the_train_section(model: Path, tmp_path: Path) -> None:
    section = {
        "steps": 11, "accumulate": 2, "line_length": 123, "lines_per_batch": 3, "batching": "padded",
        "learning_rate": 0.5, "betas": [0.1, 0.2], "weight_decay": 0.3, "warmup_steps": 4, "floor": 0.6, "clip": 7.0,
        "validate_every": 8, "checkpoint_every": 9, "validation_depth": 6, "seed": 10,
    }  # fmt: skip
    plan = loop_plan(context(model, tmp_path, train=section))
    expected = {**section, "betas": (0.1, 0.2), "packed": False}
    del expected["batching"]
    assert {name: getattr(plan, name) for name in expected} == expected
    assert loop_plan(context(model, tmp_path, train={"batching": "packed"})).packed
