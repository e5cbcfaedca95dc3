"""One step of an EAGLE-1 head against its equations (contracts section 2), written out in fp64 without torch.nn."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Tensor

from eyas.models.eagle1 import Eagle1Head
from eyas.models.embedding_scale import with_embedding_scale
from eyas.models.errors import UserError
from eyas.models.head_config import head_config_for
from eyas.models.heads import HEADS, new_head
from eyas.models.target import Target
from eyas.models.ttt_attention import TTTContext
from eyas.models.warm_start import init_from_target, init_random
from eyas.tests.models.families import family_model
from eyas.tests.models.test_eagle3 import norm, rotated
from eyas.tests.toys import tiny_config, tiny_eagle1, tiny_target

T, D, HEADS_, KV, DIM = 7, 40, 4, 2, 16


def by_hand(head: Eagle1Head, target: Target, final_TD: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return (next feature, logits) of one causal step from position 0."""
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    eps, theta = head.config.rms_norm_eps, head.config.rope_parameters["rope_theta"]
    embedded = target.embedding.weight[tokens].double()
    x = torch.cat((embedded, final_TD.double()), -1) @ w["fc.weight"].T
    q, k, v = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    heads = []
    for h in range(HEADS_):
        g = h // (HEADS_ // KV)
        q_h = rotated(q[:, h * DIM : (h + 1) * DIM], list(range(T)), theta)
        k_h = rotated(k[:, g * DIM : (g + 1) * DIM], list(range(T)), theta)
        v_h = v[:, g * DIM : (g + 1) * DIM]
        heads.append(
            torch.stack([((q_h[t] @ k_h[: t + 1].T) / sqrt(DIM)).softmax(-1) @ v_h[: t + 1] for t in range(T)])
        )
    h1 = x + torch.cat(heads, -1) @ w["layers.0.self_attn.o_proj.weight"].T
    m = norm(h1, w["layers.0.post_attention_layernorm.weight"], eps)
    gate = m @ w["layers.0.mlp.gate_proj.weight"].T
    up = m @ w["layers.0.mlp.up_proj.weight"].T
    o = h1 + (gate * torch.sigmoid(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    return o, o @ target.head.weight_VD.double().T


def test_a_step_equals_the_equations() -> None:
    target = tiny_target(aux_layers=())
    head = tiny_eagle1(target)
    with torch.no_grad():
        head.layers[0].post_attention_layernorm.weight.uniform_(0.5, 2.0)
    final, tokens = torch.randn(T, D), torch.randint(97, (T,))
    feature, logits = by_hand(head, target, final, tokens.tolist())
    context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
    with torch.no_grad():
        fused = head.fuse(head.states(torch.zeros(1, T, 0), final[None]))
        out, drafted = head.step(fused, tokens[None], torch.arange(T)[None], context)
    torch.testing.assert_close(out[0].double(), feature, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafted[0].double(), logits, rtol=1e-4, atol=1e-3)


def test_the_tensors_are_those_the_engines_load() -> None:
    head = tiny_eagle1(tiny_target(aux_layers=()))
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == {
        "fc.weight": (40, 80),
        "layers.0.self_attn.q_proj.weight": (64, 40),
        "layers.0.self_attn.k_proj.weight": (32, 40),
        "layers.0.self_attn.v_proj.weight": (32, 40),
        "layers.0.self_attn.o_proj.weight": (40, 64),
        "layers.0.mlp.gate_proj.weight": (56, 40),
        "layers.0.mlp.up_proj.weight": (56, 40),
        "layers.0.mlp.down_proj.weight": (40, 56),
        "layers.0.post_attention_layernorm.weight": (40,),
    }


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "llama tied"])
def test_drafts_go_through_all_that_the_targets_head_does(name: str) -> None:
    target = Target(family_model(name), aux_layers=())
    config = replace(tiny_eagle1(tiny_target(aux_layers=())).config, vocab_size=97, draft_vocab_size=97)
    head = Eagle1Head(with_embedding_scale(config, target.embedding))
    init_random(head)
    head.lend(target)
    feature = torch.randn(1, T, D)
    truth = target.head.logits(feature)
    assert torch.equal(head.logits(feature), truth)
    assert not torch.allclose(truth, feature @ target.head.weight_VD.T) or name == "llama tied"


def test_a_step_before_lending_says_what_to_call() -> None:
    head = Eagle1Head(tiny_eagle1(tiny_target(aux_layers=())).config)
    with pytest.raises(AssertionError, match=r"call lend\(target\) before drafting"):
        head.logits(torch.zeros(1, 1, D))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"aux_layers": (1, 2)}, r"head\.aux_layers"),
        ({"draft_vocab_size": 61}, r"head\.draft_vocab_size 61"),
        ({"norm_output": True, "fc_norm": True}, r"head\.fc_norm, head\.norm_output"),
    ],
)
def test_what_belongs_to_eagle3_is_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=rf"an EAGLE-1 head reads the target's final state alone .*{named} belong"):
        head_config_for(tiny_config(), kind="eagle1", **fields)  # type: ignore[arg-type]


def test_the_registry_makes_the_kind_that_the_config_names() -> None:
    for kind, cls in HEADS.items():
        aux = () if kind == "eagle1" else (1, 2)
        assert type(new_head(head_config_for(tiny_config(), kind=kind, aux_layers=aux))) is cls  # type: ignore[arg-type]


def test_a_warm_start_attends_as_the_last_block_does_on_its_normed_state() -> None:
    target = Target(family_model("llama"), aux_layers=())
    head = tiny_eagle1(target)
    init_from_target(head, target, None)  # type: ignore[arg-type]
    last = target.layers[-1]
    x = torch.randn(T, D)
    final = target.decoder.norm(x)
    context = torch.cat((torch.randn(T, D), final), -1) @ head.fc.weight.T
    torch.testing.assert_close(context, final)
    torch.testing.assert_close(
        final @ head.layers[0].self_attn.q_proj.weight.T,
        last.input_layernorm(x) @ last.self_attn.q_proj.weight.T,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
