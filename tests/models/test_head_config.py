"""What a head inherits from its target, by families of targets, and what is refused."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from transformers import AutoConfig

from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig, head_config_for
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
def test_mixture_of_experts_must_state_the_width_of_the_head(name: str) -> None:
    target = AutoConfig.for_model(name)
    with pytest.raises(UserError, match=rf"target {name} is a mixture of experts: .* set head\.intermediate_size"):
        config_for(target)
    if getattr(target, "rms_norm_eps", None):
        assert config_for(target, intermediate_size=777).intermediate_size == 777


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
    with pytest.raises(UserError, match=rf"the config of this {name} target has no {missing}, which an EAGLE-3 head"):
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
