"""Cost-aware trees: known probabilities give known trees, losing speculation rests, and the text is always plain's."""

import pytest
import torch

from eyas.inference.cost_aware_tree import CostAwareTree, Pricing
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.pace import FIRST_REST
from eyas.inference.request import Generation
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.tests.inference.costs import DEAR, FREE, PLAIN, costs, generate_ragged, unchanged
from eyas.tests.inference.heads import THREE, counted_steps, fixed_head, greedy, random_prompt, soften, table_head
from eyas.tests.toys import tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
PROMPTS = [random_prompt(length, seed=40 + length) for length in (1, 7, 33)]
TEXTS = [[*prompt, *greedy(TARGET, prompt, 90)] for prompt in PROMPTS]
HEADS: dict[str, DraftHead] = {
    "random": soften(tiny_head(TARGET)),
    "oracle": table_head(TARGET, TEXTS),
    "wrong at every third": table_head(TARGET, TEXTS, flawed=True),
}
LIKELY = CostAwareTree(5, 3, 9, unchanged(0.9), costs(node=0.3, feed=0.2, level=0.2), ngram=0)
BELIEVING = CostAwareTree(5, 3, 9, unchanged(), costs(node=1.0, feed=0.5, level=0.2), ngram=0)
MAKERS = {"free": FREE, "likely": LIKELY, "dear": DEAR}


def generate(head: DraftHead, maker: CostAwareTree, *, temperature: float = 0.0) -> list[Generation]:
    return generate_ragged(TARGET, PROMPTS, head, maker, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", HEADS)
def test_the_text_is_that_of_plain_decoding(name: str, maker: CostAwareTree, temperature: float) -> None:
    found = generate(HEADS[name], maker, temperature=temperature)
    for number, (prompt, generation) in enumerate(zip(PROMPTS, found, strict=True)):
        sampling = Sampling(temperature, seed=number)
        plain = Engine(TARGET).generate(GenerationRequest(prompt, 80 - 20 * number, sampling=sampling))
        assert generation.token_ids == plain.token_ids
        if temperature == 0 and maker is not DEAR:
            assert generation.stats.tau > {"random": 0.99, "oracle": 4.0, "wrong at every third": 1.8}[name]


def test_an_oracle_takes_the_deepest_tree_and_no_node_beside_the_right_ones() -> None:
    for generation in generate(HEADS["oracle"], LIKELY):
        for made in generation.rounds[:-1]:
            assert (made.drafted, made.accepted) == (LIKELY.depth, LIKELY.depth)


def test_where_it_loses_it_rests_and_the_head_is_not_even_fed() -> None:
    head = HEADS["random"]
    with counted_steps(head) as steps:
        generation = Engine(TARGET, head, DEAR).generate(GenerationRequest(PROMPTS[1], 60))
    assert list(generation.token_ids) == greedy(TARGET, PROMPTS[1], 60)
    assert {made.drafted for made in generation.rounds} == {0}
    # A round with the head costs what two plain ones do, a token more than it brings: its credit lasts for two rounds,
    # that of a probe for one. The prompt is fed, a token before the second round, before a probe what the rest missed.
    assert steps == [len(PROMPTS[1]), 1, FIRST_REST + 1, 2 * FIRST_REST + 1]


def test_what_the_head_promises_is_not_believed_for_long() -> None:
    """A head that is sure of nonsense: without a correction it would draft five nodes in every round."""
    logits = torch.zeros(97)
    logits[next(token for token in range(97) if token not in TEXTS[1])] = 20.0
    generation = Engine(TARGET, fixed_head(TARGET, logits), BELIEVING).generate(GenerationRequest(PROMPTS[1], 80))
    assert list(generation.token_ids) == greedy(TARGET, PROMPTS[1], 80)
    drafted = [made.drafted for made in generation.rounds]
    assert drafted[0] == 5
    assert 0 in drafted[:20]
    assert sum(nodes > 0 for nodes in drafted) < 30


def test_a_probe_finds_that_speculation_pays_again() -> None:
    """Wrong for a while, then right: the session must not stay off."""
    prompt = PROMPTS[1]
    reply = greedy(TARGET, prompt, 150)
    head = table_head(TARGET, [[*prompt, *reply]])
    head.texts = [[*prompt, *((token + 1) % 97 for token in reply[:40]), *reply[40:]]]
    generation = Engine(TARGET, head, BELIEVING).generate(GenerationRequest(prompt, 140))
    assert list(generation.token_ids) == reply[:140]
    places, place = [], 1
    for made in generation.rounds:
        places.append((place, made))
        place += len(made.tokens)
    early, late = ([made for at, made in places if low < at < high] for low, high in ((0, 38), (90, 130)))
    assert sum(made.accepted for made in early) == 0
    assert sum(made.drafted == 0 for made in early) >= 8
    assert sum(made.accepted for made in late) > 2 * len(late)


def drawn(maker: CostAwareTree, *, trust: float = 1.0, rows: int = 1) -> tuple[list[int], float, int]:
    """Return (depths of the nodes, expected acceptances, steps of the head) of a tree of the three-token head."""
    head = fixed_head(TARGET, THREE)
    drafting = EagleDrafting(head, maker)
    drafting.join([(1, 2)] * rows, [Sampling()] * rows, capacity=8)
    out = TARGET.forward(torch.tensor([[1]] * rows))
    drafting.extend(0, [[2]] * rows, out)
    with counted_steps(head) as steps:
        priced = Pricing(maker, drafting.samplings, [trust] * rows, [None] * rows).draw(drafting, [2] * rows)
    drafting.cache.discard_tree()
    first = priced.rows[0].tree
    return first.depths_N[1:].tolist(), float(first.scores_N[1:].exp().sum()), len(steps)


def tree(depth: int = 3, *, node: float, level: float, feed: float = 0.0, hit: float = 0.6) -> CostAwareTree:
    return CostAwareTree(depth, 3, 12, unchanged(hit), costs(node=node, feed=feed, level=level))


@pytest.mark.parametrize(
    ("maker", "depths", "expected", "steps"),
    [
        # Level 1: 1.6/12 = .133, 1.9/14 = .136, 1.95/16. Level 2 promises .36 and .18: 2.26/16.1 = .140 with three
        # nodes, so it is drawn, and keeps its promise. Level 3 promises .216: 2.26/16.2, 2.476/18.2 = .136 are less.
        (tree(node=2.0, level=0.1), [1, 1, 2], 1.26, 1),
        # A level costs as much as a plain round: 2.26/26 < 1.9/14, so the head takes no step at all.
        (tree(node=2.0, level=PLAIN), [1, 1], 0.9, 0),
        # A node costs ten plain rounds.
        (tree(node=100.0, level=0.0), [], 0.0, 0),
        # Nothing costs anything: .6 .36 .3 .216 .18 .18 .108 .108 .108 .09 .054 .054, all levels.
        (tree(node=0.0, level=0.0), [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3], 2.358, 2),
    ],
    ids=["two levels", "dear levels", "dear nodes", "free"],
)
def test_known_probabilities_and_costs_give_a_known_tree(
    maker: CostAwareTree, depths: list[int], expected: float, steps: int
) -> None:
    found, gain, taken = drawn(maker)
    assert sorted(found) == depths
    assert taken == steps
    assert gain == pytest.approx(expected, abs=0.002)


def test_little_trust_makes_smaller_trees_and_rows_count_together() -> None:
    maker = tree(node=2.0, level=0.1)
    assert drawn(maker, trust=0.1)[0] == []
    assert sorted(drawn(maker, trust=0.7)[0]) == [1]  # .42: 1.42/12 = .118; .42 and .21: 1.63/14 = .116
    assert sorted(drawn(maker, rows=4)[0]) == [1, 1, 2], "four times the tokens in the same time, whatever the tree"


def test_numbers_that_make_no_tree_are_refused() -> None:
    with pytest.raises(UserError, match="has 3 candidates"):
        CostAwareTree(1, 3, 4, unchanged(), costs())
    maker = CostAwareTree(2, 2, 4, unchanged(), costs(rows=2))
    with pytest.raises(UserError, match="knows 1 to 2 rows side by side, not 3"):
        generate_three(maker)


def generate_three(maker: CostAwareTree) -> None:
    Engine(TARGET, HEADS["random"], maker, batch=3).generate([GenerationRequest(prompt, 4) for prompt in PROMPTS])
