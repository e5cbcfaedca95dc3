"""One step of the head against its equations (contracts section 2), written out here in fp64 without torch.nn."""

from itertools import product
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.models.draft_cache import DraftCache
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import head_config_for
from eyas.models.target import Target
from eyas.models.ttt_attention import TTTContext
from eyas.models.warm_start import init_random
from eyas.tests.models.families import family_model
from eyas.tests.toys import tiny_config, tiny_head, tiny_target

NAMES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLAGS = [
    flags
    for values in product((False, True), repeat=4)
    if not ((flags := dict(zip(NAMES, values, strict=True)))["norm_before_fc"] and flags["fc_norm"])
]
T, D, HEADS, KV, DIM, U = 7, 40, 4, 2, 16, 61


def flag_name(flags: dict[str, bool]) -> str:
    return "+".join(name for name, value in flags.items() if value) or "plain"


def shuffled_head(**flags: bool) -> Eagle3Head:
    """Return a random head whose norms are random too, so that a norm left out shows."""
    head = tiny_head(tiny_target(), draft_vocab_size=U, **flags)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0)
    return head


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x_Td: Tensor, positions: list[int], theta: float) -> Tensor:
    """Turn pair (i, i + d/2) of each row by position * theta^(-2i/d)."""
    half = DIM // 2
    out = x_Td.clone()
    for t, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(position * theta ** (-2 * i / DIM), dtype=torch.float64)
            a, b = x_Td[t, i], x_Td[t, half + i]
            out[t, i] = a * angle.cos() - b * angle.sin()
            out[t, half + i] = b * angle.cos() + a * angle.sin()
    return out


def by_hand(
    head: Eagle3Head, aux_TF: Tensor, token_ids: list[int], positions: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (fused g, next feature, logits) of one causal step over fresh slots."""
    config = head.config
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    eps, theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
    aux = aux_TF.double()
    if config.norm_before_fc:
        aux = norm(aux, w["input_norm.weight"], eps)
    if config.fc_norm:
        aux = torch.cat([norm(aux[:, a * D : (a + 1) * D], w[f"fc_norm.{a}.weight"], eps) for a in range(3)], -1)
    g = aux @ w["fc.weight"].T
    embedded = head.embed(torch.tensor(token_ids)).double()
    hidden = norm(g, w["midlayer.hidden_norm.weight"], eps)
    x = torch.cat((norm(embedded, w["midlayer.input_layernorm.weight"], eps), hidden), -1)
    q, k, v = (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    heads = []
    for h in range(HEADS):
        g_ = h // (HEADS // KV)
        q_h = rotated(q[:, h * DIM : (h + 1) * DIM], positions, theta)
        k_h = rotated(k[:, g_ * DIM : (g_ + 1) * DIM], positions, theta)
        v_h = v[:, g_ * DIM : (g_ + 1) * DIM]
        rows = [((q_h[t] @ k_h[: t + 1].T) / sqrt(DIM)).softmax(-1) @ v_h[: t + 1] for t in range(len(q_h))]
        heads.append(torch.stack(rows))
    attended = torch.cat(heads, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    h1 = (hidden if config.norm_before_residual else g) + attended
    m = norm(h1, w["midlayer.post_attention_layernorm.weight"], eps)
    gate = m @ w["midlayer.mlp.gate_proj.weight"].T
    up = m @ w["midlayer.mlp.up_proj.weight"].T
    o = h1 + (gate * torch.sigmoid(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    normed = norm(o, w["norm.weight"], eps)
    return g, (normed if config.norm_output else o), normed @ w["lm_head.weight"].T


@pytest.mark.parametrize("flags", FLAGS, ids=flag_name)
def test_a_step_equals_the_equations_for_every_flag_combination(flags: dict[str, bool]) -> None:
    head = shuffled_head(**flags)
    aux, tokens = torch.randn(T, 3 * D), torch.randint(97, (T,))
    positions = list(range(T))
    g, feature, logits = by_hand(head, aux, tokens.tolist(), positions)
    with torch.no_grad():
        fused = head.fuse(aux[None])
        context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
        out, drafted = head.step(fused, tokens[None], torch.tensor([positions]), context)
    torch.testing.assert_close(fused[0].double(), g, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[0].double(), feature, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(drafted[0].double(), logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("flag", NAMES)
def test_every_flag_changes_the_step(flag: str) -> None:
    aux, tokens, positions = torch.randn(T, 3 * D), torch.randint(97, (T,)).tolist(), list(range(T))
    with_flag = shuffled_head(**{flag: True})
    without = shuffled_head()
    without.load_state_dict({k: v for k, v in with_flag.state_dict().items() if k in without.state_dict()})
    one, other = (by_hand(head, aux, tokens, positions) for head in (with_flag, without))
    assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) > 0.1


def test_rope_turns_by_the_given_positions() -> None:
    head = shuffled_head()
    aux, tokens, positions = torch.randn(T, 3 * D), torch.randint(97, (T,)), [3, 4, 9, 10, 11, 200, 511]
    _, feature, _ = by_hand(head, aux, tokens.tolist(), positions)
    with torch.no_grad():
        context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
        out, _ = head.step(head.fuse(aux[None]), tokens[None], torch.tensor([positions]), context)
    torch.testing.assert_close(out[0].double(), feature, rtol=1e-4, atol=1e-3)


def test_cache_and_training_context_give_the_same_committed_slots() -> None:
    head = shuffled_head()
    feature, tokens, positions = torch.randn(1, T, D), torch.randint(97, (1, T)), torch.arange(T)[None]
    cache = DraftCache(kv_heads=KV, head_dim=DIM, capacity=T, dtype=torch.float32, device=torch.device("cpu"))
    cache.commit(T)
    with torch.no_grad():
        a = head.step(feature, tokens, positions, cache)
        b = head.step(feature, tokens, positions, TTTContext(torch.zeros(1, T, dtype=torch.int64)))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", [{}, {"norm_output": True}], ids=flag_name)
def test_logits_at_gives_those_slots_of_the_whole(flags: dict[str, bool]) -> None:
    head = shuffled_head(**flags)
    feature, tokens = torch.randn(3, T, D), torch.randint(97, (3, T))
    chosen = torch.tensor([19, 0, 7, 7])
    documents = torch.zeros(3, T, dtype=torch.int64)
    with torch.no_grad():
        whole_feature, whole = head.step(feature, tokens, torch.arange(T)[None], TTTContext(documents))
        some_feature, some = head.step(feature, tokens, torch.arange(T)[None], TTTContext(documents), logits_at=chosen)
    assert torch.equal(whole_feature, some_feature)
    assert some.shape == (4, U)
    torch.testing.assert_close(some, whole.flatten(0, 1)[chosen])


@pytest.mark.parametrize(("hidden", "q", "kv"), [(40, (64, 80), (32, 80)), (42, (64, 84), (32, 84))])
def test_head_dim_is_not_hidden_size_over_heads(hidden: int, q: tuple[int, int], kv: tuple[int, int]) -> None:
    model = family_model("qwen3", hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    target = Target(model, aux_layers=(0, 1, 3))
    head = tiny_head(target)
    attention = head.midlayer.self_attn
    assert attention.q_proj.weight.shape == q
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == kv
    assert attention.o_proj.weight.shape == (hidden, 64)
    context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
    feature, logits = head.step(
        head.fuse(torch.randn(1, T, 3 * hidden)), torch.randint(97, (1, T)), torch.arange(T)[None], context
    )
    assert feature.shape == (1, T, hidden)
    assert logits.shape == (1, T, 61)
    assert bool(logits.isfinite().all())


def test_the_embedding_is_lent_not_owned() -> None:
    target = tiny_target(tie_word_embeddings=True)
    head = tiny_head(target)
    assert head.embed(torch.tensor([[5, 96]])).equal(target.embedding.weight[[5, 96]][None])
    assert not any("embed" in name for name in head.state_dict())
    assert not any(p is target.embedding.weight for p in head.parameters())
    shapes = {name: tuple(t.shape) for name, t in head.state_dict().items()}
    assert not any(shape == (97, D) for shape in shapes.values())


def test_training_never_touches_the_embedding_and_reaches_everything_else() -> None:
    target = tiny_target()
    before = target.embedding.weight.clone()
    head = tiny_head(target, fc_norm=True)
    context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
    feature = head.fuse(torch.randn(1, T, 3 * D))
    for step in range(2):
        feature, logits = head.step(feature, torch.randint(97, (1, T)), torch.arange(T)[None] + step, context)
    logits.logsumexp(-1).sum().backward()
    assert target.embedding.weight.grad is None
    untouched = [name for name, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    assert untouched == []
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    assert torch.equal(target.embedding.weight, before)


def test_drafting_without_an_embedding_says_what_to_call() -> None:
    head = Eagle3Head(tiny_head(tiny_target()).config)
    with pytest.raises(AssertionError, match=r"use_embedding\(target\.embedding\)"):
        head.embed(torch.tensor([[1]]))


@pytest.mark.parametrize("width", [D, 2 * D, 3 * D + 1])
def test_aux_states_of_another_width_are_refused_with_both_widths(width: int) -> None:
    head = tiny_head(tiny_target())
    with pytest.raises(AssertionError, match=rf"aux states are {width} wide, this head reads 3 layers of 40 = 120"):
        head.fuse(torch.randn(1, 2, width))


def test_draft_ids_map_through_the_offsets() -> None:
    head = tiny_head(tiny_target())
    draft_ids = torch.arange(U)
    expected = head.t2d.nonzero().squeeze(-1)
    assert torch.equal(head.to_target_ids(draft_ids), expected)
    assert torch.equal(head.to_target_ids(draft_ids.view(1, U)), expected[None])
    full = tiny_head(tiny_target(), draft_vocab_size=97)
    assert full.to_target_ids(draft_ids) is draft_ids
    assert {"d2t", "t2d"}.isdisjoint(full.state_dict())


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
def test_the_mlp_uses_the_targets_activation(activation: str) -> None:
    functions: dict[str, Any] = {
        "silu": torch.nn.functional.silu,
        "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }
    head = Eagle3Head(head_config_for(tiny_config(hidden_act=activation), aux_layers=(1, 2), draft_vocab_size=U))
    init_random(head, std=0.3)
    mlp, x = head.midlayer.mlp, torch.randn(5, D)
    expected = (functions[activation](x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("aux_layers", [(3,), (0, 5), (1, 2, 3, 4)], ids=str)
def test_any_number_of_aux_layers_is_fused(aux_layers: tuple[int, ...]) -> None:
    target = tiny_target(aux_layers=aux_layers)
    head = tiny_head(target)
    aux = target.forward(torch.arange(T)[None]).aux_hidden_BTF
    assert aux.shape[-1] == len(aux_layers) * D == head.fc.in_features
    assert head.fuse(aux.clone()).shape == (1, T, D)
