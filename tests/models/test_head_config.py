"""What a head inherits from its target, by families of targets, and what is refused."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eyas.models.engines import ENGINES, judge
from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig, head_config_for, head_remarks
from eyas.models.head_json import head_config_json
from eyas.tests.models.families import SERVED, family_config
from eyas.tests.toys import tiny_config

AUX = (0, 1, 3)
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "olmoe", "ernie4_5_moe", "aria_text"]
DENSE = [name for name in SERVED if name not in MIXTURES]


def config_for(target: Any, **fields: Any) -> HeadConfig:
    return head_config_for(target, **{"aux_layers": AUX, "draft_vocab_size": 61, **fields})


@pytest.mark.parametrize("name", DENSE)
def test_shape_rope_lengths_eps_and_activation_come_from_the_target(name: str) -> None:
    target = family_config(name, rms_norm_eps=3e-4)
    head = config_for(target)
    for field in ("hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size", "num_key_value_heads"):
        assert getattr(head, field) == getattr(target, field), field
    assert head.head_dim == (16 if "head_dim" in SERVED[name] else 10)
    assert head.rms_norm_eps == 3e-4
    assert head.hidden_act == ("gelu_pytorch_tanh" if name.startswith("gemma") else "silu")
    # Gemma 3 turns its two kinds of layers differently; the head attends to everything, as the full ones do.
    assert head.rope_parameters == target.rope_parameters.get("full_attention", target.rope_parameters)
    assert (head.target_hidden_size, head.target_num_layers, head.aux_layers) == (40, 3, AUX)
    assert head.aux_width == 120


def test_a_target_without_kv_heads_or_head_dim_shares_the_hidden_size_among_its_heads() -> None:
    target = tiny_config(head_dim=None, num_key_value_heads=None)
    del target.num_key_value_heads, target.head_dim
    head = config_for(target)
    assert (head.num_key_value_heads, head.head_dim) == (4, 10)


def test_the_first_of_several_end_tokens_is_kept() -> None:
    assert config_for(tiny_config(eos_token_id=[7, 2])).eos_token_id == 7
    assert config_for(tiny_config(eos_token_id=7)).eos_token_id == 7


def test_the_text_part_of_a_nested_config_is_read() -> None:
    nested = AutoConfig.for_model("llava", text_config=tiny_config().to_dict())
    assert config_for(nested) == config_for(tiny_config())


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_gives_the_head_what_one_token_passes_and_says_so(name: str) -> None:
    target = AutoConfig.for_model(name)
    head = config_for(target)
    assert head.intermediate_size >= 2 * target.hidden_size
    assert any("mixture of experts" in remark for remark in head_remarks(head, target))
    assert config_for(target, intermediate_size=777).intermediate_size == 777


def test_the_width_of_one_expert_is_not_the_heads() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_experts": 8, "vocab_size": 97, "pad_token_id": None}
    narrow = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=16, num_experts_per_tok=2, **shape)
    assert config_for(narrow).intermediate_size == 128  # two experts of 16 are narrower than the hidden size
    wide = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=48, num_experts_per_tok=4, **shape)
    assert config_for(wide).intermediate_size == 192
    remarks = head_remarks(config_for(narrow, intermediate_size=32), narrow)
    assert any("(32) is narrower than its hidden size (64)" in remark for remark in remarks)


def test_a_plain_head_needs_no_remark_and_an_odd_one_names_the_engines() -> None:
    assert head_remarks(config_for(tiny_config()), tiny_config()) == []
    odd = config_for(tiny_config(), aux_layers=(1, 4), norm_before_residual=True)
    remarks = " ".join(head_remarks(odd, tiny_config()))
    assert "2 aux layers: the original EAGLE code and llama.cpp read exactly 3" in remarks
    assert "SGLang does not implement it" in remarks


def test_the_engines_named_for_several_layers_are_those_that_refuse_them() -> None:
    deep = config_for(tiny_config(layers=8), num_layers=2, aux_layers=(2, 4, 5))
    (remark,) = head_remarks(deep, tiny_config(layers=8))
    verdicts = [judge(name, head_config_json(deep, dtype=torch.float32)) for name in ENGINES]
    assert {verdict.engine: not verdict.serves for verdict in verdicts} == {
        verdict.engine: verdict.engine.removeprefix("original ") in remark.partition(" cannot ")[0]
        for verdict in verdicts
    }
    plain = head_config_for(tiny_config(), kind="eagle1", num_layers=2)
    assert head_remarks(plain, tiny_config()) == []
    fields = head_config_json(plain, dtype=torch.float32)
    assert {name for name in ENGINES if judge(name, fields).serves} == {"vllm", "sglang", "eagle"}
    with pytest.raises(UserError, match=r"at least one layer, given head\.num_layers = 0"):
        config_for(tiny_config(), num_layers=0)


def test_rope_of_full_attention_is_taken_where_layer_types_have_their_own() -> None:
    target = AutoConfig.for_model("gemma3_text", rope_local_base_freq=123.0)
    head = config_for(target)
    assert head.rope_parameters == target.rope_parameters["full_attention"]
    assert head.hidden_act == "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("cohere", "rms_norm_eps"),
        ("phi", "rms_norm_eps"),
        ("starcoder2", "rms_norm_eps"),
        ("gpt2", "hidden_act or hidden_activation"),
        ("mamba", "num_attention_heads"),
    ],
)
def test_a_family_whose_block_the_head_cannot_copy_is_refused(name: str, missing: str) -> None:
    with pytest.raises(UserError, match=rf"the config of this {name} target has no {missing}, which a draft head"):
        config_for(AutoConfig.for_model(name), intermediate_size=64)


def test_norm_before_fc_and_fc_norm_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"norm_before_fc .* and fc_norm .* exclude each other; set at most one"):
        config_for(tiny_config(), norm_before_fc=True, fc_norm=True)
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    head = config_for(tiny_config(), **flags)
    assert {name: value for name, value in asdict(head).items() if value is True} == flags


@pytest.mark.parametrize("size", [0, -1, 98])
def test_a_draft_vocabulary_outside_the_targets_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=rf"draft vocabulary size {size} is not between 1 and .* 97; .* at most 97"):
        config_for(tiny_config(), draft_vocab_size=size)


def test_only_a_head_with_every_token_has_the_full_vocabulary() -> None:
    assert config_for(tiny_config(), draft_vocab_size=97).full_vocabulary
    assert not config_for(tiny_config(), draft_vocab_size=96).full_vocabulary


def test_aux_layers_are_checked_against_the_targets_depth() -> None:
    head = config_for(tiny_config())
    assert replace(head, aux_layers=(0, 5)).aux_width == 80
    with pytest.raises(UserError, match="aux layer 6 is out of range: this target has 5 layers"):
        replace(head, aux_layers=(0, 6))
    with pytest.raises(UserError, match="must be at least one layer"):
        replace(head, aux_layers=())
