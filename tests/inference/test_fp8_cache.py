"""The runtime with an fp8 KV cache: one text for plain decoding and every tree, that of the rounded keys and values."""

from functools import cache
from typing import Any

import pytest
import torch

from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.inference.model_drafter import ModelDrafter
from eyas.inference.prompt_lookup import PromptLookup
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.models.kv_cache import FP8
from eyas.models.target import Target
from eyas.tests.inference.heads import FlakyHead, knowing_head, random_prompt
from eyas.tests.inference.session_checks import check_session
from eyas.tests.models.families import family_model
from eyas.tests.toys import oracle_head, tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3), initializer_range=0.2)
GREEDY = Sampling()
PROMPTS = [random_prompt(length, seed=30 + length) for length in (2, 7, 33)]
MAKERS: dict[str, TreeMaker] = {"chain": ChainTree(4), "tree": DynamicTree(3, 4, 10), "static": StaticTree()}


@cache
def plain(prompt: tuple[int, ...], count: int, sampling: Sampling = GREEDY, target: Target = TARGET) -> list[int]:
    """Return what plain decoding with an fp8 cache writes."""
    request = GenerationRequest(prompt, count, sampling=sampling)
    return list(Engine(target, kv_dtype=FP8).generate(request).token_ids)


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_an_oracle_writes_the_plain_text_at_a_tau_of_depth_plus_one(maker: TreeMaker, fixed: bool) -> None:
    count = 1 + 4 * (maker.depth + 1)
    text = plain(PROMPTS[1], count + 10)
    engine = Engine(TARGET, oracle_head(TARGET, [*PROMPTS[1], *text]), maker, fixed=fixed, kv_dtype=FP8)
    generation = engine.generate(GenerationRequest(PROMPTS[1], count))
    assert list(generation.token_ids) == text[:count]
    assert [len(made.tokens) for made in generation.rounds] == [maker.depth + 1] * 4


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_drafts_right_and_wrong_give_the_plain_texts_side_by_side(
    maker: TreeMaker, temperature: float, fixed: bool
) -> None:
    how = [Sampling(temperature, seed=seed) for seed in range(3)]
    texts = [plain(prompt, 24, one) for prompt, one in zip(PROMPTS, how, strict=True)]
    head = knowing_head(FlakyHead, TARGET, [*PROMPTS[0], *texts[0], *random_prompt(9, seed=1)])
    asked = [GenerationRequest(prompt, 24, sampling=one) for prompt, one in zip(PROMPTS, how, strict=True)]
    found = Engine(TARGET, head, maker, fixed=fixed, kv_dtype=FP8).generate(asked)
    assert [list(generation.token_ids) for generation in found] == texts
    assert found[0].stats.tau > 1.5


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
def test_after_every_round_the_cache_is_that_of_a_fresh_prefill_while_rows_come_and_go(fixed: bool) -> None:
    session = Engine(TARGET, tiny_head(TARGET), MAKERS["tree"], fixed=fixed, kv_dtype=FP8).session()
    limits = iter((9, 26, 17, 300))  # the longest makes the caches grow

    def request(number: int) -> GenerationRequest:
        limit = next(limits)
        stops = frozenset() if limit < 300 else frozenset(range(40))
        return GenerationRequest(PROMPTS[number % 3], limit, stops)

    session.join([request(0), request(1)])
    waiting = [2, 3]
    while len(session):
        session.round()
        assert session.cache is not None
        assert {layer.both.dtype for layer in session.cache.buffers} == {FP8}
        check_session(session)
        if waiting and len(session) < 2:
            session.join([request(waiting.pop(0))])
            check_session(session)


def test_other_drafters_write_the_plain_text_too() -> None:
    text = plain(PROMPTS[1], 20)
    for drafter in (PromptLookup(3, 2), ModelDrafter(TARGET, 3)):
        generation = Engine(TARGET, drafter=drafter, kv_dtype=FP8).generate(GenerationRequest(PROMPTS[1], 20))
        assert list(generation.token_ids) == text
    assert generation.stats.tau > 2  # the target with its own cache drafts for itself with an fp8 one


@pytest.mark.parametrize("name", ["gemma3_text", "mistral window", "gpt_oss"])
def test_windows_and_sinks_are_served(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 1, 3))
    text = plain(PROMPTS[1], 36, target=target)
    engine = Engine(target, oracle_head(target, [*PROMPTS[1], *text]), DynamicTree(4, 3, 12), kv_dtype=FP8)
    found: Generation = engine.generate(GenerationRequest(PROMPTS[1], 26))
    assert list(found.token_ids) == text[:26]
    assert {len(made.tokens) for made in found.rounds} == {5}


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_a_target_whose_keys_or_values_are_not_finite_is_refused(projection: str, broken: float, fixed: bool) -> None:
    target = tiny_target(layers=2, aux_layers=(0, 1))
    session = Engine(target, tiny_head(target), ChainTree(3), fixed=fixed, kv_dtype=FP8).session()
    session.join([GenerationRequest(PROMPTS[0], 9)])

    def breaks(_module: Any, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
        states[..., 0, 3] = broken
        return states

    getattr(target.layers[0].self_attn, projection).register_forward_hook(breaks)
    with pytest.raises(FloatingPointError, match="the target produced NaN logits"):
        session.round()


def test_the_engine_refuses_any_other_cache() -> None:
    with pytest.raises(UserError, match=r"in the dtype of its target .* or in torch.float8_e4m3fn, not in torch.int8"):
        Engine(TARGET, kv_dtype=torch.int8)
