"""The head's rotary angles against the target's own, for every kind of RoPE, and against angles worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, LlamaModel

from eyas.models.checkpoint import head_config_from_json
from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig, head_config_for
from eyas.models.head_json import head_config_json
from eyas.models.rope import build_rope, check_same_rope, rotate
from eyas.tests.toys import tiny_config, tiny_head, tiny_target

LENGTH = 16384
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": 16.0, "mscale": 0.7},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
}


def target_config(kind: str, *, theta: float = 30000.0) -> Any:
    parameters = {"rope_type": kind, "rope_theta": theta, **KINDS[kind]}
    return tiny_config(layers=1, max_position_embeddings=LENGTH, rope_parameters=parameters)


def config_for(target: Any) -> HeadConfig:
    return head_config_for(target, aux_layers=(0, 1), draft_vocab_size=61)


def angles(rope: Any, positions: list[int]) -> tuple[Tensor, Tensor]:
    return rope(torch.zeros(1), torch.tensor([positions]))


@pytest.mark.parametrize("positions", [[0, 63, 5000, LENGTH - 1], [0], [63], [5000], [LENGTH - 1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_angles_equal_the_targets_own(kind: str, positions: list[int]) -> None:
    config = target_config(kind)
    target = LlamaModel(config)
    head = config_for(config)
    torch.testing.assert_close(angles(build_rope(head), positions), angles(target.rotary_emb, positions))
    check_same_rope(build_rope(head), target, head)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_the_checkpoint(kind: str) -> None:
    head = config_for(target_config(kind))
    fields = head_config_json(head, dtype=torch.float32)
    again = head_config_from_json(fields, where="config.json")
    assert ("rope_scaling" in fields) == (kind != "default")
    assert fields["rope_theta"] == 30000.0
    positions = [0, 63, 5000, LENGTH - 1]
    torch.testing.assert_close(angles(build_rope(again), positions), angles(build_rope(head), positions))


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_default_and_linear_angles_by_hand(factor: float) -> None:
    cos, sin = angles(build_rope(config_for(target_config("linear" if factor > 1 else "default"))), [0, 63, 5000])
    frequencies = 30000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    by_hand = torch.tensor([0.0, 63.0, 5000.0], dtype=torch.float64)[:, None] / factor * frequencies
    # Single precision is exact to about 6e-8 of the angle: 3e-4 of a radian at position 5000.
    torch.testing.assert_close(cos[0].double(), by_hand.cos().repeat(1, 2), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin[0].double(), by_hand.sin().repeat(1, 2), rtol=0, atol=5e-4)


def test_rotation_turns_halves_against_each_other() -> None:
    quarter = torch.full((1, 1, 4), torch.pi / 2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    turned = rotate(x, quarter.cos(), quarter.sin())
    torch.testing.assert_close(turned.flatten(), torch.tensor([-3.0, -4.0, 1.0, 2.0]))


@pytest.mark.parametrize("other", [k for k in KINDS if k != "default"])
def test_a_head_that_turns_otherwise_than_its_target_is_caught(other: str) -> None:
    target, head = LlamaModel(target_config("default")), config_for(target_config(other))
    if other == "dynamic":  # equal to the default until its first length is exceeded
        check_same_rope(build_rope(head), target, head)
        head = config_for(target_config("default", theta=30010.0))
    with pytest.raises(UserError, match=r"the head's rotary (cos|sin) differs from the target's \(\{"):
        check_same_rope(build_rope(head), target, head)


def test_angles_stay_exact_when_the_head_is_cast_to_half_precision() -> None:
    config = tiny_config(max_position_embeddings=LENGTH)
    head = tiny_head(tiny_target(max_position_embeddings=LENGTH))
    exact = angles(build_rope(config_for(config)), [5000, LENGTH - 1])
    for cast in (head.bfloat16(), head.half(), head.to(dtype=torch.float32, device="cpu")):
        torch.testing.assert_close(angles(cast.rope, [5000, LENGTH - 1]), exact, rtol=0, atol=0)
        assert cast.rope.inv_freq.dtype == torch.float32
    assert head.bfloat16().fc.weight.dtype == torch.bfloat16


def test_an_unknown_type_is_refused_with_the_nearest_one() -> None:
    head = replace(config_for(tiny_config()), rope_parameters={"rope_type": "yran", "rope_theta": 1e4})
    with pytest.raises(UserError, match=r"unknown RoPE type 'yran'; known types are default, .*Did you mean 'yarn'\?"):
        build_rope(head)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_a_partly_rotated_head_dim_turns_as_the_target_does(kind: str, factor: float) -> None:
    parameters = {"rope_type": kind, "rope_theta": 3e4, **KINDS[kind], "partial_rotary_factor": factor}
    config = AutoConfig.for_model(
        "glm", hidden_size=40, num_attention_heads=4, head_dim=16, num_hidden_layers=1, rope_parameters=parameters,
        max_position_embeddings=LENGTH, pad_token_id=None,
    )  # fmt: skip
    head = config_for(config)
    target = AutoModel.from_config(config)
    cos, sin = angles(build_rope(head), [0, 63, 5000])
    assert cos.shape[-1] == int(16 * factor)
    torch.testing.assert_close((cos, sin), angles(target.rotary_emb, [0, 63, 5000]))
    check_same_rope(build_rope(head), target, head)
    x = torch.randn(1, 4, 3, 16)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., cos.shape[-1] :], x[..., cos.shape[-1] :])
    torch.testing.assert_close(turned[..., : cos.shape[-1]], rotate(x[..., : cos.shape[-1]], cos, sin))


def test_the_rope_of_full_attention_is_compared_where_layer_types_have_their_own() -> None:
    config = AutoConfig.for_model(
        "gemma3_text", hidden_size=40, num_attention_heads=4, head_dim=16, num_hidden_layers=6, vocab_size=97,
        intermediate_size=56, num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=None,
    )  # fmt: skip
    target, head = AutoModel.from_config(config), config_for(config)
    check_same_rope(build_rope(head), target, head)
    local = replace(head, rope_parameters=config.rope_parameters["sliding_attention"])
    with pytest.raises(UserError, match="differs from the target's"):
        check_same_rope(build_rope(local), target, local)
