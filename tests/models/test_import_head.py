"""Published heads of every layout, made from a native one by hand: same bytes, same logits, or the right question."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from eyas.models.checkpoint import head_files, head_from_files
from eyas.models.errors import UserError
from eyas.models.export import same_tensors
from eyas.models.head_files import HeadFiles
from eyas.models.head_layout import FLAGS
from eyas.models.import_head import Answers, Imported, import_head
from eyas.models.target import Target
from eyas.models.target_facts import TargetFacts
from eyas.tests.models.native_heads import DEFAULT_LAYERS, LAYERS, drafted, eagle1_files, target_and_head
from eyas.tests.toys import tiny_config

IDS, GUESSES = [5, 17, 2, 61, 33], [11]
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size", "draft_vocab_size", "eos_token_id",
)  # fmt: skip


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(layers=LAYERS)).save_pretrained(folder)
    return TargetFacts.of(str(folder))


def native(**fields: Any) -> tuple[Target, HeadFiles]:
    target, head = target_and_head(**fields)
    return target, head_files(head, metadata={}, dtype=torch.float32)


def publish(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, binary: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def sizes(files: HeadFiles) -> dict[str, Any]:
    return {name: files.fields[name] for name in SIZES if name in files.fields}


def renamed(files: HeadFiles, old: str, new: str) -> dict[str, Tensor]:
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in files.tensors.items()
    }


def original(files: HeadFiles, facts: TargetFacts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The original code's own: midlayer.*, embeddings and inv_freq in the file, no ids, no flags."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "bias": False}
    extra = {"embed_tokens.weight": facts.embedding(), "midlayer.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    return {**config, **sizes(files)}, {**files.tensors, **extra}


def specforge(files: HeadFiles, facts: TargetFacts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SpecForge and SGLang: midlayer.*, both maps, ids in eagle_config, one less."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False,
        "rope_scaling": None, "use_cache": True, "target_model_type": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    }  # fmt: skip
    return {**config, **sizes(files)}, dict(files.tensors)


def speculators(files: HeadFiles, facts: TargetFacts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """speculators: layers.0.*, the layer's config nested, ids as vLLM counts, embeddings in the file."""
    layer = {name: value for name, value in sizes(files).items() if name != "draft_vocab_size"}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/target"}},
        "draft_vocab_size": files.fields["draft_vocab_size"], "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(DEFAULT_LAYERS), "target_hidden_size": 40,
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **layer},
    }  # fmt: skip
    return config, {**renamed(files, "midlayer.", "layers.0."), "embed_tokens.weight": facts.embedding()}


def modelopt(files: HeadFiles, facts: TargetFacts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """NVIDIA Model-Optimizer: layers.0.*, an int32 d2t without t2d, ids in eagle_config, nulls left in."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "use_cache": None, "mlp_bias": False,
        "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = renamed(files, "midlayer.", "layers.0.")
    del tensors["t2d"]
    return {**config, **sizes(files)}, {**tensors, "d2t": tensors["d2t"].int()}


PUBLISHERS = {"original": original, "specforge": specforge, "speculators": speculators, "modelopt": modelopt}
ANSWERS = {
    "original": Answers(aux_layers=DEFAULT_LAYERS),
    "specforge": Answers(aux_layers=DEFAULT_LAYERS),
    "speculators": Answers(),
    "modelopt": Answers(aux_layers=DEFAULT_LAYERS),
}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_a_published_head_becomes_the_native_one(
    publisher: str, binary: bool, facts: TargetFacts, tmp_path: Path
) -> None:
    target, files = native()
    folder = publish(tmp_path / "head", *PUBLISHERS[publisher](files, facts), binary=binary)
    imported = import_head(folder, target=facts, answers=ANSWERS[publisher])
    assert same_tensors(imported.files.tensors, files.tensors)
    assert imported.files.fields == files.fields
    ours, theirs = (head_from_files(f, dtype=torch.float32) for f in (files, imported.files))
    for a, b in zip(drafted(target, ours, IDS, GUESSES), drafted(target, theirs, IDS, GUESSES), strict=True):
        assert torch.equal(a, b)


def notes(imported: Imported) -> str:
    return " | ".join(imported.notes)


def test_what_was_decided_is_said(facts: TargetFacts, tmp_path: Path) -> None:
    _, files = native()
    first = import_head(
        publish(tmp_path / "a", *original(files, facts), binary=True), target=facts, answers=ANSWERS["original"]
    )
    assert "read pytorch_model.bin, an eagle3 head in the midlayer layout" in notes(first)
    assert "left out midlayer.self_attn.rotary_emb.inv_freq" in notes(first)
    assert "its embeddings equal the target's and were left out" in notes(first)
    assert "norm_before_residual was not written; every engine then reads false" in notes(first)
    second = import_head(publish(tmp_path / "b", *modelopt(files, facts)), target=facts, answers=ANSWERS["modelopt"])
    assert "d2t was int32 and is int64 now" in notes(second)
    assert "t2d was not written and was derived from d2t" in notes(second)


@pytest.mark.parametrize(
    ("publisher", "question"),
    [
        (
            "original",
            r"it does not say which layers it reads; say them with --aux-layers.*\(the usual three are 2,4,5\)",
        ),
        ("specforge", r"\[1, 3, 4\] stand in eagle_config alone, where SGLang reads layers 2,4,5 and vLLM reads 1,3,4"),
        ("modelopt", r"eagle_config alone"),
    ],
)
def test_missing_layer_ids_are_asked_for(publisher: str, question: str, facts: TargetFacts, tmp_path: Path) -> None:
    folder = publish(tmp_path / "head", *PUBLISHERS[publisher](native()[1], facts))
    with pytest.raises(UserError, match=question):
        import_head(folder, target=facts, answers=Answers())


def test_a_missing_flag_is_asked_for_where_readers_disagree(facts: TargetFacts, tmp_path: Path) -> None:
    config, tensors = speculators(native(norm_before_residual=True)[1], facts)
    del config["norm_before_residual"]
    folder = publish(tmp_path / "head", config, tensors)
    with pytest.raises(UserError, match=r"norm_before_residual is not written.*--flag norm_before_residual=true"):
        import_head(folder, target=facts, answers=Answers())
    answered = import_head(folder, target=facts, answers=Answers(flags={"norm_before_residual": True}))
    assert answered.files.fields["norm_before_residual"] is True
    assert answered.files.fields["eagle_config"]["norm_before_residual"] is True


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_read_from_either_place(flag: str, facts: TargetFacts, tmp_path: Path) -> None:
    _, files = native(**{flag: True})
    for number, where in enumerate(("top", "nested")):
        config, tensors = specforge(files, facts)
        (config if where == "top" else config["eagle_config"])[flag] = True
        folder = publish(tmp_path / str(number), config, tensors)
        imported = import_head(folder, target=facts, answers=ANSWERS["specforge"])
        assert imported.files.fields == files.fields
    config["eagle_config"][flag], config[flag] = True, False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{flag} is said to be both true and false"):
        import_head(folder, target=facts, answers=ANSWERS["specforge"])


def test_a_map_of_ids_is_understood_by_its_mask_and_asked_for_without(facts: TargetFacts, tmp_path: Path) -> None:
    _, files = native()
    ids = torch.arange(61) + files.tensors["d2t"]
    config, tensors = specforge(files, facts)
    folder = publish(tmp_path / "with", config, {**tensors, "d2t": ids})
    imported = import_head(folder, target=facts, answers=ANSWERS["specforge"])
    assert same_tensors(imported.files.tensors, files.tensors)
    assert "d2t held target ids, not offsets" in notes(imported)
    few = dict(tensors, d2t=torch.arange(0, 40, 2), **{"lm_head.weight": torch.zeros(20, 40)})
    del few["t2d"]
    config["draft_vocab_size"] = 20
    folder = publish(tmp_path / "open", config, few)
    with pytest.raises(UserError, match=r"d2t could be offsets or target ids; say --map offsets or --map ids"):
        import_head(folder, target=facts, answers=ANSWERS["specforge"])
    imported = import_head(folder, target=facts, answers=replace(ANSWERS["specforge"], map_kind="ids"))
    assert imported.files.tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 40, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"embed_tokens.weight": torch.randn(97, 40)}), "differ from the target's"),
        (lambda t: t.update({"fc.bias": torch.ones(40)}), "fc.bias is not zero, and engines disagree"),
        (lambda t: [t.pop("d2t"), t.pop("t2d")], "has neither d2t nor t2d"),
        (lambda t: t.pop("lm_head.weight"), "has no lm_head.weight; vLLM would draft wrong ids"),
        (lambda t: t.update({"t2d": t["t2d"].roll(1)}), "d2t and t2d name different tokens"),
        (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}), "q_norm.weight"),
        (lambda t: t.pop("fc.weight"), "holds no EAGLE head"),
        (lambda t: t.update({"fc.weight": torch.randn(40, 100)}), "no multiple of the target's hidden size 40"),
        (lambda t: t.update({"fc.weight": torch.randn(40, 80)}), "3 layers are named, but fc reads 2 states"),
    ],
)
def test_an_unusable_head_is_refused_by_name(change: Any, message: str, facts: TargetFacts, tmp_path: Path) -> None:
    config, tensors = specforge(native()[1], facts)
    change(tensors)
    with pytest.raises(UserError, match=message):
        import_head(publish(tmp_path / "head", config, tensors), target=facts, answers=ANSWERS["specforge"])


def test_a_pickle_that_would_run_code_is_refused(facts: TargetFacts, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (print, ("ran",))

    folder = publish(tmp_path / "head", specforge(native()[1], facts)[0], {})
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}, protocol=2))
    with pytest.raises(UserError, match="loaded without running code"):
        import_head(folder, target=facts, answers=Answers())


def test_what_a_config_copied_from_the_target_does_not_reach_the_native_head(
    facts: TargetFacts, tmp_path: Path
) -> None:
    _, files = native()
    config, tensors = specforge(files, facts)
    config |= {"bias": True, "tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}
    imported = import_head(publish(tmp_path / "head", config, tensors), target=facts, answers=ANSWERS["specforge"])
    assert imported.files.fields == files.fields
    for name in ("bias", "tie_word_embeddings", "quantization_config"):
        assert name in notes(imported)


def test_a_head_of_several_layers_keeps_them_and_names_those_that_are_not_there(
    facts: TargetFacts, tmp_path: Path
) -> None:
    config, tensors = speculators(native()[1], facts)
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    answers = ANSWERS["speculators"]
    with pytest.raises(UserError, match=r"tensors missing \['layers.1.input_layernorm.weight', "):
        import_head(publish(tmp_path / "torn", config, tensors), target=facts, answers=answers)
    plain = {name: t for name, t in tensors.items() if name.startswith("layers.0.") and "hidden_norm" not in name}
    for name, tensor in plain.items():
        reads = tensor[:, :40] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else tensor
        tensors[name.replace("layers.0.", "layers.1.")] = reads.clone()
    files = import_head(publish(tmp_path / "head", config, tensors), target=facts, answers=answers).files
    assert files.fields["num_hidden_layers"] == 2
    assert torch.equal(files.tensors["layers.1.mlp.up_proj.weight"], tensors["layers.0.mlp.up_proj.weight"])


def test_a_whole_vocabulary_head_loses_its_map_and_borrows_the_targets_head(facts: TargetFacts, tmp_path: Path) -> None:
    _, files = native(draft_vocab_size=97)
    config, tensors = specforge(files, facts)
    tensors |= {"d2t": torch.zeros(97, dtype=torch.int64), "t2d": torch.ones(97, dtype=torch.bool)}
    first = import_head(publish(tmp_path / "a", config, tensors), target=facts, answers=ANSWERS["specforge"])
    assert same_tensors(first.files.tensors, files.tensors)
    del tensors["lm_head.weight"]
    second = import_head(publish(tmp_path / "b", config, tensors), target=facts, answers=ANSWERS["specforge"])
    assert torch.equal(second.files.tensors["lm_head.weight"], facts.output_rows())


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_an_original_eagle1_head_becomes_native(binary: bool, facts: TargetFacts, tmp_path: Path) -> None:
    files = eagle1_files()
    tensors = {**files.tensors, "embed_tokens.weight": facts.embedding()}
    del tensors["fc.bias"]
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": False, **sizes(files)}
    imported = import_head(publish(tmp_path / "head", config, tensors, binary=binary), target=facts, answers=Answers())
    assert same_tensors(imported.files.tensors, files.tensors)
    assert imported.files.fields == files.fields
    assert "fc.bias of zeros was added" in notes(imported)


@pytest.mark.parametrize("name", ["layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"])
def test_an_eagle1_head_with_tensors_engines_drop_is_refused(name: str, facts: TargetFacts, tmp_path: Path) -> None:
    files = eagle1_files()
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, **sizes(files)}
    folder = publish(tmp_path / "head", config, {**files.tensors, name: torch.ones(40)})
    with pytest.raises(UserError, match=rf"unknown \['{name}'\]"):
        import_head(folder, target=facts, answers=Answers())
