"""Verification: the greedy walk by hand, and sampling that leaves the target's distribution exactly as it is."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.inference.verify import VERIFIERS, Verification, Verifier
from eyas.models.draw import draw

V = 8
SAMPLING = {"greedy": Sampling(), "sampling": Sampling(temperature=1.0)}
#        0
#      / | \
#     1  2  3      tokens 4, 1, 6
#    / \     \
#   4   5     6    tokens 4, 2, 0
TREE = DraftTree(
    torch.tensor([3, 4, 1, 6, 4, 2, 0]),
    torch.tensor([-1, 0, 0, 0, 1, 1, 3]),
    torch.tensor([0, 1, 1, 1, 2, 2, 2]),
    torch.zeros(7),
)
CHAIN = DraftTree.chain(3, [4, 2, 5], [0.0, 0.0, 0.0])


def coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wanting(tokens: list[int]) -> Tensor:
    """Return logits_NV whose argmax (and nearly whole mass) at node n is tokens[n]."""
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize(
    ("wanted", "path", "bonus"),
    [
        ([5, 0, 0, 0, 0, 0, 0], (0,), 5),  # nobody drafted 5
        ([1, 0, 7, 0, 0, 0, 0], (0, 2), 7),  # a leaf
        ([4, 2, 0, 0, 0, 6, 0], (0, 1, 5), 6),
        ([4, 4, 0, 0, 3, 0, 0], (0, 1, 4), 3),
        ([6, 0, 0, 0, 0, 0, 1], (0, 3, 6), 1),
        ([6, 0, 0, 2, 0, 0, 1], (0, 3), 2),  # token 2 is drafted below node 1 only
    ],
)
def test_the_walk_follows_the_target_as_far_as_it_was_drafted(
    name: str, wanted: list[int], path: tuple[int, ...], bonus: int
) -> None:
    found = VERIFIERS[name](TREE, wanting(wanted), SAMPLING[name], coins())
    assert found == Verification(path, bonus)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_root_alone_is_one_step_of_plain_decoding(name: str) -> None:
    found = VERIFIERS[name](DraftTree.root(3), wanting([6]), SAMPLING[name], coins())
    assert found == Verification((0,), 6)


def test_a_greedy_tie_goes_to_the_lower_id_as_in_plain_decoding() -> None:
    logits = torch.zeros(7, V)
    logits[0, [4, 6]] = 1.0
    logits[1, [2, 4]] = 1.0
    found = VERIFIERS["greedy"](TREE, logits, Sampling(), coins())
    assert found == Verification((0, 1, 5), 0)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("poison", [torch.nan, -torch.nan], ids=str)
def test_nan_logits_are_never_accepted(name: str, poison: float) -> None:
    for node, wanted in ((0, [4, 2, 0, 0, 0, 6, 0]), (1, [4, 2, 0, 0, 0, 6, 0]), (5, [4, 2, 0, 0, 0, 6, 0])):
        for column in (0, 4, 7):
            logits = wanting(wanted)
            logits[node, column] = poison
            with pytest.raises(FloatingPointError, match="the target produced NaN logits; nothing of this round"):
                VERIFIERS[name](TREE, logits, SAMPLING[name], coins())
    elsewhere = wanting([4, 2, 0, 0, 0, 6, 0])
    elsewhere[6] = poison
    assert VERIFIERS[name](TREE, elsewhere, SAMPLING[name], coins()).path == (0, 1, 5)


def test_a_draft_that_the_target_cannot_sample_is_never_accepted() -> None:
    logits = torch.randn(7, V).sort(dim=-1, descending=True).values  # token 0 is the likeliest everywhere, 7 the least
    for seed in range(200):
        assert VERIFIERS["sampling"](TREE, logits, Sampling(1.0, top_k=1), coins(seed)) == Verification((0,), 0)
        found = VERIFIERS["sampling"](TREE, logits, Sampling(1.0, top_k=3), coins(seed))
        assert found.path in ((0,), (0, 2))
        assert found.bonus_token < 3


def test_one_coin_is_drawn_per_emitted_token() -> None:
    logits = torch.randn(7, V)
    lengths = set()
    for seed in range(60):
        generator, counted = coins(seed), coins(seed)
        found = VERIFIERS["sampling"](TREE, logits, Sampling(1.0), generator)
        torch.rand(len(found.path), generator=counted, dtype=torch.float64)
        assert torch.equal(generator.get_state(), counted.get_state())
        lengths.add(len(found.path))
    assert lengths == {1, 2, 3}


def pair_counts(verify: Verifier, tree: DraftTree, table: Tensor, sampling: Sampling, count: int) -> Tensor:
    """Return how often each pair of first two tokens came out, [V, V].

    `table` is a target known by hand: row x holds the logits after token x; nothing earlier matters. A round that
    emits one token is followed by the target's own draw for the second.
    """
    logits_NV = table[tree.tokens_N]
    counts = torch.zeros(V, V)
    generator = coins(1)
    for _ in range(count):
        found = verify(tree, logits_NV, sampling, generator)
        tokens = [*tree.tokens_N[list(found.path[1:])].tolist(), found.bonus_token]
        if len(tokens) == 1:
            coin = torch.rand(1, generator=generator, dtype=torch.float64)
            tokens.append(int(draw(sampling.probabilities(table[tokens[0]])[None], coin)))
        counts[tokens[0], tokens[1]] += 1
    return counts


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of counts under expected ones; cells under 5 are pooled, impossible cells must be empty."""
    assert float(counts[expected == 0].sum()) == 0
    small = (expected < 5) & (expected > 0)
    cells, truth = counts[expected >= 5], expected[expected >= 5]
    if small.any():
        cells, truth = torch.cat((cells, counts[small].sum()[None])), torch.cat((truth, expected[small].sum()[None]))
    return float(chisquare(cells.double().numpy(), truth.double().numpy()).pvalue)


def table_and_truth(sampling: Sampling, count: int) -> tuple[Tensor, Tensor]:
    table = 1.5 * torch.randn(V, V, generator=coins(9))
    first = sampling.probabilities(table[3])
    second = torch.stack([sampling.probabilities(row) for row in table])
    return table, count * first[:, None] * second


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(1.3, top_k=6, top_p=0.85)], ids=["plain", "top-k and top-p"]
)
def test_sampling_leaves_the_targets_distribution_as_it_is(tree: DraftTree, sampling: Sampling) -> None:
    count = 1000
    table, truth = table_and_truth(sampling, count)
    counts = pair_counts(VERIFIERS["sampling"], tree, table, sampling, count)
    assert p_value(counts, truth) > 1e-3


def lenient(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, generator: torch.Generator) -> Verification:
    """A biased verifier of the kind engines offer: accept a draft whenever its probability is above a threshold."""
    path = [0]
    while True:
        p = sampling.probabilities(logits_NV[path[-1]])
        children = [i for i in range(1, len(tree)) if int(tree.parents_N[i]) == path[-1]]
        liked = [i for i in children if float(p[tree.tokens_N[i]]) > 0.25]
        if not liked:
            coin = torch.rand(1, generator=generator, dtype=torch.float64)
            return Verification(tuple(path), int(draw(p[None], coin)))
        path.append(liked[0])


def redrawn(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, generator: torch.Generator) -> Verification:
    """Another one: the child test is right, but after a rejection the bonus is drawn anew from the whole of p."""
    found = VERIFIERS["sampling"](tree, logits_NV, sampling, generator)
    coin = torch.rand(1, generator=generator, dtype=torch.float64)
    p = sampling.probabilities(logits_NV[found.path[-1]])
    return Verification(found.path, int(draw(p[None], coin)))


@pytest.mark.parametrize("biased", [lenient, redrawn])
def test_the_test_of_the_distribution_finds_biased_verifiers(
    biased: Callable[[DraftTree, Tensor, Sampling, torch.Generator], Verification],
) -> None:
    count = 1000
    table, truth = table_and_truth(Sampling(1.0), count)
    assert p_value(pair_counts(biased, TREE, table, Sampling(1.0), count), truth) < 1e-6
