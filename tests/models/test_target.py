"""Aux taps and rebuilt logits of the target: against the library, and against a residual stream known by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM

from eyas.data.feature_row import FeatureRow
from eyas.data.shard import Shard, encode_row, write_shard
from eyas.models.errors import UserError
from eyas.models.head_config import default_aux_layers
from eyas.models.target import Target, load_tokenizer, model_fingerprint
from eyas.tests.data.toys import spec_of
from eyas.tests.models.families import ODD_HEADS, SERVED, family_model
from eyas.tests.toys import byte_tokenizer, save_tiny_model, tiny_config, tiny_target

T = 23


def ids(count: int = T) -> Tensor:
    """Return random token ids of the tiny vocabulary."""
    return torch.randint(97, (count,))


def known_target(*, aux_layers: tuple[int, ...]) -> Target:
    """Return a target whose layer k adds the constant 10^k: attention and MLP answer with their biases alone."""
    model = LlamaForCausalLM(tiny_config(layers=4, attention_bias=True, mlp_bias=True))
    with torch.no_grad():
        for k, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.bias.fill_(0.25 * 10**k)
            layer.mlp.down_proj.bias.fill_(0.75 * 10**k)
        model.model.norm.weight.fill_(3.0)
    return Target(model, aux_layers=aux_layers)


def test_taps_hold_the_residual_stream_known_by_hand() -> None:
    target = known_target(aux_layers=(0, 1, 2, 3, 4))
    row = ids()
    embedded = target.embedding(row)
    out = target.forward(row[None])
    for k, (tap, added) in enumerate(zip(out.aux_hidden_BTF[0].chunk(5, -1), (0, 1, 11, 111, 1111), strict=True)):
        torch.testing.assert_close(tap, embedded + added, rtol=1e-6, atol=1e-4, msg=f"layer {k}")
    last = (embedded + 1111).double()
    by_hand = 3 * last / (last.square().mean(-1, keepdim=True) + target.config.rms_norm_eps).sqrt()
    torch.testing.assert_close(out.final_hidden_BTD[0], by_hand.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*SERVED, *ODD_HEADS])
def test_taps_equal_the_librarys_hidden_states(name: str) -> None:
    model = family_model(name)
    target = Target(model, aux_layers=(0, 1, 2, 3))
    row = ids()
    out = target.forward(row[None])
    hidden = model(input_ids=row[None], output_hidden_states=True, use_cache=False).hidden_states
    taps = out.aux_hidden_BTF.chunk(4, -1)
    for k in range(3):
        torch.testing.assert_close(taps[k], hidden[k], rtol=1e-5, atol=1e-5, msg=f"layer {k}")
    # The library's last entry is post-norm, the tap at L is not: the library's own norm leads from one to the other.
    norm = getattr(target.decoder, {"gpt2": "ln_f", "phi": "final_layernorm"}.get(name, "norm"))
    torch.testing.assert_close(norm(taps[3]), hidden[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.final_hidden_BTD, hidden[3], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(taps[3], hidden[3], atol=1e-2)


@pytest.mark.parametrize("name", [*SERVED, *ODD_HEADS])
def test_rebuilt_logits_equal_the_models_own(name: str) -> None:
    model = family_model(name)
    target = Target(model)
    row = ids()
    rebuilt = target.head.logits(target.forward(row[None]).final_hidden_BTD)
    torch.testing.assert_close(rebuilt, model(input_ids=row[None]).logits, rtol=1e-5, atol=1e-5)
    assert target.self_check(row) < 1e-5


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("cohere", {"logit_scale": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("gemma2", {"final_logit_softcapping": None}),
    ],
)
def test_a_head_that_forgets_scale_or_soft_cap_is_caught(name: str, plain: dict[str, Any]) -> None:
    target = Target(family_model(name))
    target.head = Target(family_model(name, **plain)).head
    with pytest.raises(UserError, match=rf"the {name} family scales its logits in a way that models/target_head\.py"):
        target.self_check(ids())


def test_the_head_has_the_bias_of_a_family_with_one() -> None:
    target = Target(family_model("phi"))
    assert target.head.bias_V is not None
    assert target.head.bias_V.abs().max() > 0.1
    rows = torch.tensor([5, 96, 0])
    final = torch.randn(4, 64)
    torch.testing.assert_close(target.head.rows(rows).logits(final), target.head.logits(final)[:, rows])


def test_tied_embeddings_are_the_head() -> None:
    target = Target(family_model("llama tied"))
    assert torch.equal(target.head.weight_VD, target.embedding.weight)
    untied = Target(family_model("llama"))
    assert not torch.equal(untied.head.weight_VD, untied.embedding.weight)


def test_self_check_raises_when_the_models_head_does_something_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    forward = target.model.forward

    def shifted(**inputs: Any) -> Any:
        out = forward(**inputs)
        out.logits = out.logits + torch.linspace(0, 1, out.logits.shape[-1])
        return out

    assert target.self_check(ids()) < 1e-5
    monkeypatch.setattr(target.model, "forward", shifted)
    with pytest.raises(UserError, match=r"teacher logits rebuilt .* differ from the model's own by \d\.\d\de-0\d"):
        target.self_check(ids())


def test_self_check_raises_on_nan() -> None:
    target = tiny_target()
    target.model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(UserError, match="differ from the model's own by nan"):
        target.self_check(ids())


def test_final_states_from_hooks_library_and_file_rebuild_the_logits(tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny_config(layers=4))
    with torch.no_grad():  # not one constant: a constant norm applied twice gives the same as once
        model.model.norm.weight.copy_(torch.linspace(1, 5, 40))
    target = Target(model, aux_layers=(0, 2, 4))
    row = ids()
    out = target.forward(row[None])
    truth = model(input_ids=row[None], output_hidden_states=True, use_cache=False)
    mask = torch.ones(T, dtype=torch.bool)
    aux, final = out.aux_hidden_BTF[0].clone(), out.final_hidden_BTD[0].clone()
    stored = FeatureRow("row", row, mask, aux, final, truth.logits[0].argmax(-1))
    spec = spec_of(target, final_at="everywhere")
    write_shard(tmp_path / "shard", [encode_row(stored, spec)], spec, measured={})
    read = Shard(tmp_path / "shard").row(0)
    pre_norm = read.aux_hidden_TF.chunk(3, -1)[2]
    sources = {
        "hooks": out.final_hidden_BTD[0],
        "library": truth.hidden_states[-1][0],
        "file": read.final_hidden_TD,
        "aux layer L of the file": model.model.norm(pre_norm),
    }
    for name, states in sources.items():
        torch.testing.assert_close(target.head.logits(states), truth.logits[0], rtol=0, atol=1e-4, msg=name)
    for twice_or_never in (model.model.norm(read.final_hidden_TD), pre_norm):
        assert (target.head.logits(twice_or_never) - truth.logits[0]).abs().max() > 0.1


def test_padding_behind_a_row_changes_nothing() -> None:
    target = tiny_target()
    row = ids()
    padded = torch.stack([torch.cat((row, ids(9))), ids(T + 9)])
    alone, batched = target.forward(row[None]), target.forward(padded)
    torch.testing.assert_close(batched.aux_hidden_BTF[:1, :T], alone.aux_hidden_BTF, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batched.final_hidden_BTD[:1, :T], alone.final_hidden_BTD, rtol=1e-4, atol=1e-4)


def test_taps_leave_no_hooks_behind_even_when_the_forward_fails() -> None:
    target = tiny_target(aux_layers=(0, 2, 5))
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[97]]))
    target.forward(ids()[None])
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)


def test_without_aux_layers_the_aux_states_are_empty() -> None:
    assert tiny_target(aux_layers=()).forward(ids()[None]).aux_hidden_BTF.shape == (1, T, 0)


@pytest.mark.parametrize("layers", [(0, 2, 6), (-1, 2, 3)])
def test_a_layer_outside_the_target_is_refused(layers: tuple[int, ...]) -> None:
    outside = next(k for k in layers if not 0 <= k <= 5)
    with pytest.raises(UserError, match=rf"^aux layer {outside} is out of range: this target has 5 layers.*from 0"):
        tiny_target(aux_layers=layers)


@pytest.mark.parametrize("layers", [(3, 2, 1), (1, 3, 3), (2, 1)])
def test_descending_or_repeated_layers_are_refused_with_the_right_order(layers: tuple[int, ...]) -> None:
    right = sorted(set(layers))
    with pytest.raises(UserError) as error:
        tiny_target(aux_layers=layers)
    assert str(error.value).endswith(f"distinct and ascending; write {right} in head.aux_layers.")


@pytest.mark.parametrize(("layers", "expected"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29))])
def test_default_aux_layers(layers: int, expected: tuple[int, ...]) -> None:
    assert default_aux_layers(layers) == expected


def test_default_aux_layers_that_would_collide_are_refused() -> None:
    with pytest.raises(UserError, match=r"collide on a target of 6 layers; name distinct layers between 0 and 6"):
        default_aux_layers(6)


def test_a_decoder_without_positions_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(UserError, match="mamba model takes no position_ids"):
        Target(model)


def test_a_folder_loads_as_target_and_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", layers=3, tie_word_embeddings=True)
    target = Target.load(str(folder), dtype=torch.float32, aux_layers=(0, 1, 3))
    row = torch.tensor(load_tokenizer(str(folder))("tied and whole").input_ids)
    assert row.tolist() == byte_tokenizer()("tied and whole").input_ids
    assert target.self_check(row) < 1e-5
    assert torch.equal(target.head.weight_VD, target.embedding.weight)
    assert all(not parameter.requires_grad for parameter in target.model.parameters())
    assert Target.load(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match=r"^cannot load target '.*' as a causal language model: "):
        Target.load(str(tmp_path), dtype=torch.float32)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", layers=1)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template; eyas trains heads for chat models"):
        load_tokenizer(str(folder))


def test_the_target_is_frozen_and_in_evaluation_mode() -> None:
    target = tiny_target(attention_dropout=0.5)
    row = ids()
    first, second = (target.forward(row[None]).final_hidden_BTD for _ in range(2))
    assert torch.equal(first, second)
    assert isinstance(target.embedding, nn.Embedding)
    assert not target.embedding.weight.requires_grad


def test_the_fingerprint_changes_with_config_tokenizer_and_weights(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    first = model_fingerprint(str(folder))
    assert model_fingerprint(str(save_tiny_model(tmp_path / "again"))) == first
    assert model_fingerprint(str(save_tiny_model(tmp_path / "other", seed=1))) != first  # same config, other weights
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\x00\x01\x02\x03")
    assert model_fingerprint(str(folder)) != first
    weights.write_bytes(whole)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert model_fingerprint(str(folder)) != first


def test_attention_that_takes_no_mask_is_refused_before_it_decodes() -> None:
    target = tiny_target()
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match=r"attends by 'flash_attention_2', which takes no mask .* sdpa or eager"):
        _ = target.attention_kinds


@pytest.mark.parametrize(("name", "expected"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_each_family_attends_in_the_way_it_can(name: str, expected: str, tmp_path: Path) -> None:
    """Soft-caps and sinks need eager attention; sdpa would refuse or forget them."""
    model = family_model(name)
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype=torch.float32)
    assert target.config._attn_implementation == expected
    row = ids()
    torch.testing.assert_close(
        target.head.logits(target.forward(row[None]).final_hidden_BTD), model(input_ids=row[None]).logits
    )
