"""Twenty-odd ways a head's folder gets broken in the wild: load, export and doctor each refuse it by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.checkpoint import load_head
from eyas.models.errors import UserError
from eyas.models.export import EXPORTS, export_head
from eyas.models.head_checks import check_files
from eyas.models.head_files import read_head_files
from eyas.tests.models.native_heads import SERVING, save_native, target_and_head
from eyas.tests.toys import save_tiny_model
from eyas.train.head_doctor import check_head_folder
from eyas.train.progress import Reporter

Config, Tensors = dict[str, Any], dict[str, Tensor]
Change = Callable[[Config, Tensors], object]


def swap(name: str, new: str) -> Change:
    return lambda _config, tensors: tensors.update({new: tensors.pop(name)})


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda _config, tensors: tensors.update({name: make(tensors[name])})


def say(**fields: Any) -> Change:
    return lambda config, _tensors: config.update(fields)


def forget(*names: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        for name in names:
            config.pop(name, None)
            tensors.pop(name, None)

    return change


def nested(**fields: Any) -> Change:
    return lambda config, _tensors: config["eagle_config"].update(fields)


def unsorted(d2t_U: Tensor) -> Tensor:
    ids = torch.arange(len(d2t_U)) + d2t_U
    ids[[4, 5]] = ids[[5, 4]]
    return ids - torch.arange(len(d2t_U))


def repeated(d2t_U: Tensor) -> Tensor:
    ids = torch.arange(len(d2t_U)) + d2t_U
    ids[5] = ids[4]
    return ids - torch.arange(len(d2t_U))


CORRUPTIONS: dict[str, tuple[Change, str]] = {
    "map zero": (put("d2t", torch.zeros_like), "d2t is all zeros"),
    "map shifted": (put("d2t", lambda t: t + 1), "outside the target's|d2t and t2d name different tokens"),
    "map repeated": (put("d2t", repeated), "ascend without repeats"),
    "map unsorted": (put("d2t", unsorted), "ascend without repeats"),
    "map missing": (forget("d2t"), r"tensors missing \['d2t'\]"),
    "mask missing": (forget("t2d"), r"tensors missing \['t2d'\]"),
    "mask of another head": (put("t2d", lambda t: t.roll(1)), "d2t and t2d name different tokens"),
    "map of int32": (put("d2t", lambda t: t.int()), "d2t is int32"),
    "lm_head missing": (forget("lm_head.weight"), r"tensors missing \['lm_head.weight'\]"),
    "lm_head of the target": (put("lm_head.weight", lambda t: torch.randn(97, 40)), r"lm_head.weight \(97, 40\)"),
    "bias true": (say(bias=True), "bias is true: vLLM and SGLang then expect attention biases"),
    "attention bias true": (say(attention_bias=True), "attention_bias is true"),
    "tied": (say(tie_word_embeddings=True), "tie_word_embeddings is true: SGLang"),
    "ids missing at the top": (
        forget("eagle_aux_hidden_state_layer_ids"), "has no 'eagle_aux_hidden_state_layer_ids'",
    ),
    "ids missing in eagle_config": (
        lambda config, _: config["eagle_config"].pop("eagle_aux_hidden_state_layer_ids"), "it says None",
    ),
    "SGLang's ids at the top": (say(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), r"\[1, 3, 4\] at the top level"),
    "vLLM's ids in eagle_config": (
        nested(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), r"eagle_config must say \[1, 3, 4\]",
    ),
    "both ids shifted": (
        lambda config, _: (
            config.update(eagle_aux_hidden_state_layer_ids=[3, 5, 6]),
            config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
        ),
        r"aux_layers is \[3, 5, 6\] in config.json, but the head was trained with \[2, 4, 5\]",
    ),
    "one norm flag flipped": (say(norm_output=True), "norm_output is True at the top level and False in eagle_config"),
    "the other place flipped": (nested(fc_norm=True), "fc_norm is False at the top level and True in eagle_config"),
    "flag flipped in both": (
        lambda config, _: (
            config.update(norm_before_residual=True), config["eagle_config"].update(norm_before_residual=True),
        ),
        "norm_before_residual is True in config.json, but the head was trained with False",
    ),
    "exclusive flags": (
        lambda config, _: [p.update(norm_before_fc=True, fc_norm=True) for p in (config, config["eagle_config"])],
        "norm_before_fc and fc_norm are both true",
    ),
    "tensor renamed": (
        swap("midlayer.hidden_norm.weight", "model.midlayer.hidden_norm.weight"),
        r"missing \['midlayer.hidden_norm.weight'\], unknown \['model.midlayer.hidden_norm.weight'\]",
    ),
    "extra tensor": (lambda _, t: t.update({"fc.bias": torch.zeros(40)}), r"unknown \['fc.bias'\]"),
    "wrong dtype": (put("norm.weight", lambda t: t.half()), "norm.weight is float16"),
    "dtype of the config": (say(torch_dtype="bfloat16"), "config.json and the map's rule say bfloat16"),
    "not finite": (put("fc.weight", lambda t: t * float("nan")), "fc.weight holds values that are not finite"),
    "wrong theta": (say(rope_theta=20000.0), "rope_parameters is .*20000.0.* but the head was trained with"),
    "another rope": (say(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_parameters is .*linear"),
    "max positions 2048": (say(max_position_embeddings=2048), "max_position_embeddings is 2048 .* trained with 512"),
    "quantised": (say(quantization_config={"quant_method": "fp8"}), "quantization_config was copied from the target"),
    "two layers": (say(num_hidden_layers=2), "num_layers is 2 in config.json, but the head was trained with 1"),
    "null": (say(pad_token_id=None), "pad_token_id is null"),
    "null inside": (nested(use_aux_hidden_state=None), "eagle_config.use_aux_hidden_state is null"),
    "text for a number": (say(num_key_value_heads="2"), "num_key_value_heads is '2'"),
    "head_dim of hidden / heads": (say(head_dim=10), r"head_dim is 10|self_attn.q_proj.weight \(64, 80\) instead of"),
    "no draft size": (forget("draft_vocab_size"), "has no 'draft_vocab_size'"),
    "a plain Llama": (say(architectures=["LlamaForCausalLM"]), "is no draft head that eyas loads"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target") / "model")


def corrupted(folder: Path, change: Change) -> Path:
    save_native(target_and_head()[1], folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_there_are_enough_of_them_and_the_untouched_head_passes(tmp_path: Path) -> None:
    assert len(CORRUPTIONS) >= 20
    folder = corrupted(tmp_path / "head", lambda _config, _tensors: None)
    assert {check.status for check in check_files(read_head_files(folder))} == {"ok"}
    load_head(folder, dtype=torch.float32)
    export_head(folder, "vllm", tmp_path / "out", serving=SERVING)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_load_names_it(name: str, tmp_path: Path) -> None:
    change, sentence = CORRUPTIONS[name]
    with pytest.raises(UserError, match=sentence):
        load_head(corrupted(tmp_path / "head", change), dtype=torch.float32)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_export_names_it_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    change, sentence = CORRUPTIONS[name]
    folder = corrupted(tmp_path / "head", change)
    for format_name in (name for name, export in EXPORTS.items() if export.method == "eagle3"):
        with pytest.raises(UserError, match=sentence):
            export_head(folder, format_name, tmp_path / "out", serving=SERVING)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_doctor_names_it(name: str, tmp_path: Path, target: Path) -> None:
    change, sentence = CORRUPTIONS[name]
    folder = corrupted(tmp_path / "head", change)
    report = check_head_folder(str(folder), str(target), decode=False, reporter=Reporter(quiet=True))
    assert report.failed
    import re

    said = " ".join(check.detail for check in report.checks if check.status == "failed")
    assert re.search(sentence, said) or name == "a plain Llama", said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "eyas.json"])
def test_a_truncated_file_is_named_by_all_three(name: str, tmp_path: Path, target: Path) -> None:
    folder = save_native(target_and_head()[1], tmp_path / "head")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot read a head from"):
        load_head(folder, dtype=torch.float32)
    with pytest.raises(UserError, match="cannot read a head from"):
        export_head(folder, "vllm", tmp_path / "out", serving=SERVING)
    report = check_head_folder(str(folder), str(target), decode=False, reporter=Reporter(quiet=True))
    assert report.failed
    assert "cannot read" in report.checks[0].detail
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_card_of_a_later_schema_names_both(tmp_path: Path) -> None:
    folder = save_native(target_and_head()[1], tmp_path / "head")
    card = json.loads((folder / "eyas.json").read_text())
    (folder / "eyas.json").write_text(json.dumps({**card, "schema": 9}))
    with pytest.raises(UserError, match=r"has schema 9; this eyas reads 1 and 2"):
        load_head(folder, dtype=torch.float32)


def test_a_head_of_the_first_schema_still_loads(tmp_path: Path) -> None:
    head = target_and_head()[1]
    folder = save_native(head, tmp_path / "head")
    card = json.loads((folder / "eyas.json").read_text())
    (folder / "eyas.json").write_text(json.dumps({**card, "schema": 1}))
    assert torch.equal(load_head(folder, dtype=torch.float32).fc.weight, head.fc.weight)
