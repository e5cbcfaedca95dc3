"""Targets found by structure, through wrappers with pictures; quantised ones; and ones placed by a device map."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    LlamaForCausalLM,
    LlavaConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2VLConfig,
)

from eyas.models.errors import UserError
from eyas.models.head_config import head_config_for
from eyas.models.target import Target, model_fingerprint
from eyas.models.target_loading import (
    find_decoder,
    load_model,
    own_quantization,
    plain_weight,
    quantization_of,
    takes_pictures,
)
from eyas.tests.toys import save_tiny_model, tiny_config

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def gemma3() -> PreTrainedConfig:
    return Gemma3Config(
        text_config={**TEXT, "sliding_window": 64}, vision_config=EYES, mm_tokens_per_image=4, image_token_index=90
    )


def llava() -> PreTrainedConfig:
    eyes = {**EYES, "model_type": "clip_vision_model", "projection_dim": 32}
    return LlavaConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=eyes, image_token_index=90)


def mistral3() -> PreTrainedConfig:
    eyes = {**EYES, "model_type": "pixtral"}
    return Mistral3Config(text_config={**TEXT, "model_type": "mistral"}, vision_config=eyes, image_token_index=90)


def qwen2_vl() -> PreTrainedConfig:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    eyes = {"depth": 3, "embed_dim": 32, "num_heads": 4, "hidden_size": 64, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config={**TEXT, "hidden_size": 64, "rope_parameters": rope}, vision_config=eyes)


WRAPPERS = {config.__name__: config for config in (gemma3, llava, mistral3, qwen2_vl)}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_with_as_many_vision_layers_is_seen_through(name: str, tmp_path: Path) -> None:
    config = WRAPPERS[name]()
    loader = AutoModelForCausalLM if name == "gemma3" else AutoModelForImageTextToText
    loader.from_config(config).float().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype=torch.float32, aux_layers=(0, 1, 2))
    assert target.config.num_hidden_layers == len(target.layers) == 3
    assert "vision" not in type(target.decoder).__name__.lower()
    ids = torch.randint(3, 80, (2, 11))
    out = target.forward(ids)
    hidden = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for k, tap in enumerate(out.aux_hidden_BTF.chunk(3, -1)):
        torch.testing.assert_close(tap, hidden[k], rtol=1e-5, atol=1e-5)
    assert target.self_check(ids[0]) < 1e-5


def test_targets_that_read_pictures_are_told_from_those_that_do_not(folder: Path, tmp_path: Path) -> None:
    for name, config in WRAPPERS.items():
        config().save_pretrained(tmp_path / name)
    assert [takes_pictures(str(tmp_path / name)) for name in WRAPPERS] == [True] * len(WRAPPERS)
    assert not takes_pictures(str(folder))


def test_layers_that_cannot_be_told_are_refused_with_the_lists_that_were_found() -> None:
    model = LlamaForCausalLM(tiny_config())
    model.model.layers = model.model.layers[:4]
    model.model.extra = nn.ModuleList([nn.Identity()] * 2)
    with pytest.raises(
        UserError, match=r"5 decoder layers of a llama model: 0 lists .* model\.layers \(4\), model\.ext"
    ):
        find_decoder(model)
    twice = LlamaForCausalLM(tiny_config())
    twice.model.others = nn.ModuleList(nn.Identity() for _ in range(5))
    with pytest.raises(UserError, match=r"2 lists of that many stand beside its input embedding"):
        Target(twice)


def test_the_layers_are_found_under_any_name() -> None:
    model = LlamaForCausalLM(tiny_config())
    layers = model.model.layers
    model.model.blocks = layers
    del model.model.layers
    decoder, found = find_decoder(model)
    assert decoder is model.model
    assert found is layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=96)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_device_map_changes_no_state(folder: Path, device_map: str | dict[str, int | str]) -> None:
    ids = torch.randint(200, (2, 9))
    placed = Target.load(str(folder), dtype=torch.float32, aux_layers=(1, 2, 4), device_map=device_map)
    plain = Target.load(str(folder), dtype=torch.float32, aux_layers=(1, 2, 4))
    assert torch.equal(placed.forward(ids).aux_hidden_BTF, plain.forward(ids).aux_hidden_BTF)
    assert torch.equal(placed.forward(ids).final_hidden_BTD, plain.forward(ids).final_hidden_BTD)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_asked_attention_is_used(folder: Path, attention: str) -> None:
    model: Any = load_model(str(folder), dtype=torch.float32, attention=attention)
    assert model.config._attn_implementation == attention


def test_int8_weights_are_close_and_the_head_stays_as_it_is(folder: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    ids = torch.randint(200, (2, 9))
    plain = Target.load(str(folder), dtype=torch.float32, aux_layers=(1, 2, 4))
    target = Target.load(str(folder), dtype=torch.float32, aux_layers=(1, 2, 4), quantization="int8")
    layer: Any = target.layers[0]
    assert isinstance(layer.mlp.up_proj.weight, torchao.Int8Tensor)
    assert target.self_check(ids[0]) < 1e-5
    assert torch.equal(target.head.weight_VD, plain.head.weight_VD)
    exact, rounded = plain.forward(ids).aux_hidden_BTF, target.forward(ids).aux_hidden_BTF
    assert 0.001 < float((exact - rounded).norm() / exact.norm()) < 0.2
    error = (plain_weight(layer.mlp.up_proj) - plain.layers[0].mlp.up_proj.weight).abs().max()  # type: ignore[union-attr, operator]
    assert 0 < float(error) < 0.02
    assert target.pack(rows=4).forward(ids).aux_hidden_BTF.equal(rounded)  # quantised layers are left as they are


def test_a_head_for_a_quantised_target_has_no_quantisation() -> None:
    config = tiny_config(quantization_config={"quant_method": "fp8"})
    assert own_quantization(config) == "fp8"
    head = head_config_for(config, aux_layers=(1, 2, 4), draft_vocab_size=61)
    assert not any("quant" in name for name in head.__dict__)


def test_a_quantised_checkpoint_is_named_and_not_quantised_again(folder: Path, tmp_path: Path) -> None:
    assert quantization_of(str(folder), "none") == "none"
    assert quantization_of(str(folder), "int8") == "int8"
    config = tiny_config(quantization_config={"quant_method": "awq", "bits": 4})
    config.save_pretrained(tmp_path)
    assert quantization_of(str(tmp_path), "none") == "awq"
    with pytest.raises(UserError, match=r"is quantised already \(awq\); set target.quantization to none"):
        Target.load(str(tmp_path), dtype=torch.float32, quantization="int8")


def test_without_torchao_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match=r"int8 needs torchao: pip install 'eyas\[quantization\]'"):
        Target.load(str(folder), dtype=torch.float32, quantization="int8")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_weights_that_mean_nothing_without_their_scales_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"keeps its weight as {dtype}"):
        plain_weight(SimpleNamespace(weight=torch.zeros(2, 2).to(dtype)))
    with pytest.raises(UserError, match="keeps its weight in a packed form"):
        plain_weight(SimpleNamespace(qweight=1))


def test_a_hub_target_is_told_apart_by_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = []
    for revision in ("a1", "b2", "a1"):
        config = SimpleNamespace(_commit_hash=revision)
        monkeypatch.setattr("eyas.models.target.AutoConfig.from_pretrained", lambda _, config=config: config)
        prints.append(model_fingerprint("owner/name"))
    assert prints[0] == prints[2] != prints[1]
