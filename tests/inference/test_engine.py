"""The runtime at temperature 0: the text of plain decoding whatever is drafted, acceptance floors, stops, caches."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.prompt_lookup import PromptLookup
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.inference.heads import FlakyHead, TiedHead, fixed_head, greedy, knowing_head, random_prompt
from eyas.tests.models.families import family_model
from eyas.tests.toys import oracle_head, tiny_config, tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
DEEP = tiny_target()
MAKERS: dict[str, TreeMaker] = {
    "chain 1": ChainTree(1),
    "chain 4": ChainTree(4),
    "tree 1 wide": DynamicTree(4, 1, 4),
    "tree": DynamicTree(3, 4, 10),
    "bushy tree": DynamicTree(2, 6, 30),
    "deep tree": DynamicTree(6, 3, 14),
    "static tree": StaticTree(),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_an_oracle_head_reaches_a_tau_of_depth_plus_one(maker: TreeMaker) -> None:
    prompt, rounds = random_prompt(7, seed=1), 4
    count = 1 + rounds * (maker.depth + 1)
    text = greedy(DEEP, prompt, count + 10)
    generation = Engine(DEEP, oracle_head(DEEP, [*prompt, *text]), maker).generate(GenerationRequest(prompt, count))
    assert list(generation.token_ids) == text[:count]
    assert (generation.stats.rounds, generation.stats.tau) == (rounds, maker.depth + 1)
    assert generation.stats.survival == [1.0] * maker.depth
    assert [len(round_.tokens) for round_ in generation.rounds] == [maker.depth + 1] * rounds


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_any_head_gives_the_plain_text_and_a_flaky_one_an_acceptance_floor(maker: TreeMaker) -> None:
    stats = {name: AcceptanceStats(maker.depth) for name in ("random", "flaky", "sure")}
    for seed in (0, 2):
        prompt = random_prompt(2 + 5 * seed, seed=seed)
        text = greedy(TARGET, prompt, 32)
        known = [*prompt, *text, *random_prompt(9, seed=9)]
        heads = {
            "random": tiny_head(TARGET, seed=seed),
            "flaky": knowing_head(FlakyHead, TARGET, known, seed=seed),
            "sure": knowing_head(TiedHead, TARGET, known),
        }
        for name, head in heads.items():
            generation = Engine(TARGET, head, maker).generate(GenerationRequest(prompt, 25))
            assert list(generation.token_ids) == text[:25], name
            stats[name] += generation.stats
    # Thirty of the 97 tokens tried at every node hit now and then even when they are random.
    assert stats["random"].tau < (1.3 if maker.max_nodes < 20 else 2.0)
    assert stats["flaky"].tau > (1.4 if maker.depth == 1 else 1.7)
    assert stats["sure"].tau > 0.8 * (maker.depth + 1)


def first_distinct(count: int) -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt whose greedy continuation starts with `count` different tokens, and that continuation."""
    for seed in range(100):
        prompt = random_prompt(5, seed=seed)
        text = greedy(TARGET, prompt, 20)
        if len(set(text[:count])) == count:
            return prompt, text
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("maker", [ChainTree(4), DynamicTree(4, 3, 10)], ids=["chain", "tree"])
@pytest.mark.parametrize("place", [3, 4, 5])
def test_a_stop_inside_an_accepted_block_ends_the_text_there(maker: TreeMaker, place: int) -> None:
    prompt, text = first_distinct(6)
    engine = Engine(TARGET, oracle_head(TARGET, [*prompt, *text]), maker)
    stops = frozenset({text[place - 1]})
    plain = Engine(TARGET).generate(GenerationRequest(prompt, 20, stops))
    generation = engine.generate(GenerationRequest(prompt, 20, stops))
    assert list(generation.token_ids) == list(plain.token_ids) == text[:place]
    assert generation.finish_reason == plain.finish_reason == "stop"
    # Token 1 is the prefill's; the one round accepted tokens 2 to the stop, and nothing after it counts.
    assert generation.stats.survived == [1] * (place - 1) + [0] * (5 - place)
    assert generation.stats.rounds == 1
    assert generation.rounds[0].tokens == tuple(text[1:place])


@pytest.mark.parametrize("maker", [ChainTree(4), DynamicTree(4, 3, 10)], ids=["chain", "tree"])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7])
def test_the_limit_cuts_inside_an_accepted_block(maker: TreeMaker, limit: int) -> None:
    prompt, text = first_distinct(7)
    engine = Engine(TARGET, oracle_head(TARGET, [*prompt, *text]), maker)
    generation = engine.generate(GenerationRequest(prompt, limit))
    assert list(generation.token_ids) == text[:limit]
    assert generation.finish_reason == "length"
    # Rounds emit 5: tokens 2..6, then 7..11. Token 6 is the first round's bonus.
    expected = {1: [], 2: [1], 3: [2], 5: [4], 6: [4], 7: [4, 1]}[limit]
    assert [round_.accepted for round_ in generation.rounds] == expected
    assert generation.stats.accepted == sum(expected)


@pytest.mark.parametrize("maker", [ChainTree(4), DynamicTree(4, 3, 10)], ids=["chain", "tree"])
@pytest.mark.parametrize("place", [1, 2, 3, 6])
def test_a_stop_on_the_last_token_allowed_wins_over_the_limit(maker: TreeMaker, place: int) -> None:
    prompt, text = first_distinct(6)
    engine = Engine(TARGET, oracle_head(TARGET, [*prompt, *text]), maker)
    stops = frozenset({text[place - 1]})
    for tool in (engine, Engine(TARGET)):
        assert tool.generate(GenerationRequest(prompt, place, stops)).finish_reason == "stop"
        if place > 1:
            assert tool.generate(GenerationRequest(prompt, place - 1, stops)).finish_reason == "length"


def test_without_stop_ids_nothing_ends_the_text_early() -> None:
    prompt, text = first_distinct(6)
    engine = Engine(TARGET, oracle_head(TARGET, [*prompt, *text]), ChainTree(4))
    assert list(engine.generate(GenerationRequest(prompt, 20)).token_ids) == text


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_drafted_stop_that_the_target_rejects_ends_nothing(maker: TreeMaker) -> None:
    prompt, text = first_distinct(6)
    stop = next(token for token in range(97) if token not in text)
    head = fixed_head(TARGET, 30.0 * torch.nn.functional.one_hot(torch.tensor(stop), 97).float())
    generation = Engine(TARGET, head, maker).generate(GenerationRequest(prompt, 20, frozenset({stop})))
    assert list(generation.token_ids) == text
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("maker", [ChainTree(3), DynamicTree(3, 3, 8)], ids=["chain", "tree"])
def test_streamed_rounds_are_the_generation(maker: TreeMaker) -> None:
    prompt = random_prompt(4, seed=8)
    head = knowing_head(FlakyHead, TARGET, [*prompt, *greedy(TARGET, prompt, 40)])
    engine, request = Engine(TARGET, head, maker), GenerationRequest(prompt, 25)
    generation = engine.generate(request)
    events = list(engine.stream([request]))
    streamed = [event.round for event in events]
    assert (streamed[0].drafted, streamed[0].accepted, len(streamed[0].tokens)) == (0, 0, 1)
    assert tuple(streamed[1:]) == generation.rounds
    assert tuple(token for round_ in streamed for token in round_.tokens) == generation.token_ids
    assert sum(round_.accepted for round_ in generation.rounds) == generation.stats.accepted
    assert sum(round_.drafted for round_ in generation.rounds) == generation.stats.drafted
    assert generation.seconds >= generation.prefill_seconds > 0
    last = events[-1].finished
    assert last is not None
    assert last.token_ids == generation.token_ids
    assert [event.finished for event in events[:-1]] == [None] * (len(events) - 1)


def test_a_target_whose_heads_do_not_divide_its_hidden_size_is_served() -> None:
    target = Target(family_model("qwen3", hidden_size=42, num_attention_heads=4, head_dim=16), aux_layers=(0, 1, 3))
    prompt = random_prompt(5, seed=2)
    for maker in (ChainTree(3), DynamicTree(3, 3, 8)):
        generation = Engine(target, tiny_head(target), maker).generate(GenerationRequest(prompt, 12))
        assert list(generation.token_ids) == greedy(target, prompt, 12)


def test_one_engine_runs_many_streams_without_mixing_them() -> None:
    engine = Engine(TARGET, tiny_head(TARGET), DynamicTree(3, 3, 8))
    prompts = [random_prompt(1 + 4 * seed, seed=seed) for seed in range(4)]
    running = [engine.stream([GenerationRequest(prompt, 15)]) for prompt in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(15):  # the streams take turns
        for text, stream in zip(texts, running, strict=True):
            text.extend(next(stream).round.tokens if len(text) < 15 else ())
    assert texts == [greedy(TARGET, prompt, 15) for prompt in prompts]


@pytest.mark.parametrize("maker", [None, ChainTree(6), DynamicTree(6, 3, 20)], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_the_last_position_of_the_target_is_reached_but_not_passed(maker: TreeMaker | None, kind: str) -> None:
    # Dynamic frequencies change for every token of a forward that holds one position past the target's last.
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    target = tiny_target(layers=2, aux_layers=(0, 1), max_position_embeddings=24, rope_parameters=rope)
    for seed in range(4):
        prompt = random_prompt(10, seed=seed)
        text = greedy(target, prompt, 14)
        known = [*prompt, *text, *random_prompt(9, seed=9)]
        engine = Engine(target, None if maker is None else knowing_head(FlakyHead, target, known), maker)
        session = engine.session()
        session.join([GenerationRequest(prompt, 14)])
        while len(session):
            events = session.round()
        assert events[0].finished is not None
        assert list(events[0].finished.token_ids) == text
        assert session.cache is not None
        fresh = target.new_cache(batch=1, capacity=23)
        fresh.write_at(0, 23)
        target.forward(torch.tensor([[*prompt, *text[:-1]]]), cache=fresh)
        for ours, true in zip(session.cache.buffers, fresh.buffers, strict=True):
            torch.testing.assert_close(ours.keys[:, :, :23], true.keys, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"prompt \(10 tokens\) and max_new_tokens \(15\) exceed the target's 24 pos"):
        engine.generate(GenerationRequest(prompt, 15))


@pytest.mark.parametrize(("prompt", "limit"), [((), 5), ((1, 2), 0), ((1, 2), -1)])
def test_a_request_without_prompt_or_room_is_refused(prompt: tuple[int, ...], limit: int) -> None:
    with pytest.raises(UserError, match=rf"at least one token and max_new_tokens .* 1; given {len(prompt)} and"):
        GenerationRequest(prompt, limit)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"aux_layers": (0, 1, 2)}, r"aux layers \(0, 1, 3\), the target given has \(0, 1, 2\)"),
        ({"hidden_size": 48, "head_dim": 12}, "hidden size 40, the target given has 48"),
        ({"layers": 4}, "layers 3, the target given has 4"),
        ({"vocab_size": 98}, "vocabulary 97, the target given has 98"),
    ],
)
def test_a_head_of_another_target_is_refused(other: dict[str, Any], what: str) -> None:
    target = tiny_target(**{"layers": 3, "aux_layers": (0, 1, 3), **other})
    with pytest.raises(UserError, match=rf"^this head was made for a target with {what}\.$"):
        Engine(target, tiny_head(TARGET), ChainTree(3))


def test_a_head_without_a_tree_or_a_tree_without_a_head_is_refused() -> None:
    for pair in ((tiny_head(TARGET), None), (None, ChainTree(2))):
        with pytest.raises(UserError, match="both a head and a tree, or neither"):
            Engine(TARGET, *pair)


def test_settings_of_an_engine_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="a head or another drafter, not both"):
        Engine(TARGET, tiny_head(TARGET), ChainTree(2), drafter=PromptLookup())
    with pytest.raises(UserError, match="at least one request at a time, given batch 0"):
        Engine(TARGET, batch=0)
    with pytest.raises(UserError, match="verified by leviathan or block, not by 'sampling'"):
        Engine(TARGET, drawn_verifier="sampling")
    with pytest.raises(UserError, match="asks for child rank 70; the head drafts 61 tokens"):
        Engine(TARGET, tiny_head(TARGET), StaticTree(((0,), (70,))))


def test_a_prompt_with_a_token_the_target_does_not_know_is_refused() -> None:
    for token in (97, -1):
        with pytest.raises(UserError, match=f"the prompt holds token {token}; this target has tokens 0 to 96"):
            Engine(TARGET).generate(GenerationRequest((3, token), 5))


@pytest.mark.parametrize("maker", [None, ChainTree(3), DynamicTree(3, 3, 8)], ids=["plain", "chain", "tree"])
def test_a_target_that_produces_nan_stops_instead_of_writing_text(maker: TreeMaker | None) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(layers=2))
    target = Target(model, aux_layers=(0, 1))
    engine = Engine(target, None if maker is None else tiny_head(target), maker)
    prompt = random_prompt(4, seed=0)
    session = engine.session()
    (first,) = session.join([GenerationRequest(prompt, 9)])
    model.lm_head.weight[11] = float("nan")
    with pytest.raises(FloatingPointError, match="the target produced NaN logits"):
        session.round()
    assert session.rows[0].tokens == list(first.round.tokens)
    with pytest.raises(FloatingPointError, match="the target produced NaN logits"):
        session.join([GenerationRequest(prompt, 9)])
    assert len(session) == 1
    with pytest.raises(FloatingPointError, match="the target produced NaN logits"):
        engine.generate(GenerationRequest(prompt, 9))


def test_a_head_in_half_precision_drafts_for_a_target_in_full() -> None:
    prompt = random_prompt(6, seed=6)
    head = tiny_head(TARGET).bfloat16()
    for maker in (ChainTree(3), DynamicTree(3, 3, 8)):
        generation = Engine(TARGET, head, maker).generate(GenerationRequest(prompt, 20))
        assert list(generation.token_ids) == greedy(TARGET, prompt, 20)
    assert TARGET.embedding.weight.dtype == torch.float32
