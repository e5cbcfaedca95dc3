"""Requests side by side: ragged, ending at different rounds, new ones joining, both caches right after each round."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.drafter import Drafter
from eyas.inference.eagle_drafter import EagleDrafter
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.model_drafter import ModelDrafter
from eyas.inference.prompt_lookup import PromptLookup
from eyas.inference.sampling import Sampling
from eyas.inference.trees import TREES
from eyas.models.draft_cache import DraftCache
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import Target
from eyas.tests.inference.costs import DEAR, FREE
from eyas.tests.inference.heads import greedy, random_prompt, soften, table_head
from eyas.tests.inference.session_checks import check_session
from eyas.tests.toys import tiny_head, tiny_target

# Milder weights than elsewhere: rounding grows little from block to block, and 1e-5 can be asked of the caches.
TARGET = tiny_target(layers=4, aux_layers=(0, 2, 4), initializer_range=0.2)
LENGTHS = (1, 7, 33)
PROMPTS = [random_prompt(length, seed=20 + length) for length in LENGTHS]
LIMITS = (200, 117, 160)
TEXTS = [[*prompt, *greedy(TARGET, prompt, 210)] for prompt in PROMPTS]
MAKERS: dict[str, TreeMaker] = {
    "chain": ChainTree(4),
    "static": StaticTree(),
    "dynamic": DynamicTree(4, 3, 11),
    "auto": FREE,
}
HEADS: dict[str, Eagle3Head] = {
    "random": soften(tiny_head(TARGET)),
    "oracle": table_head(TARGET, TEXTS),
    "wrong at every third": table_head(TARGET, TEXTS, flawed=True),
}


def test_every_registered_tree_is_tested_here() -> None:
    assert MAKERS.keys() == TREES.keys()


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", HEADS)
def test_a_ragged_batch_writes_the_plain_texts_and_an_oracle_reaches_depth_plus_one(
    name: str, maker: TreeMaker
) -> None:
    requests = [GenerationRequest(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    generations = Engine(TARGET, HEADS[name], maker).generate(requests)
    for prompt, text, limit, generation in zip(PROMPTS, TEXTS, LIMITS, generations, strict=True):
        assert list(generation.token_ids) == text[len(prompt) :][:limit]
        assert generation.finish_reason == "length"
        full = generation.rounds[:-1]  # the limit cuts the last one
        if name == "oracle":
            assert {len(made.tokens) for made in full} == {maker.depth + 1}
        elif name == "random":
            assert generation.stats.tau < 1.6
        else:
            assert 1.5 < generation.stats.tau < 3.1
    assert len({len(generation.rounds) for generation in generations}) == 3, "they must end at different rounds"


def test_plain_decoding_in_a_batch_is_plain_decoding_alone() -> None:
    requests = [GenerationRequest(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    for text, request, generation in zip(TEXTS, requests, Engine(TARGET).generate(requests), strict=True):
        assert list(generation.token_ids) == text[len(request.prompt_ids) :][: request.max_new_tokens]


DRAFTERS: dict[str, Drafter] = {
    **{f"{name}, {kind}": EagleDrafter(head, maker) for name, head in HEADS.items() for kind, maker in MAKERS.items()},
    "two layers, dynamic": EagleDrafter(soften(tiny_head(TARGET, num_layers=2)), MAKERS["dynamic"]),
    "random, mostly at rest": EagleDrafter(HEADS["random"], DEAR),
    "random, copying": EagleDrafter(HEADS["random"], replace(FREE, ngram=3)),
    "oracle, copying": EagleDrafter(HEADS["oracle"], replace(FREE, ngram=3)),
    "draft model": ModelDrafter(tiny_target(layers=2, aux_layers=(), seed=0), 3),
    "draft model that is the target": ModelDrafter(TARGET, 3),
    "prompt lookup": PromptLookup(4, 2),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_every_round_both_caches_equal_a_fresh_prefill_while_rows_come_and_go(
    name: str, temperature: float
) -> None:
    session = Engine(TARGET, drafter=DRAFTERS[name]).session()
    limits, waiting = iter((9, 26, 17, 14, 2, 1, 12)), list(range(2, 7))
    prompts = [*PROMPTS, *(random_prompt(length, seed=length) for length in (2, 5, 3, 11))]

    def request(number: int) -> GenerationRequest:
        return GenerationRequest(prompts[number], next(limits), sampling=Sampling(temperature, seed=number))

    events = session.join([request(0), request(1)])
    check_session(session)
    while len(session):
        events += session.round()
        check_session(session)
        if waiting and len(session) < 3:
            events += session.join([request(waiting.pop(0)) for _ in range(min(2, len(waiting)))])
            check_session(session)
    finished = {event.number: event.finished for event in events if event.finished}
    assert sorted(finished) == list(range(7))
    for number, generation in finished.items():
        tokens = [token for event in events if event.number == number for token in event.round.tokens]
        assert tokens == list(generation.token_ids)
        if temperature == 0:
            assert tokens == greedy(TARGET, prompts[number], len(tokens))


def test_mixed_temperatures_in_one_batch_give_the_texts_of_each_alone() -> None:
    samplings = [Sampling(), Sampling(1.0, seed=4), Sampling(0.7, 20, 0.9, seed=5), Sampling()]
    prompts = [random_prompt(length, seed=length) for length in (3, 9, 1, 6)]
    requests = [
        GenerationRequest(prompt, 20 + length, sampling=sampling)
        for length, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    alone = [Engine(TARGET).generate(request).token_ids for request in requests]
    for drafter in (None, EagleDrafter(HEADS["random"], MAKERS["dynamic"]), PromptLookup(3, 2)):
        found = Engine(TARGET, drafter=drafter).generate(requests)
        assert [generation.token_ids for generation in found] == alone
    # A drawn chain is verified by other coins: its greedy requests still write the plain text.
    found = Engine(TARGET, drafter=ModelDrafter(TARGET, 3)).generate(requests)
    assert [generation.token_ids for generation in found][::3] == alone[::3]
    assert [len(generation.token_ids) for generation in found] == [20, 21, 22, 23]


def test_requests_join_as_places_become_free_and_none_waits_for_another() -> None:
    prompts = [random_prompt(2 + n, seed=n) for n in range(7)]
    limits = [3, 30, 5, 4, 2, 1, 6]
    engine = Engine(TARGET, HEADS["random"], ChainTree(2), batch=2)
    taken: list[int] = []

    def asked() -> Any:
        for n, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            taken.append(n)
            yield GenerationRequest(prompt, limit)

    order = []
    for event in engine.stream(asked()):
        order.append(event.number)
        if event.number == 1 and event.finished:
            assert len(taken) == 7  # the others went by while request 1 was running
        if len(order) == 2:
            assert taken == [0, 1]
    found = engine.generate([GenerationRequest(p, limit) for p, limit in zip(prompts, limits, strict=True)])
    assert [list(g.token_ids) for g in found] == [
        greedy(TARGET, p, limit) for p, limit in zip(prompts, limits, strict=True)
    ]


def test_one_target_forward_and_one_step_per_level_serve_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [GenerationRequest(prompt, 13) for prompt in PROMPTS]
    head, calls = HEADS["random"], {"forward": 0, "step": 0}
    engine = Engine(TARGET, head, ChainTree(4))
    for owner, name in ((Target, "forward"), (Eagle3Head, "step")):
        original = getattr(owner, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    session = engine.session()
    session.join(requests)
    assert calls == {"forward": 1, "step": 1}
    rounds = 0
    while len(session) == 3:
        session.round()
        rounds += 1
        if len(session) == 3:
            assert calls == {"forward": 1 + rounds, "step": 1 + 4 * rounds}
    assert rounds > 3


def test_a_request_that_fails_at_its_prefill_leaves_the_others_as_they_were() -> None:
    target = tiny_target(layers=2, aux_layers=())
    session = Engine(target).session()
    session.join([GenerationRequest(PROMPTS[1], 20)])
    poisoned = 11
    whole = target.embedding.weight[poisoned].clone()
    target.embedding.weight[poisoned] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        session.join([GenerationRequest((5, poisoned, 7, 8, 9, 1, 2, 3, 4, 5, 6), 4)])
    target.embedding.weight[poisoned] = whole
    events = session.join([GenerationRequest(PROMPTS[0], 20)])
    while len(session):
        events += session.round()
    texts = {event.number: list(event.finished.token_ids) for event in events if event.finished}
    assert sorted(texts.values()) == sorted([greedy(target, PROMPTS[1], 20), greedy(target, PROMPTS[0], 20)])


class Foreign:
    """A drafter that returns one given tree for every row."""

    depth, max_nodes = 2, 3

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def check(self, target: Target) -> None: ...

    def open(self) -> "Foreign":
        return self

    def join(self, *_: Any, **__: Any) -> None: ...

    def extend(self, *_: Any) -> None: ...

    def leave(self, row: int) -> None: ...

    def draft(self, roots: list[int]) -> list[Any]:
        return [self.tree(root) for root in roots]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (lambda root: [root + 1, 5], "a tree of 2 nodes below token"),
        (lambda root: [root, 97], r"tokens \d+ to 97; the root is \d+, at most 3 nodes and 97 tokens"),
        (lambda root: [root, -1], "with tokens -1 to"),
        (lambda root: [root, 1, 2, 3], "a tree of 4 nodes"),
    ],
)
def test_drafts_that_no_target_can_verify_are_refused_on_the_host(tokens: Any, message: str) -> None:
    from eyas.inference.tree import DraftTree

    def tree(root: int) -> DraftTree:
        first, *rest = tokens(root)
        return DraftTree.chain(first, rest, [0.0] * len(rest))

    with pytest.raises(ValueError, match=message):
        Engine(TARGET, drafter=Foreign(tree)).generate(GenerationRequest((1, 2), 5))


def test_the_draft_cache_grows_by_rows_and_slots_and_keeps_what_it_has() -> None:
    cache = DraftCache(kv_heads=1, head_dim=4, capacity=3, dtype=torch.float32, device=torch.device("cpu"))
    cache.commit(3)
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    cache.attend(q, k, v)
    cache.grow(batch=3, capacity=5)
    assert cache.keys.shape == (1, 3, 1, 5, 4)
    assert torch.equal(cache.keys[0, :1, :, :3], k)
    assert cache.lengths == [3, 0, 0]
