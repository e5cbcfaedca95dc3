"""The train stage's own decisions: which rows are used, which tokens can be drafted, how the head begins."""

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.inference.draft import DynamicTree
from eyas.models.checkpoint import save_head
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.errors import UserError
from eyas.models.export import EXPORTS, export_head
from eyas.models.target import Target
from eyas.tests.models.families import family_model
from eyas.tests.models.native_heads import SERVING
from eyas.tests.toys import byte_tokenizer, save_tiny_model, tiny_head, tiny_target
from eyas.tests.train.rows import corpus_row, objective, random_row
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.context import RunContext
from eyas.train.losses import LossMix
from eyas.train.new_head import build_head, objective_plan, usable_rows
from eyas.train.objective import ObjectivePlan
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder
from eyas.train.slot_weights import SlotWeighting
from eyas.train.stage_train import loop_plan, step_note
from eyas.train.vocabulary import choose_vocabulary


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


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_head_begins_as_the_recipe_says(model: Path, tmp_path: Path, init: str) -> None:
    run = context(
        model, tmp_path, head={"init": init, "draft_vocab_size": 100, "aux_layers": [1, 4, 8], "fc_norm": True}
    )
    target = run.load_target("float32", tapped=True)
    rows = [corpus_row("a", "train", [0], list(range(1, 8)))]
    vocabulary, _ = choose_vocabulary(run, rows, target.vocab_size)
    head = build_head(run, target, vocabulary)
    assert (head.config.aux_layers, head.config.fc_norm, head.config.draft_vocab_size) == ((1, 4, 8), True, 100)
    assert torch.equal(head.to_target_ids(torch.arange(100)), vocabulary.token_ids_U)
    of_target = target.head.rows(vocabulary.token_ids_U).weight_VD
    assert torch.equal(head.lm_head.weight, of_target) == (init == "target")
    assert torch.equal(head.embed(torch.arange(8)[None]), target.embedding(torch.arange(8)[None]))


@pytest.mark.parametrize(("kind", "scale"), [("eagle1", 6.32456), ("eagle3", 1.0)])
def test_an_eagle1_head_keeps_the_scale_of_its_targets_embeddings(kind: str, scale: float, tmp_path: Path) -> None:
    family_model("gemma2", vocab_size=258, num_hidden_layers=8).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    run = context(tmp_path / "model", tmp_path, head={"kind": kind, "draft_vocab_size": "full", "init": "target"})
    head = build_head(run, run.load_borrowed(), DraftVocabulary.full(258))
    assert head.config.embedding_scale == scale


def test_every_setting_of_the_loop_comes_from_the_train_section(model: Path, tmp_path: Path) -> None:
    section = {
        "steps": 11, "accumulate": 2, "line_length": 123, "lines_per_batch": 3, "batching": "padded",
        "learning_rate": 0.5, "betas": [0.1, 0.2], "weight_decay": 0.3, "warmup_steps": 4, "floor": 0.6, "clip": 7.0,
        "validate_every": 8, "checkpoint_every": 9, "validation_depth": 6, "best_by": "tree", "decode_every": 5,
        "seed": 10,
    }  # fmt: skip
    plan = loop_plan(context(model, tmp_path, train=section))
    expected = {**section, "betas": (0.1, 0.2), "packed": False, "validation_tree": DynamicTree(3, 4, 8)}
    del expected["batching"]
    assert {name: getattr(plan, name) for name in expected} == expected
    packed = {"batching": "packed", "validation_tree": {"depth": 2, "top_k": 3, "num_draft_tokens": 5}}
    assert loop_plan(context(model, tmp_path, train=packed)).packed
    assert loop_plan(context(model, tmp_path, train=packed)).validation_tree == DynamicTree(2, 3, 5)


def test_every_setting_of_the_objective_comes_from_the_train_section(model: Path, tmp_path: Path) -> None:
    section = {
        "loss": {"kl": 0.5, "lk": 0.25}, "ttt_steps": 2, "step_weights": [1.0, 0.3], "keep_oov": True,
        "supervise": "all", "normalisation": "sequence", "pace": 0.5, "align_top_k": 8, "start_floor": 0.1,
        "feature_noise": 0.2, "attention": "dense", "recompute": True,
    }  # fmt: skip
    assert objective_plan(context(model, tmp_path, train=section)) == ObjectivePlan(
        loss=LossMix((("kl", 0.5), ("lk", 0.25))),
        step_weights=(1.0, 0.3),
        keep_oov=True,
        everywhere=True,
        normalisation="sequence",
        weighting=SlotWeighting(pace=0.5, top_k=8, start_floor=0.1),
        feature_noise=0.2,
        attention="dense",
        recompute=True,
    )


def test_the_default_objective_is_that_of_the_kind_of_head(model: Path, tmp_path: Path) -> None:
    eagle3 = objective_plan(context(model, tmp_path))
    assert (eagle3.loss, eagle3.feature_weight) == (LossMix((("kl", 1.0),)), 0.0)
    assert eagle3.step_weights == tuple(0.8**step for step in range(7))
    eagle1 = objective_plan(context(model, tmp_path, head={"kind": "eagle1", "draft_vocab_size": None}))
    assert (eagle1.loss, eagle1.feature_weight) == (LossMix((("kl", 0.1),)), 1.0)


def test_a_head_goes_on_from_a_trained_one_with_another_vocabulary(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"aux_layers": [1, 4, 8], "draft_vocab_size": 100}
    run = context(model, tmp_path, head=shape)
    target = run.load_target("float32", tapped=True)
    first = DraftVocabulary(torch.arange(100), target.vocab_size)
    trained = build_head(run, target, first)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_head(trained, tmp_path / "trained", metadata={}, dtype=torch.float32)
    again = context(model, tmp_path, head={**shape, "init": str(tmp_path / "trained")})
    second = DraftVocabulary(torch.arange(60, 160), target.vocab_size)
    head = build_head(again, target, second)
    assert "which can draft 40.0% of this draft vocabulary" in capsys.readouterr().err
    for name, tensor in trained.state_dict().items():
        if name not in ("d2t", "t2d", "lm_head.weight"):
            assert torch.equal(head.state_dict()[name], tensor), name
    assert torch.equal(head.to_target_ids(torch.arange(100)), torch.arange(60, 160))
    assert torch.equal(head.lm_head.weight[:40], trained.lm_head.weight[60:])
    assert torch.equal(head.lm_head.weight[40:], target.head.weight_VD[100:160])


@pytest.mark.parametrize("layout", ["speculators", "eagle", "foreign", "binary"])
def test_a_head_goes_on_from_one_in_another_layout(
    model: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"aux_layers": [2, 4, 5], "draft_vocab_size": 100, "init": "random"}
    run = context(model, tmp_path, head=shape)
    target = run.load_target("float32", tapped=True)
    vocabulary = DraftVocabulary(torch.arange(20, 120), target.vocab_size)
    trained = build_head(run, target, vocabulary)
    save_head(trained, tmp_path / "native", metadata={}, dtype=torch.float32)
    folder = tmp_path / "published"
    if layout in EXPORTS:
        export_head(tmp_path / "native", layout, folder, serving=SERVING)
    else:  # nobody's card, and no layer ids
        folder.mkdir()
        fields = json.loads((tmp_path / "native" / "config.json").read_text())
        named = {name: fields[name] for name in fields if "layer_ids" not in name and name != "eagle_config"}
        (folder / "config.json").write_text(json.dumps(named))
        if layout == "binary":
            torch.save(load_file(tmp_path / "native" / "model.safetensors"), folder / "pytorch_model.bin")
        else:
            shutil.copy(tmp_path / "native" / "model.safetensors", folder)
    again = context(model, tmp_path, head={**shape, "init": str(folder)})
    head = build_head(again, target, vocabulary)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert "which can draft 100.0% of this draft vocabulary" in capsys.readouterr().err
    if layout not in EXPORTS:
        silent = context(model, tmp_path, head={**shape, "aux_layers": [], "init": str(folder)})
        with pytest.raises(UserError, match=r"cannot be used as it is.*which layers it reads.*head\.aux_layers, or"):
            build_head(silent, target, vocabulary)


def test_training_is_done_anew_when_the_head_it_goes_on_from_is_another(model: Path, tmp_path: Path) -> None:
    shape = {"aux_layers": [1, 4, 8], "draft_vocab_size": 100}
    run = context(model, tmp_path, head=shape)
    target = run.load_target("float32", tapped=True)
    vocabulary = DraftVocabulary(torch.arange(100), target.vocab_size)
    keys = []
    for init in ("target", "random"):
        run = context(model, tmp_path, head={**shape, "init": init})
        save_head(build_head(run, target, vocabulary), tmp_path / "trained", metadata={}, dtype=torch.float32)
        again = context(model, tmp_path, head={**shape, "init": str(tmp_path / "trained")})
        keys.append(again.fingerprints)
    assert keys[0]["extract"] == keys[1]["extract"]
    assert keys[0]["train"] != keys[1]["train"]


def test_a_trained_head_of_another_shape_or_no_folder_is_refused(model: Path, tmp_path: Path) -> None:
    run = context(model, tmp_path, head={"aux_layers": [1, 4, 8], "draft_vocab_size": 100})
    target = run.load_target("float32", tapped=True)
    vocabulary = DraftVocabulary(torch.arange(100), target.vocab_size)
    save_head(build_head(run, target, vocabulary), tmp_path / "trained", metadata={}, dtype=torch.float32)
    folder = str(tmp_path / "trained")
    other = context(
        model, tmp_path,
        head={"aux_layers": [1, 4, 8], "draft_vocab_size": 100, "norm_output": True, "init": folder},
    )  # fmt: skip
    with pytest.raises(UserError, match=r"the head in head\.init has norm_output False, this recipe's head True"):
        build_head(other, target, vocabulary)
    lost = context(model, tmp_path, head={"draft_vocab_size": 100, "init": "trgaet"})
    with pytest.raises(UserError, match=r"head\.init 'trgaet' is neither target, random nor a trained head"):
        build_head(lost, target, vocabulary)


def test_compiling_takes_the_mlp_and_leaves_names_as_they_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    run = context(model, tmp_path, head={"draft_vocab_size": 100, "aux_layers": [1, 4, 8]}, train={"compile": True})
    target = run.load_target("float32", tapped=True)
    head = build_head(run, target, DraftVocabulary(torch.arange(100), target.vocab_size))
    assert compiled == ["GatedMLP"]
    assert "midlayer.mlp.up_proj.weight" in head.state_dict()


def test_the_progress_says_how_fast_it_is_and_when_it_will_be_done() -> None:
    values = {"loss": 2.5, "epoch": 1.25, "tokens_per_second": 812.4, "utilisation": 0.437, "seconds_left": 90}
    soon = datetime.now() + timedelta(seconds=90)
    said = step_note(values)
    assert said.startswith("loss 2.500, epoch 1.2, 812 tok/s (44% of the machine's products), done at ")
    assert said.endswith(f"done at {soon:%H:%M}") or soon.date() != datetime.now().date() or soon.second == 0
    later = datetime.now() + timedelta(days=3)
    assert step_note({**values, "seconds_left": 3 * 86400}).endswith(f" on {later:%d %b}")


def test_a_full_draft_vocabulary_has_no_map_and_a_small_target_no_more_than_its_own(
    model: Path, tmp_path: Path
) -> None:
    full = context(model, tmp_path, head={"draft_vocab_size": "full"})
    assert full.head_config.full_vocabulary
    vocabulary, coverage = choose_vocabulary(full, [], 258)
    assert vocabulary.token_ids_U.tolist() == list(range(258))
    assert coverage == {"train": 1.0, "validation": 1.0}
    target = full.load_target("float32", tapped=True)
    assert {"d2t", "t2d"}.isdisjoint(build_head(full, target, vocabulary).state_dict())
    assert context(model, tmp_path, head={"draft_vocab_size": None}).head_config.draft_vocab_size == 258
