"""Verification: walks by hand, the batch against the plain references, and the target's distribution left as it is."""

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.inference.verify import DRAWN, VERIFIERS, Rule, Verification, VerifyBatch
from eyas.inference.verify_reference import REFERENCES
from eyas.models.draw import draw
from eyas.tests.inference.verify_toys import (
    CHAIN,
    DRAFT_VV,
    LIKELY,
    ROOT,
    TARGET_VV,
    TREE,
    V,
    coins,
    p_value,
    pair_truth,
    rounds,
    table,
    uniforms,
)

WALKS = ["greedy", "sampling"]
SAMPLING = {"greedy": Sampling(), "sampling": Sampling(1.0), "leviathan": Sampling(1.0), "block": Sampling(1.0)}


def verify(
    name: str,
    tree: DraftTree,
    logits_NV: Tensor,
    sampling: Sampling | None = None,
    seed: int = 0,
    rule: Rule | None = None,
) -> Verification:
    """Return the verification of one tree."""
    thrown = uniforms(1, len(tree), generator=coins(seed))
    batch = VerifyBatch.of([tree], logits_NV[None], [sampling or SAMPLING[name]], thrown, [rule])
    (found,) = VERIFIERS[name](batch)
    return found


def drawn_chain(*tokens: int, logits_VV: Tensor = DRAFT_VV, sampling: Sampling | None = None) -> DraftTree:
    """Return a chain with the distributions of a draft model's table."""
    q_VV = table(sampling or Sampling(1.0), logits_VV)
    before = torch.tensor([ROOT, *tokens[:-1]])
    return DraftTree.chain(ROOT, list(tokens), [0.0] * len(tokens), drawn_KV=q_VV[before])


def wanting(tokens: list[int]) -> Tensor:
    """Return logits_NV whose argmax (and nearly whole mass) at node n is tokens[n]."""
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


def test_every_verifier_has_a_plain_reference_and_settings_here() -> None:
    assert VERIFIERS.keys() == REFERENCES.keys() == SAMPLING.keys()
    assert set(VERIFIERS) == {*WALKS, *DRAWN}


@pytest.mark.parametrize("name", WALKS)
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
    assert verify(name, TREE, wanting(wanted)) == Verification(path, bonus)


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawn_chain_that_the_target_is_sure_of_is_accepted_up_to_the_first_it_cannot_say(name: str) -> None:
    chain = drawn_chain(4, 2, 5)
    assert verify(name, chain, wanting([4, 2, 5, 7])) == Verification((0, 1, 2, 3), 7)
    assert verify(name, chain, wanting([4, 2, 6, 7])) == Verification((0, 1, 2), 6)
    assert verify(name, chain, wanting([1, 2, 5, 7])) == Verification((0,), 1)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_root_alone_is_one_step_of_plain_decoding(name: str) -> None:
    root = DraftTree.root(ROOT)
    if name in DRAWN:
        root = DraftTree(root.tokens_N, root.parents_N, root.depths_N, root.scores_N, torch.zeros(0, V).double())
    assert verify(name, root, wanting([6])) == Verification((0,), 6)


def test_a_greedy_tie_goes_to_the_lower_id_as_in_plain_decoding() -> None:
    logits = torch.zeros(7, V)
    logits[0, [4, 6]] = 1.0
    logits[1, [2, 4]] = 1.0
    for rule in (None, lambda _path, logits_V: logits_V):
        assert verify("greedy", TREE, logits, rule=rule) == Verification((0, 1, 5), 0)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("poison", [torch.nan, -torch.nan], ids=str)
def test_nan_logits_are_never_accepted(name: str, poison: float) -> None:
    tree = drawn_chain(4, 2, 5) if name in DRAWN else TREE
    wanted = [4, 2, 5, 6] if name in DRAWN else [4, 2, 0, 0, 0, 6, 0]
    for node, column in product((0, 1, 3 if name in DRAWN else 5), (0, 4, 7)):
        logits = wanting(wanted)
        logits[node, column] = poison
        with pytest.raises(FloatingPointError, match="the target produced NaN logits; nothing of this round"):
            verify(name, tree, logits)
    nothing = wanting(wanted)
    nothing[0] = float("-inf")
    with pytest.raises(FloatingPointError):
        verify(name, tree, nothing)


@pytest.mark.parametrize("name", WALKS)
def test_nan_off_the_path_harms_nobody(name: str) -> None:
    logits = wanting([4, 2, 0, 0, 0, 6, 0])
    logits[6] = torch.nan
    assert verify(name, TREE, logits).path == (0, 1, 5)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("settings", [Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.3, 6, 0.8)], ids=str)
def test_a_ragged_batch_of_different_settings_equals_the_plain_reference_row_by_row(
    name: str, settings: Sampling
) -> None:
    others = [settings, Sampling(0.9, top_p=0.7), Sampling(1.5), Sampling(0.8, top_k=2)]
    generator, seen = coins(4), set()
    for _ in range(40):
        samplings = [others[int(i)] if name != "greedy" else Sampling() for i in torch.randint(4, (7,))]
        if name in DRAWN:
            trees = []
            for sampling in samplings:
                q_VV, tokens = table(sampling, DRAFT_VV), [ROOT]
                for _ in range(int(torch.randint(0, 5, ()))):
                    tokens.append(int(draw(q_VV[tokens[-1]][None], uniforms(1, generator=generator))))
                drawn = q_VV[torch.tensor(tokens[:-1], dtype=torch.int64)]
                trees.append(DraftTree.chain(ROOT, tokens[1:], [0.0] * (len(tokens) - 1), drawn_KV=drawn))
        else:
            trees = [(TREE, CHAIN, DraftTree.root(ROOT))[int(i)] for i in torch.randint(3, (7,))]
        widest = max(map(len, trees))
        logits = 1.5 * torch.randn(7, widest, V)
        thrown = uniforms(7, widest, generator=generator)
        found = VERIFIERS[name](VerifyBatch.of(trees, logits, samplings, thrown))
        for r, (tree, sampling) in enumerate(zip(trees, samplings, strict=True)):
            assert found[r] == REFERENCES[name](tree, logits[r, : len(tree)], sampling, thrown[r].tolist())
            seen.add(len(found[r].path))
    assert {1, 2, 3} <= seen


@pytest.mark.parametrize("name", WALKS)
def test_rules_see_the_path_down_to_each_node(name: str) -> None:
    """A rule that makes the target want the sum of the path's tokens: the walk is known by hand."""

    def rule(path: list[int], logits_V: Tensor) -> Tensor:
        return wanting([{(): 4, (4,): 2, (4, 2): 7}[tuple(path)]])[0]

    assert verify(name, TREE, torch.zeros(7, V), rule=rule) == Verification((0, 1, 5), 7)


@pytest.mark.parametrize("name", DRAWN)
def test_rules_change_every_node_of_a_drawn_chain(name: str) -> None:
    def rule(path: list[int], logits_V: Tensor) -> Tensor:
        return wanting([{(): 4, (4,): 2, (4, 2): 7, (4, 2, 5): 0}[tuple(path)]])[0]

    assert verify(name, drawn_chain(4, 2, 5), torch.zeros(4, V), rule=rule) == Verification((0, 1, 2), 7)


SETTINGS = {
    "T 0.7 beside T 1.0 with top-k 3": (Sampling(0.7), Sampling(1.0, top_k=3)),
    "T 1.0 beside T 0.7 with top-p 0.8": (Sampling(1.0), Sampling(0.7, top_p=0.8)),
}
ROUNDS = 200_000


@pytest.mark.parametrize("pair", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    ("name", "tree"),
    [("sampling", CHAIN), ("sampling", LIKELY), ("leviathan", None), ("block", None)],
    ids=["sampling chain", "sampling tree", "leviathan", "block"],
)
def test_two_requests_of_one_batch_each_get_the_targets_exact_distribution(
    name: str, tree: DraftTree | None, pair: tuple[Sampling, ...]
) -> None:
    counts, accepted = rounds(VERIFIERS[name], tree, pair, ROUNDS)
    assert accepted > 0.25, "drafts that are never accepted test nothing"
    for counted, sampling in zip(counts, pair, strict=True):
        assert p_value(counted, pair_truth(sampling)) > 1e-3


def test_block_verification_accepts_more_than_leviathan_on_average() -> None:
    for sampling in (Sampling(0.7), Sampling(1.0)):
        accepted = {name: rounds(VERIFIERS[name], None, (sampling,), 40_000)[1] for name in DRAWN}
        assert accepted["block"] > accepted["leviathan"] + 0.01


@pytest.mark.parametrize("seed", range(20))
def test_block_verification_never_accepts_less_on_average_whatever_the_models(seed: int) -> None:
    """Exact means over all drafts and coins of a chain of two: the sums of E[accepted] are worked out, not sampled."""
    generator = coins(seed)
    p, q = (torch.randn(2, 3, 3, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1) for _ in range(2))
    leviathan = block = 0.0
    for x, y in product(range(3), repeat=2):
        weight = float(q[0, 0, x] * q[1, x, y])
        first, second = float(p[0, 0, x] / q[0, 0, x]), float(p[1, x, y] / q[1, x, y])
        leviathan += weight * min(first, 1) * (1 + min(second, 1))
        joint = min(first, 1)
        both = min(joint * second, 1)
        left = float((joint * p[1, x] - q[1, x]).clamp(min=0).sum())
        bar = left / (left + 1 - joint) if left + 1 - joint > 0 else 0.0
        block += weight * (2 * both + (1 - both) * bar)
    assert block >= leviathan - 1e-12


@pytest.mark.parametrize("name", ["sampling", *DRAWN])
@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=3), Sampling(0.7, top_p=0.8), Sampling(1.0, 3, 0.8)], ids=str)
def test_coins_of_zero_and_on_the_borders_never_emit_a_token_of_probability_zero(name: str, sampling: Sampling) -> None:
    p_VV = table(sampling)
    borders = sorted({0.0, *p_VV.cumsum(-1).flatten().tolist()})
    forced = [coin for border in borders for coin in (border, border - 2**-53, border + 2**-53) if 0 <= coin < 1]
    forced = [0.0, 1 - 2**-53, *forced]
    trees = [TREE, LIKELY, CHAIN] if name == "sampling" else [drawn_chain(a, b, 5) for a in range(V) for b in range(V)]
    for tree in trees:
        rows = len(forced)
        width = len(tree)
        thrown = torch.tensor(forced, dtype=torch.float64)[:, None].repeat(1, width)
        if name in DRAWN:  # acceptance coins of zero, so that the forced coin decides the bonus
            thrown[:, :-1] = 0.0
        logits = TARGET_VV[tree.tokens_N].expand(rows, -1, -1)
        for found in VERIFIERS[name](VerifyBatch.of([tree] * rows, logits, [sampling] * rows, thrown)):
            tokens = [ROOT, *tree.tokens_N[list(found.path[1:])].tolist(), found.bonus_token]
            assert all(float(p_VV[a, b]) > 0 for a, b in pairwise(tokens))


def lenient(batch: VerifyBatch) -> list[Verification]:
    """A biased verifier of the kind engines offer: accept a draft whenever its probability is above a threshold."""
    made = []
    for r in range(len(batch.samplings)):
        node, path = 0, [0]
        while True:
            p = TABLES[batch.samplings[r]][int(batch.trees.tokens_RN[r, node])]
            below = (batch.trees.parents_RN[r] == node).nonzero().flatten().tolist()
            liked = [i for i in below if float(p[batch.trees.tokens_RN[r, i]]) > 0.25]
            if not liked:
                token = int(draw(p[None], batch.coins_RC[r, len(path) - 1 :][:1]))
                made.append(Verification(tuple(path), token))
                break
            node = liked[0]
            path.append(node)
    return made


def redrawn(batch: VerifyBatch) -> list[Verification]:
    """Another one: the child test is right, but the bonus is drawn anew from the whole of p."""
    made = []
    for r, found in enumerate(VERIFIERS["sampling"](batch)):
        p = TABLES[batch.samplings[r]][int(batch.trees.tokens_RN[r, found.path[-1]])]
        made.append(Verification(found.path, int(draw(p[None], batch.coins_RC[r, -1:]))))
    return made


def without_residual(batch: VerifyBatch) -> list[Verification]:
    """The classic one for drawn chains: the right test, then a bonus from p instead of relu(p - q)."""
    made = []
    for r, found in enumerate(VERIFIERS["leviathan"](batch)):
        p = TABLES[batch.samplings[r]][int(batch.trees.tokens_RN[r, found.path[-1]])]
        made.append(Verification(found.path, int(draw(p[None], batch.coins_RC[r, -1:]))))
    return made


TABLES = {sampling: table(sampling) for sampling in (Sampling(1.0), Sampling(0.7))}


@pytest.mark.parametrize(
    ("biased", "tree"),
    [(lenient, TREE), (redrawn, TREE), (without_residual, None)],
    ids=["lenient", "redrawn", "without residual"],
)
def test_the_test_of_the_distribution_finds_biased_verifiers(
    biased: Callable[[VerifyBatch], list[Verification]], tree: DraftTree | None
) -> None:
    counts, _ = rounds(biased, tree, tuple(TABLES), 5000)
    for counted, sampling in zip(counts, TABLES, strict=True):
        assert p_value(counted, pair_truth(sampling)) < 1e-6


def test_one_coin_decides_one_token() -> None:
    """A deterministic tree uses coin i for the i-th token emitted, so plain draws with the same coins say the same."""
    lengths = set()
    for seed in range(60):
        thrown = uniforms(1, 7, generator=coins(seed))
        batch = VerifyBatch.of([LIKELY], TARGET_VV[LIKELY.tokens_N][None], [Sampling(1.0)], thrown)
        (found,) = VERIFIERS["sampling"](batch)
        emitted = [*LIKELY.tokens_N[list(found.path[1:])].tolist(), found.bonus_token]
        text = [ROOT]
        for coin in thrown[0, : len(emitted)]:
            text.append(int(draw(table(Sampling(1.0))[text[-1]][None], coin[None])))
        assert text[1:] == emitted
        lengths.add(len(emitted))
    assert lengths == {1, 2, 3}


def test_deterministic_and_drawn_trees_do_not_mix_in_one_batch() -> None:
    with pytest.raises(AssertionError, match="deterministic and drawn trees are verified by different rules"):
        VerifyBatch.of([CHAIN, drawn_chain(4, 2, 5)], torch.zeros(2, 4, V), [Sampling(1.0)] * 2, torch.zeros(2, 4))
