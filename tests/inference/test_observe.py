"""What became of candidates: an oracle's are counted by hand, others agree with what the engine accepted."""

import pytest

from eyas.inference.draft import DynamicTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.observe import Child, ObservedRequest, observe
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.tests.inference.costs import unchanged
from eyas.tests.inference.heads import greedy, random_prompt, soften, table_head
from eyas.tests.toys import oracle_head, tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
TREE = DynamicTree(3, 2, 4)
NOBODY = lambda *_: None  # noqa: E731 - a callback that hears nothing


def prompt_with_late_token() -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt and its greedy text, whose eleventh token occurs nowhere before."""
    for seed in range(100):
        prompt = random_prompt(5, seed=seed)
        text = greedy(TARGET, prompt, 30)
        if text[10] not in text[:10]:
            return prompt, text
    raise AssertionError("no such prompt")


PROMPT, TEXT = prompt_with_late_token()


def of_oracle(limit: int, *, stop: int | None = None) -> ObservedRequest:
    head = oracle_head(TARGET, [*PROMPT, *TEXT])
    stops = frozenset() if stop is None else frozenset({stop})
    request = GenerationRequest(PROMPT, limit, stops)
    (found,) = observe(TARGET, head, TREE, [request], batch=1, progress=NOBODY)
    return found


def count(found: ObservedRequest) -> tuple[int, int, int]:
    return found.rounds, len(found.children), sum(child.accepted for child in found.children)


def test_an_oracle_is_accepted_at_every_depth_and_only_its_best_child() -> None:
    found = of_oracle(13)  # the prefill's token and three rounds of four
    assert count(found) == (3, 18, 9)
    assert all(child.accepted == (child.rank == 0) for child in found.children)
    assert [child.depth for child in found.children] == [1, 1, 2, 2, 3, 3] * 3
    assert all(child.log_q == pytest.approx(0.0, abs=1e-3) for child in found.children if child.rank == 0)


def test_behind_a_limit_nothing_is_known_and_behind_a_stop_nothing_is_accepted() -> None:
    assert count(of_oracle(11)) == (3, 16, 8)
    assert count(of_oracle(30, stop=TEXT[10])) == (3, 18, 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_whole_pool_in_the_tree_is_accepted_as_the_engine_says(temperature: float) -> None:
    head, tree = soften(tiny_head(TARGET)), DynamicTree(2, 6, 42)
    requests = [
        GenerationRequest(random_prompt(3 + seed, seed=seed), 60 + seed, sampling=Sampling(temperature, seed=seed))
        for seed in range(4)
    ]
    alone = observe(TARGET, head, tree, requests, batch=1, progress=NOBODY)
    heard: list[tuple[int, int, int]] = []
    together = observe(TARGET, head, tree, requests, batch=3, progress=lambda *told: heard.append(told))
    generations = Engine(TARGET, head, tree).generate(requests)
    accepted = [sum(child.accepted for child in found.children) for found in alone]
    assert accepted == [generation.stats.accepted for generation in generations]
    assert sum(accepted) > 5, "where nothing is accepted nothing is compared"
    assert [found.rounds for found in alone] == [len(generation.rounds) for generation in generations]
    for a, b in zip(alone, together, strict=True):
        assert [(c.depth, c.rank, c.accepted) for c in a.children] == [
            (c.depth, c.rank, c.accepted) for c in b.children
        ]
        assert [c.log_q for c in a.children] == pytest.approx([c.log_q for c in b.children], abs=1e-4)
    assert heard[-1][:2] == (4, 4)
    assert sum(tokens for *_, tokens in heard) == sum(len(generation.token_ids) for generation in generations)


def test_children_are_told_below_accepted_parents_only() -> None:
    prompts = [random_prompt(4 + seed, seed=seed) for seed in range(3)]
    texts = [[*prompt, *greedy(TARGET, prompt, 40)] for prompt in prompts]
    requests = [GenerationRequest(prompt, 25) for prompt in prompts]
    found = observe(TARGET, table_head(TARGET, texts, flawed=True), TREE, requests, batch=3, progress=NOBODY)
    by_depth: dict[int, list[Child]] = {}
    for request in found:
        for child in request.children:
            by_depth.setdefault(child.depth, []).append(child)
    for depth in (1, 2):
        hits = sum(child.accepted for child in by_depth[depth])
        below = len(by_depth.get(depth + 1, [])) // TREE.top_k
        assert below <= hits <= below + len(requests)  # the limit cuts a request's last round
        assert 0 < hits < len(by_depth[depth]) // TREE.top_k


def test_a_calibrated_tree_is_no_place_to_observe() -> None:
    with pytest.raises(UserError, match="give a tree without one"):
        observe(TARGET, tiny_head(TARGET), DynamicTree(2, 2, 2, unchanged()), [], batch=1, progress=NOBODY)
