"""Requests that join together: prompts of unlike lengths are read apart, and nobody notices."""

from typing import Any

import pytest
import torch

from eyas.inference.draft import ChainTree
from eyas.inference.drafter import Drafter
from eyas.inference.eagle_drafter import EagleDrafter
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.model_drafter import ModelDrafter
from eyas.inference.prompt_lookup import PromptLookup
from eyas.models.target import Target
from eyas.tests.inference.costs import FREE
from eyas.tests.inference.heads import greedy, random_prompt, table_head
from eyas.tests.inference.session_checks import check_session
from eyas.tests.toys import tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3), initializer_range=0.2)
PROMPTS = [random_prompt(length, seed=70 + place) for place, length in enumerate((2, 180, 3, 5, 90))]
TEXTS = [[*prompt, *greedy(TARGET, prompt, 24)] for prompt in PROMPTS]
ORACLE = table_head(TARGET, TEXTS)
DRAFTERS: dict[str, tuple[Drafter | None, float]] = {  # each with the tokens per round that it must reach
    "none": (None, 1.0),
    "chain": (EagleDrafter(ORACLE, ChainTree(3)), 3.9),
    "cost-aware": (EagleDrafter(ORACLE, FREE), 3.9),
    "itself": (ModelDrafter(TARGET, 3), 3.9),
    "lookup": (PromptLookup(3), 1.0),
}


def shapes_of_forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that the target's forwards add the shapes of their tokens to."""
    shapes: list[tuple[int, ...]] = []
    forward = Target.forward

    def watched(self: Target, input_ids_BT: torch.Tensor, **settings: Any) -> Any:
        shapes.append(tuple(input_ids_BT.shape))
        return forward(self, input_ids_BT, **settings)

    monkeypatch.setattr(Target, "forward", watched)
    return shapes


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_of_unlike_lengths_are_read_apart_and_every_text_is_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, floor = DRAFTERS[name]
    session = Engine(TARGET, drafter=drafter).session()
    with monkeypatch.context() as patched:
        shapes = shapes_of_forwards(patched)
        events = session.join([GenerationRequest(prompt, 24) for prompt in PROMPTS])
    assert shapes[:3] == [(1, 180), (1, 90), (3, 5)]
    assert [event.number for event in events] == [0, 1, 2, 3, 4]
    while len(session):
        check_session(session)
        events += session.round()
    finished = {event.number: event.finished for event in events if event.finished}
    for number, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        generation = finished[number]
        assert list(generation.token_ids) == text[len(prompt) :]
        emitted = sum(len(made.tokens) for made in generation.rounds[:-1])
        assert emitted / len(generation.rounds[:-1]) >= floor


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_one_prompt_that_fails_lets_none_of_those_beside_it_in(poisoned: int) -> None:
    """Whichever of the parts fails, first or last, those that were running go on undisturbed."""
    target = tiny_target(layers=2, aux_layers=())
    session = Engine(target).session()
    session.join([GenerationRequest(PROMPTS[4], 20)])
    token, prompts = 11, [[token_ % 10 for token_ in PROMPTS[place]] for place in (0, 1, 2)]
    prompts[poisoned][-1] = token
    whole = target.embedding.weight[token].clone()
    target.embedding.weight[token] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        session.join([GenerationRequest(tuple(prompt), 20) for prompt in prompts])
    target.embedding.weight[token] = whole
    assert len(session) == 1
    events = session.join([GenerationRequest(PROMPTS[0], 20)])
    while len(session):
        events += session.round()
    texts = sorted(list(event.finished.token_ids) for event in events if event.finished)
    assert texts == sorted(greedy(target, PROMPTS[place], 20) for place in (0, 4))
