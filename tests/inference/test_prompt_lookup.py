"""Prompt lookup: the latest earlier occurrence of the longest n-gram, and nothing where there is none."""

import pytest
import torch

from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.prompt_lookup import LookupDrafting, PromptLookup
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.models.target import TargetOutput
from eyas.tests.inference.heads import greedy, random_prompt
from eyas.tests.toys import tiny_target

NOTHING = TargetOutput(torch.empty(0), torch.empty(0))


def proposed(text: list[int], *, depth: int = 4, ngram: int = 3) -> list[int]:
    """Return what is drafted behind a text, given to the drafter in three pieces."""
    state = LookupDrafting(depth, ngram)
    state.join([(text[0],)], [Sampling()], capacity=99)
    third = max(1, len(text) // 3)
    state.extend(0, [text[1:third]], NOTHING)
    state.extend(0, [text[third : 2 * third] if third > 1 else text[1:]], NOTHING)
    if third > 1:
        state.extend(0, [text[2 * third :]], NOTHING)
    (tree,) = state.draft([text[-1]])
    assert tree.tokens_N[0] == text[-1]
    return tree.tokens_N[1:].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3], [8, 7, 2, 3]),  # the latest of two
        ([5, 2, 3, 4, 6, 3, 7, 2, 3], [4, 6, 3, 7]),  # two tokens beat a later match of one
        ([1, 2, 3, 4], []),
        ([7, 7], [7, 7, 7, 7]),  # a circle of one
        ([7, 7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 1], [2, 1, 2, 1]),
        ([5, 1, 2, 3, 1], [2, 3, 1, 2]),
        ([1], []),
    ],
)
def test_what_followed_the_last_tokens_before_is_proposed(text: list[int], expected: list[int]) -> None:
    assert proposed(text) == expected


def test_shorter_grams_and_depths() -> None:
    text = [5, 2, 3, 4, 6, 3, 7, 2, 3]
    assert proposed(text, ngram=1) == [7, 2, 3, 7]
    assert proposed(text, depth=2) == [4, 6]


def test_a_text_that_repeats_itself_is_guessed_right() -> None:
    """Greedy text of a tiny target runs into a loop, where look-ups are right; the text is the plain one."""
    # With weights this small the next token depends on the last one alone: the text must run in circles.
    target = tiny_target(vocab_size=13, layers=1, aux_layers=(), initializer_range=0.02)
    prompt = random_prompt(6, seed=3, vocab_size=13)
    generation = Engine(target, drafter=PromptLookup(4, 2)).generate(GenerationRequest(prompt, 120))
    assert list(generation.token_ids) == greedy(target, prompt, 120)
    assert generation.stats.tau > 2.0


@pytest.mark.parametrize(("depth", "ngram"), [(0, 1), (3, 0)])
def test_settings_without_meaning_are_refused(depth: int, ngram: int) -> None:
    with pytest.raises(UserError, match=f"depth and ngram of at least 1, given {depth} and {ngram}"):
        PromptLookup(depth, ngram)
