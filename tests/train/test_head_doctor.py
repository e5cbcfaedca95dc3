"""`eyas doctor HEAD`: a sound head passes; another target, tokenizer, template or rope is named; foreign heads too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from eyas.models.checkpoint import save_head
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.export import export_head
from eyas.models.feature_fingerprint import feature_distances, feature_fingerprint, fixed_prompt
from eyas.models.head_config import head_config_for
from eyas.models.import_head import Answers
from eyas.models.target import Target, load_tokenizer, model_fingerprint
from eyas.models.target_checks import tokenizer_fingerprint
from eyas.models.warm_start import init_from_target
from eyas.tests.models.native_heads import SERVING
from eyas.tests.toys import byte_tokenizer, save_tiny_model
from eyas.train.head_doctor import HeadReport, check_head_folder
from eyas.train.progress import Reporter

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = Target.load(str(model), dtype=torch.float32, aux_layers=LAYERS)
    tokenizer = load_tokenizer(str(model))
    head = Eagle3Head(head_config_for(target.config, aux_layers=LAYERS, draft_vocab_size=target.vocab_size))
    init_from_target(head, target, DraftVocabulary.full(target.vocab_size))
    folder = tmp_path_factory.mktemp("head") / "head"
    card = {
        "target": str(model), "target_fingerprint": model_fingerprint(str(model)), "target_quantisation": None,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer), "chat_template": tokenizer.chat_template,
        "template_arguments": {}, "features": feature_fingerprint(target, fixed_prompt(tokenizer)),
    }  # fmt: skip
    save_head(head, folder, metadata=card, dtype=torch.float32)
    return folder


def doctor(head: Path, target: Path, *, decode: bool = False, answers: Answers | None = None) -> HeadReport:
    return check_head_folder(str(head), str(target), decode=decode, answers=answers, reporter=Reporter(quiet=True))


def failures(report: HeadReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if check.status == "failed"}


def changed_target(model: Path, folder: Path, **fields: Any) -> Path:
    """Save the target with another config and the same weights."""
    config = AutoModelForCausalLM.from_pretrained(model).config
    for name, value in fields.items():
        setattr(config, name, value)
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(AutoModelForCausalLM.from_pretrained(model).state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_a_sound_head_passes_every_check_and_is_decoded(head: Path, model: Path) -> None:
    report = doctor(head, model, decode=True)
    assert {c.name: c.status for c in report.checks if c.status not in ("ok",)} in ({}, {"acceptance": "failed"})
    names = [check.name for check in report.checks]
    for name in (
        "vocabulary map",
        "RoPE",
        "features",
        "tokenizer",
        "chat template",
        "target quantisation",
        "positions",
    ):
        assert name in names
    assert report.acceptance["rounds"] > 0
    assert {v.engine: v.serves for v in report.verdicts} == {
        "vLLM": True, "SGLang": True, "original EAGLE code": True, "llama.cpp": True,
    }  # fmt: skip
    assert json.loads(json.dumps(report.as_dict()))["failed"] is report.failed


@pytest.mark.parametrize("name", ["eagle", "speculators", "sglang"])
def test_an_export_of_ours_is_judged_like_the_native_head(name: str, head: Path, model: Path, tmp_path: Path) -> None:
    export_head(head, name, tmp_path / "out", serving=SERVING)
    assert failures(doctor(tmp_path / "out", model)) == {}


def test_a_fine_tune_or_a_rotated_target_is_refused_by_its_states(head: Path, model: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(model)
    rotation = torch.linalg.qr(torch.randn(40, 40)).Q
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight @ rotation)
    other.save_pretrained(tmp_path / "rotated")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "rotated")
    report = doctor(head, tmp_path / "rotated", decode=True)
    assert "states differ from those the head was trained on" in failures(report)["features"]
    assert report.acceptance == {}
    assert next(check for check in report.checks if check.name == "target files").status == "warning"


def test_half_precision_is_no_other_target(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    exact = feature_fingerprint(
        Target.load(str(model), dtype=torch.float32, aux_layers=LAYERS), fixed_prompt(tokenizer)
    )
    assert exact["values"].keys() == {"aux 2", "aux 4", "aux 5", "final"}
    coarse = Target.load(str(model), dtype=torch.bfloat16, aux_layers=LAYERS)
    distances = feature_distances(exact, coarse)
    assert 0 < max(distances.values()) < 0.08
    unlike = Target.load(str(model), dtype=torch.float32, aux_layers=(2, 4, 6))
    assert feature_distances(exact, unlike)["aux 5"] == float("inf")


@pytest.mark.parametrize(
    ("fields", "check", "sentence"),
    [
        ({"max_position_embeddings": 1024}, "positions", "max_position_embeddings is 512, the target has 1024"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "RoPE",
            "rotary cos differs from the target's",
        ),
    ],
)  # fmt: skip
def test_a_target_whose_positions_differ_is_named(
    fields: dict[str, Any], check: str, sentence: str, head: Path, model: Path, tmp_path: Path
) -> None:
    target = changed_target(model, tmp_path / "target", **fields)
    assert sentence in failures(doctor(head, target))[check]


def test_a_target_of_other_sizes_is_named_before_it_is_loaded(head: Path, tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "target", layers=9, head_dim=20)
    found = failures(doctor(head, target))
    assert "number of layers 8 of the head is 9 in the target" in found["target sizes"]
    assert "head_dim 16 of the head is 20 in the target" in found["target sizes"]


def test_another_tokenizer_and_another_template_are_named(head: Path, model: Path, tmp_path: Path) -> None:
    target = changed_target(model, tmp_path / "target")
    byte_tokenizer(
        "{% for m in messages %}{{ '<|a|>' + m['content'] + '<|b|>' }}{% endfor %}", specials=("<|a|>", "<|b|>")
    ).save_pretrained(target)
    found = failures(doctor(head, target))
    assert "its ids mean other tokens" in found["tokenizer"]
    assert "not the template it was trained with" in found["chat template"]


def test_a_quantised_target_is_a_note_that_names_both(head: Path, model: Path, tmp_path: Path) -> None:
    card = json.loads((head / "eyas.json").read_text())
    folder = tmp_path / "head"
    folder.mkdir()
    for path in head.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    card["target_quantisation"] = {"quant_method": "fp8"}
    (folder / "eyas.json").write_text(json.dumps(card))
    note = next(check for check in doctor(folder, model).checks if check.name == "target quantisation")
    assert note.status == "warning"
    assert note.detail == "trained against {'quant_method': 'fp8'}, this target has plain weights"


def test_a_head_without_a_card_is_judged_by_what_it_has(head: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((head / name).read_bytes())
    report = doctor(folder, model)
    assert not report.failed
    assert {c.name for c in report.checks if c.status == "skipped"} == {
        "target quantisation", "tokenizer", "chat template", "target files", "features",
    }  # fmt: skip


def test_a_foreign_head_is_imported_in_memory_and_its_questions_are_findings(
    head: Path, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
    config = json.loads((head / "config.json").read_text())
    for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
        del config[name]
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    assert "does not say which layers it reads" in failures(doctor(folder, model))["files"]
    assert failures(doctor(folder, model, answers=Answers(aux_layers=LAYERS))) == {}
