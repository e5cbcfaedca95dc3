"""A warm-started head is its target's last block run once more; families it cannot copy are refused."""

import pytest
import torch
from torch import Tensor, nn

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle1 import Eagle1Head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.head_config import head_config_for
from eyas.models.last_block import last_block, norm_factor
from eyas.models.target import Target
from eyas.models.ttt_attention import TTTContext
from eyas.models.warm_start import init_from_target, init_random, set_vocabulary
from eyas.tests.models.families import family_model
from eyas.tests.toys import tiny_eagle1

T = 11
VOCABULARY = DraftVocabulary(torch.arange(0, 97, 2), 97)


def warm_head(target: Target, *, num_layers: int = 1) -> Eagle3Head:
    config = head_config_for(
        target.config, aux_layers=target.aux_layers, draft_vocab_size=len(VOCABULARY), intermediate_size=56,
        num_layers=num_layers,
    )  # fmt: skip
    head = Eagle3Head(config).eval()
    set_vocabulary(head, VOCABULARY)
    init_from_target(head, target, VOCABULARY)
    head.use_embedding(target.embedding)
    return head


def first_step(head: Eagle3Head, aux_TF: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
    with torch.no_grad():
        feature, logits = head.step(head.fuse(aux_TF[None]), tokens_T[None], torch.arange(T)[None], context)
    return feature[0], logits[0]


@pytest.mark.parametrize("name", ["llama", "llama tied", "mistral", "gemma", "phi3"])
def test_the_first_step_is_the_targets_last_block_run_on_the_last_tap(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 1, 3))
    row, tokens = torch.randint(97, (T,)), torch.randint(97, (T,))
    aux = target.forward(row[None]).aux_hidden_BTF[0]
    last = aux[:, -40:]
    with torch.inference_mode():
        rope = target.decoder.rotary_emb(last[None], torch.arange(T)[None])
        causal = torch.full((T, T), float("-inf")).triu(1)[None, None]
        again = target.layers[-1](last[None], attention_mask=causal, position_embeddings=rope)
        again = (again[0] if isinstance(again, tuple) else again)[0]
        expected = target.head.logits(target.decoder.norm(again))[:, VOCABULARY.token_ids_U]
    feature, logits = first_step(warm_head(target), aux, tokens)
    torch.testing.assert_close(feature, again, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


INPUT, POST, FEED = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"
NORMS = {  # before the attention and before the MLP, as each family's forward reads
    "llama": (INPUT, POST),
    "qwen2": (INPUT, POST),
    "qwen3": (INPUT, POST),
    "mistral": (INPUT, POST),
    "phi3": (INPUT, POST),
    "gemma": (INPUT, POST),
    "gemma2": (INPUT, FEED),
    "gemma3_text": (INPUT, FEED),
    "glm4": (INPUT, POST),
    "olmo2": (None, None),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_norms_of_the_draft_layer_are_those_before_attention_and_mlp(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 1, 3))
    head, block = warm_head(target, num_layers=2), target.layers[-1]
    x = 3 * torch.randn(7, 40)
    plain = x * (x.pow(2).mean(-1, keepdim=True) + target.config.rms_norm_eps).rsqrt()
    before_attention, before_mlp = (getattr(block, norm)(x) if norm else plain for norm in NORMS[name])
    ours = head.midlayer, head.layers["1"]
    with torch.no_grad():
        for found in (ours[0].hidden_norm(x), ours[1].input_layernorm(x)):
            torch.testing.assert_close(found, before_attention, rtol=0, atol=1e-6)
        for layer in ours:
            torch.testing.assert_close(layer.post_attention_layernorm(x), before_mlp, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", ()),
        ("gemma2", ("post_attention_layernorm, post_feedforward_layernorm norm what its halves return",)),
        ("glm4", ("post_self_attn_layernorm, post_mlp_layernorm norm what its halves return",)),
        (
            "olmo2",
            (
                "no norm stands before the attention",
                "no norm stands before the MLP",
                "post_attention_layernorm, post_feedforward_layernorm norm what its halves return",
            ),
        ),
    ],
)
def test_what_a_draft_layer_cannot_hold_is_said(name: str, said: tuple[str, ...]) -> None:
    block = last_block(Target(family_model(name), aux_layers=(0, 1, 3)))
    assert len(block.notes) == len(said)
    assert all(part in note for part, note in zip(said, block.notes, strict=True))


def test_a_block_that_was_looked_at_computes_as_before() -> None:
    target, row = Target(family_model("gemma2"), aux_layers=(0, 1, 3)), torch.randint(97, (1, T))
    before = target.forward(row).final_hidden_BTD
    last_block(target)
    assert torch.equal(target.forward(row).final_hidden_BTD, before)


def test_a_norm_that_is_no_rms_norm_is_refused() -> None:
    with pytest.raises(RuntimeError, match="its LayerNorm is no RMSNorm"):
        norm_factor(nn.LayerNorm(40))


def test_later_layers_begin_by_adding_nothing() -> None:
    target = Target(family_model("llama"), aux_layers=(0, 1, 3))
    row, tokens = torch.randint(97, (T,)), torch.randint(97, (T,))
    aux = target.forward(row[None]).aux_hidden_BTF[0]
    shallow, deep = (first_step(warm_head(target, num_layers=layers), aux, tokens) for layers in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(shallow, deep, strict=True))
    kinds = (tiny_eagle1(target, num_layers=layers) for layers in (1, 2))
    one, two = (_eagle1_step(head, target, tokens) for head in kinds)
    assert torch.equal(one, two)


def _eagle1_step(head: Eagle1Head, target: Target, tokens_T: Tensor) -> Tensor:
    init_from_target(head, target, VOCABULARY)
    torch.manual_seed(0)
    context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
    with torch.no_grad():
        return head.advance(torch.randn(1, T, 40), tokens_T[None], torch.arange(T)[None], context)


def test_a_warm_start_copies_and_leaves_the_target_as_it_was() -> None:
    target = Target(family_model("llama"), aux_layers=(0, 1, 3))
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    head = warm_head(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(1)
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_block_that_is_not_llama_like_is_refused(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 1, 3))
    with pytest.raises(UserError, match=rf"cannot warm-start .* of a {name} target \(.*\); set head\.init to 'random'"):
        warm_head(target)


def test_a_random_start_fills_matrices_and_leaves_norms_at_one() -> None:
    target = Target(family_model("llama"), aux_layers=(0, 1, 3))
    config = head_config_for(target.config, aux_layers=(0, 1, 3), draft_vocab_size=49, norm_before_fc=True)
    head = Eagle3Head(config)
    init_random(head, std=0.05)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1:
            assert bool((parameter == 1).all()), name
        else:
            assert 0.04 < float(parameter.detach().std()) < 0.06, name
