"""Cost-aware trees that copy from the text: known trees, plain texts, and heads that must beat the copies."""

from dataclasses import replace

import pytest
import torch

from eyas.inference.copies import Copy
from eyas.inference.cost_aware_tree import CostAwareTree, Pricing
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.paced_drafting import PacedDrafting
from eyas.inference.request import Generation
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.tests.inference.costs import FREE, PLAIN, costs, generate_ragged, unchanged
from eyas.tests.inference.heads import THREE, counted_steps, fixed_head, greedy, random_prompt, soften, table_head
from eyas.tests.toys import tiny_head, tiny_target

# With weights this small the next token depends on the last one alone: texts run in circles.
TARGET = tiny_target(vocab_size=13, layers=2, aux_layers=(0, 1, 2), initializer_range=0.02)
PROMPTS = [random_prompt(length, seed=length, vocab_size=13) for length in (2, 6, 11)]
TEXTS = [[*prompt, *greedy(TARGET, prompt, 90)] for prompt in PROMPTS]
HEADS: dict[str, DraftHead] = {
    "random": soften(tiny_head(TARGET, draft_vocab_size=13)),
    "oracle": table_head(TARGET, TEXTS),
    "wrong at every third": table_head(TARGET, TEXTS, flawed=True),
}
COPYING = CostAwareTree(4, 3, 9, unchanged(0.9), costs(node=0.3, feed=0.3, level=0.3))
WIDE = tiny_target(layers=3, aux_layers=(0, 1, 3))
DEAR_HEAD = CostAwareTree(4, 3, 9, unchanged(0.9), costs(node=0.3, feed=2 * PLAIN, level=PLAIN))


def generate(head: DraftHead, maker: CostAwareTree, *, temperature: float = 0.0) -> list[Generation]:
    return generate_ragged(TARGET, PROMPTS, head, maker, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("maker", [COPYING, DEAR_HEAD, replace(FREE, ngram=2)], ids=["copying", "dear head", "free"])
@pytest.mark.parametrize("name", HEADS)
def test_the_text_is_that_of_plain_decoding(name: str, maker: CostAwareTree, temperature: float) -> None:
    found = generate(HEADS[name], maker, temperature=temperature)
    for number, (prompt, generation) in enumerate(zip(PROMPTS, found, strict=True)):
        sampling = Sampling(temperature, seed=number)
        plain = Engine(TARGET).generate(GenerationRequest(prompt, 80 - 20 * number, sampling=sampling))
        assert generation.token_ids == plain.token_ids
        if temperature == 0:
            assert generation.stats.tau > 2.0, "circles are guessed right, whatever the head"


def test_copies_are_worth_more_than_none_and_less_than_the_truth() -> None:
    head = HEADS["wrong at every third"]
    without, copying = (generate(head, replace(COPYING, ngram=ngram)) for ngram in (0, 5))
    for alone, both in zip(without, copying, strict=True):
        assert both.stats.tau > alone.stats.tau + 0.3


def test_a_head_that_costs_more_than_it_adds_to_the_copies_rests_while_they_go_on() -> None:
    with counted_steps(HEADS["random"]) as steps:
        generation = Engine(TARGET, HEADS["random"], DEAR_HEAD).generate(GenerationRequest(PROMPTS[1], 80))
    drafted = [made for made in generation.rounds[1:] if made.drafted]
    assert generation.stats.tau > 2.0
    assert len(drafted) > len(generation.rounds) / 2
    assert len(steps) < len(generation.rounds) / 2, "the head is fed in probes only"


def test_a_copy_competes_with_the_heads_candidates() -> None:
    """The head says .6, .3 and .05 for 5, 6 and 7; ten seconds a plain round, two a node, no level."""
    maker = CostAwareTree(1, 3, 3, unchanged(), costs(node=2.0))
    drafting = EagleDrafting(fixed_head(WIDE, THREE), maker)
    drafting.join([(1, 2)] * 2, [Sampling()] * 2, capacity=8)
    drafting.extend(0, [[2]] * 2, WIDE.forward(torch.tensor([[1]] * 2)))
    priced = Pricing(maker, drafting.samplings, [1.0, 1.0], [Copy((9,), 5), None]).draw(drafting, [2, 2])
    first, second = priced.rows
    # Row 0: 9 with .81, then 5 with .6 * .19; row 1: .6 and .3. One node: 2 + 1.41 in 12, two: 2 + .924 + .9 in 14.
    assert first.tree.tokens_N.tolist() == [2, 9]
    assert first.of_head_N == (False, False)
    assert float(first.tree.scores_N[1].exp()) == pytest.approx(0.81)
    assert first.promised == 0.0
    assert second.tree.tokens_N.tolist() == [2, 5]
    assert second.of_head_N == (False, True)
    assert second.promised == pytest.approx(0.6, abs=1e-4)
    # Without the head only row 0 has a candidate: (2 + .9) / 12 is more than 2 / 10 with none.
    assert priced.without.rate == pytest.approx(2.9 / 12)
    assert priced.seconds == pytest.approx(12.0)


def test_a_row_with_fewer_candidates_has_a_smaller_tree() -> None:
    copies = [Copy((3, 4, 5), 5), Copy((6,), 5), None]
    maker = CostAwareTree(4, 3, 9, unchanged(), costs())
    pricing = Pricing(maker, [Sampling()] * 3, [1.0] * 3, copies)
    assert [tree.tokens_N.tolist() for tree in pricing.copy([1, 1, 2])] == [[1, 3, 4, 5], [1, 6], [2]]


@pytest.mark.parametrize(
    ("copies", "trust", "dear"),
    [
        # A copy that is right in 90 of 100: 1.9 tokens in ten seconds. The head adds .1 * .6 * (1 + .5) = .09.
        ([Copy((9,), 5)], 1.0, 10 * 0.09 / 1.9),
        # Trusted half, .1 * .3 * (1 + .25) = .0375.
        ([Copy((9,), 5)], 0.5, 10 * 0.0375 / 1.9),
        # A row beside it without a copy, where the head adds .6 * 1.5 = .9: 2.9 tokens in ten seconds, .99 more.
        ([Copy((9,), 5), None], 1.0, 10 * 0.99 / 2.9),
    ],
)
def test_beside_a_likely_copy_the_head_is_asked_only_if_it_is_cheap(
    copies: list[Copy | None], trust: float, dear: float
) -> None:
    rows = len(copies)

    def asks(feed: float, given: list[Copy | None]) -> bool:
        maker = CostAwareTree(4, 3, 9, unchanged(0.6, 0.5), costs(feed=feed))
        return Pricing(maker, [Sampling()] * rows, [trust] * rows, given).asks_the_head()

    assert asks(0.98 * dear, copies)
    assert not asks(1.02 * dear, copies)
    assert asks(100.0, [None] * rows), "with nothing to copy a session rests or asks, but skips no rounds"


def test_rounds_of_sure_copies_do_without_the_head_and_what_they_committed_is_fed_later() -> None:
    """Circles after a text of its own: the head is asked while they are new and between them, never in a rest."""
    maker = CostAwareTree(4, 3, 9, unchanged(0.6), costs(node=0.3, feed=2.0))
    head = HEADS["oracle"]
    with counted_steps(head) as steps:
        (generation,) = Engine(TARGET, head, maker).generate([GenerationRequest(PROMPTS[2], 80)])
    assert list(generation.token_ids) == TEXTS[2][len(PROMPTS[2]) :][:80]
    assert generation.stats.tau > 3.0
    assert 2 <= len(steps) < len(generation.rounds)


def test_a_round_whose_rows_have_all_ended_is_not_counted_for_those_that_come_after() -> None:
    maker = CostAwareTree(4, 3, 9, unchanged(0.6), costs(feed=2.0))
    drafting = PacedDrafting(EagleDrafting(fixed_head(WIDE, THREE), maker), maker)

    def join(prompt: tuple[int, ...], first: int) -> None:
        drafting.join([prompt], [Sampling()], capacity=40)
        drafting.extend(0, [[*prompt[1:], first]], WIDE.forward(torch.tensor([prompt])))

    join((1, 2, 3), 4)
    drafting.draft([4])
    drafting.leave(0)  # it ended with this round: nobody says what it emitted
    circle = (1, 2, 3, 4, 5, 6) * 3
    join(circle, 1)
    with counted_steps(drafting.drafting.head) as steps:
        (tree,) = drafting.draft([1])
    assert tree.tokens_N.tolist() == [1, 2, 3, 4, 5]
    assert steps == [], "the copy is too likely to ask the head"
    drafting.extend(0, [[2, 3]], WIDE.forward(torch.tensor([[1, 2]])))
    assert drafting.pace.rounds == 0
