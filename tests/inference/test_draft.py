"""Drafted trees against a brute-force search in plain Python that re-runs the head from scratch for every node."""

from dataclasses import dataclass

import pytest
import torch

from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.inference.trees import TREES
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.target import TargetOutput
from eyas.tests.inference.costs import WHOLE
from eyas.tests.inference.heads import TiedHead, feature_row, fixed_head, greedy, knowing_head, random_prompt, soften
from eyas.tests.toys import oracle_head, tiny_head, tiny_target

TARGET = tiny_target()
PROMPT = random_prompt(6, seed=4)
ROW = feature_row(TARGET, PROMPT, greedy(TARGET, PROMPT, 20))
SLOTS = 9  # committed slots; the root is token 9
SPIKY = ((0,), (2,), (4,), (2, 1), (2, 0), (4, 3), (2, 1, 0), (2, 1, 1), (4, 3, 2), (2, 1, 1, 0))
MAKERS: dict[str, list[TreeMaker]] = {
    "chain": [ChainTree(1), ChainTree(4)],
    "dynamic": [
        DynamicTree(1, 3, 2),
        DynamicTree(3, 4, 12),
        DynamicTree(5, 8, 16),
        DynamicTree(4, 1, 4),
        DynamicTree(4, 3, 30),  # the whole pool
    ],
    "static": [StaticTree(), StaticTree(SPIKY), StaticTree(((1,),))],
    "auto": [WHOLE],
}
ALL = [maker for makers in MAKERS.values() for maker in makers]


@dataclass(frozen=True)
class Candidate:
    """A path of draft tokens below the root and its log-probability."""

    path: tuple[int, ...]
    score: float


def states(*slots: int) -> TargetOutput:
    """Return the target's states of the row's first slots, once per given count, padded behind."""
    longest = max(slots)
    return TargetOutput(
        ROW.aux_hidden_TF[:longest].expand(len(slots), -1, -1), ROW.final_hidden_TD[:longest].expand(len(slots), -1, -1)
    )


def drafting_for(head: Eagle3Head, *slots: int, maker: TreeMaker | None = None) -> EagleDrafting:
    """Return a drafting state whose rows have the row's first slots committed (default: one row)."""
    slots = slots or (SLOTS,)
    head.use_embedding(TARGET.embedding)
    drafting = EagleDrafting(head, maker or ChainTree(60))
    drafting.join([tuple(ROW.input_ids_T.tolist())] * len(slots), [Sampling()] * len(slots), capacity=max(slots))
    drafting.extend(0, [ROW.input_ids_T[1 : count + 1].tolist() for count in slots], states(*slots))
    return drafting


def draw(maker: TreeMaker, head: Eagle3Head, root: int = 5) -> DraftTree:
    """Return the tree that a maker draws behind the committed slots."""
    (tree,) = drafting_for(head, maker=maker).draft([root])
    return tree


def log_probabilities(head: Eagle3Head, path: tuple[int, ...]) -> list[tuple[int, float]]:
    """Return (target id, log-probability) of every child of a path, drafting that one path from scratch."""
    drafting = drafting_for(head)
    features, logits = drafting.features_RD[None], drafting.logits_RU[0]
    for depth, token in enumerate(path, start=1):
        seen = torch.ones(1, 1, depth, dtype=torch.bool)
        features, rows = drafting.expand(features, torch.tensor([[token]]), depth=depth, tree_mask_RKN=seen)
        logits = rows[0, 0]
    ids = head.to_target_ids(torch.arange(len(logits))).tolist()
    return list(zip(ids, torch.log_softmax(logits, -1).tolist(), strict=True))


def brute_force(head: Eagle3Head, maker: DynamicTree) -> tuple[list[Candidate], list[Candidate]]:
    """Return (the chosen candidates, the whole pool), both from the best score down."""
    frontier, pool = [Candidate((), 0.0)], []
    for _ in range(maker.depth):
        level = []
        for parent in frontier:
            best = sorted(log_probabilities(head, parent.path), key=lambda child: -child[1])[: maker.top_k]
            level += [Candidate((*parent.path, token), parent.score + score) for token, score in best]
        pool += level
        frontier = sorted(level, key=lambda candidate: -candidate.score)[: maker.top_k]
    ranked = sorted(pool, key=lambda candidate: -candidate.score)
    return ranked[: maker.num_draft_tokens], ranked


def candidates(tree: DraftTree) -> list[Candidate]:
    """Return the nodes of a tree as paths, from the best score down."""
    found = []
    for node in range(1, len(tree)):
        above = tree.ancestors_NN[node].nonzero().flatten().tolist()
        found.append(Candidate(tuple(tree.tokens_N[above[1:]].tolist()), float(tree.scores_N[node])))
    return sorted(found, key=lambda candidate: -candidate.score)


@pytest.mark.parametrize("maker", MAKERS["dynamic"], ids=str)
@pytest.mark.parametrize("size", [61, 97])
def test_a_dynamic_tree_is_the_best_of_all_candidates(maker: DynamicTree, size: int) -> None:
    head = soften(tiny_head(TARGET, draft_vocab_size=size))
    expected, pool = brute_force(head, maker)
    assert len(pool) == maker.top_k + (maker.depth - 1) * maker.top_k**2
    found = candidates(draw(maker, head))
    assert [c.path for c in found] == [c.path for c in expected]
    assert [c.score for c in found] == pytest.approx([c.score for c in expected], abs=1e-4)
    if maker.top_k > 1 and maker.depth > 1:
        widths = {c.path[0] for c in found}
        assert len(widths) > 1, "a tree that does not branch tests nothing"


def test_the_whole_pool_is_a_tree() -> None:
    head = tiny_head(TARGET)
    maker = DynamicTree(3, 3, 21)
    tree = draw(maker, head)
    assert len(tree) == maker.max_nodes == 22
    assert tree.depths_N.bincount().tolist() == [1, 3, 9, 9]
    with pytest.raises(UserError):
        DynamicTree(3, 3, 22)


def test_a_chain_is_the_heads_own_greedy_continuation() -> None:
    head = soften(tiny_head(TARGET))
    path, score = (), 0.0
    for depth in range(1, 6):
        token, logp = max(log_probabilities(head, path), key=lambda child: child[1])
        path, score = (*path, token), score + logp
        tree = draw(ChainTree(depth), head)
        assert tree.tokens_N.tolist() == [5, *path]
        assert tree.parents_N.tolist() == list(range(-1, depth))
        assert float(tree.scores_N[-1]) == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("maker", ALL, ids=str)
def test_a_tree_of_width_one_is_the_chain_and_every_tree_holds_its_start(maker: TreeMaker) -> None:
    head = tiny_head(TARGET)
    chain = draw(ChainTree(maker.depth), head).tokens_N.tolist()
    tree = draw(maker, head)
    assert tree.tokens_N[0] == 5
    if not isinstance(maker, StaticTree) or (0,) in maker.paths:
        assert int(tree.tokens_N[1]) == chain[1]  # the best first draft, always the first node
    if isinstance(maker, ChainTree) or (isinstance(maker, DynamicTree) and maker.top_k == 1):
        assert tree.tokens_N.tolist() == chain


@pytest.mark.parametrize("maker", ALL, ids=str)
def test_drafting_leaves_the_committed_slots_as_they_were(maker: TreeMaker) -> None:
    drafting = drafting_for(tiny_head(TARGET), maker=maker)
    cache = drafting.cache
    keys, values = cache.keys[..., :SLOTS, :].clone(), cache.values[..., :SLOTS, :].clone()
    first, second = (drafting.draft([5])[0] for _ in range(2))
    assert (cache.lengths, cache.tree_length) == ([SLOTS], 0)
    assert torch.equal(cache.keys[..., :SLOTS, :], keys)
    assert torch.equal(cache.values[..., :SLOTS, :], values)
    assert candidates(first) == candidates(second)
    assert len(first) <= maker.max_nodes
    assert first.depth <= maker.depth


@pytest.mark.parametrize("maker", ALL, ids=str)
def test_a_cache_of_the_stated_scratch_is_enough_and_one_slot_less_is_not(maker: TreeMaker) -> None:
    drafting = drafting_for(tiny_head(TARGET), maker=maker)
    cache = drafting.cache
    cache.keys, cache.values = (whole[..., : SLOTS + maker.scratch, :] for whole in (cache.keys, cache.values))
    drafting.draft([5])
    if maker.scratch:
        cache.keys, cache.values = cache.keys[..., :-1, :], cache.values[..., :-1, :]
        with pytest.raises(RuntimeError, match=r"draft cache of \d+ slots is full"):
            drafting.draft([5])


@pytest.mark.parametrize("maker", ALL, ids=str)
def test_rows_of_different_lengths_are_drafted_together_as_each_alone(maker: TreeMaker) -> None:
    head = soften(tiny_head(TARGET))
    counts = (3, 9, 1, 5)
    together = drafting_for(head, *counts, maker=maker)
    for count, tree in zip(counts, together.draft([5, 6, 7, 8]), strict=True):
        (alone,) = drafting_for(head, count, maker=maker).draft([int(tree.tokens_N[0])])
        assert [c.path for c in candidates(tree)] == [c.path for c in candidates(alone)]
        torch.testing.assert_close(tree.scores_N, alone.scores_N, rtol=1e-4, atol=1e-4)
    # Rows go on by different numbers of slots, one leaves, and the last takes its place.
    together.leave(1)
    again = [4, 2, 1]  # counts are 3, 5, 1 now
    ids = ROW.input_ids_T.tolist()
    follow = [ids[3 + 1 : 3 + 1 + again[0]], ids[5 + 1 : 5 + 1 + again[1]], ids[1 + 1 : 1 + 1 + again[2]]]
    more = [ROW.aux_hidden_TF[start : start + 4] for start in (3, 5, 1)]
    together.extend(0, follow, TargetOutput(torch.stack(more), torch.zeros(3, 4, 1)))
    for count, tree in zip((7, 7, 2), together.draft([1, 2, 3]), strict=True):
        (alone,) = drafting_for(head, count, maker=maker).draft([int(tree.tokens_N[0])])
        assert [c.path for c in candidates(tree)] == [c.path for c in candidates(alone)]
        torch.testing.assert_close(tree.scores_N, alone.scores_N, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("maker", MAKERS["dynamic"], ids=str)
def test_with_probability_one_a_child_ties_with_its_parent_and_the_tree_stays_whole(maker: DynamicTree) -> None:
    text = ROW.input_ids_T.tolist()
    tree = draw(maker, knowing_head(TiedHead, TARGET, text), text[SLOTS])
    assert len(tree) == maker.max_nodes
    found = candidates(tree)
    best = [c.path for c in found if c.score == 0.0]
    right = text[SLOTS + 1 : SLOTS + 1 + maker.depth]
    deepest = min(maker.depth, maker.num_draft_tokens)
    assert best == [tuple(right[:depth]) for depth in range(1, deepest + 1)]


@pytest.mark.parametrize("maker", MAKERS["dynamic"], ids=str)
def test_with_uniform_drafts_all_of_a_level_ties_and_upper_levels_come_first(maker: DynamicTree) -> None:
    tree = draw(maker, fixed_head(TARGET, torch.zeros(97)))
    assert len(tree) == maker.max_nodes
    per_level = [maker.top_k] + [maker.top_k**2] * (maker.depth - 1)
    expected, left = [1], maker.num_draft_tokens
    for width in per_level:
        if left:
            expected.append(min(width, left))
            left -= expected[-1]
    assert tree.depths_N.bincount().tolist() == expected


def test_siblings_never_repeat_a_token() -> None:
    tree = draw(DynamicTree(4, 6, 40), tiny_head(TARGET))
    pairs = list(zip(tree.parents_N.tolist(), tree.tokens_N.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


def test_a_tree_wider_than_the_draft_vocabulary_takes_all_of_it() -> None:
    tree = draw(DynamicTree(2, 8, 20), tiny_head(TARGET, draft_vocab_size=3))
    assert tree.depths_N.bincount().tolist() == [1, 3, 9]


@pytest.mark.parametrize("maker", [*MAKERS["chain"], *MAKERS["dynamic"], StaticTree()], ids=str)
def test_an_oracle_fills_the_longest_path(maker: TreeMaker) -> None:
    text = ROW.input_ids_T.tolist()
    tree = draw(maker, oracle_head(TARGET, text), text[SLOTS])
    deepest = int(tree.depths_N.argmax())
    path = tree.tokens_N[tree.ancestors_NN[deepest]].tolist()
    assert path == text[SLOTS : SLOTS + 1 + len(path) - 1]
    assert len(path) == min(maker.depth, maker.max_nodes - 1) + 1


def test_candidates_are_made_on_the_heads_device() -> None:
    """Under another default device, a tensor made without naming its device would meet the head's and fail."""
    drafting = drafting_for(tiny_head(TARGET))
    expected = DynamicTree(3, 4, 12).candidates(drafting)
    drafting.cache.discard_tree()
    drafting.head.to("cpu")
    with torch.device("meta"):
        found = DynamicTree(3, 4, 12).candidates(drafting)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("depth", "top_k", "nodes", "pool"),
    [(0, 4, 1, 0), (3, 0, 1, 0), (-1, 2, 1, 0), (1, 4, 5, 4), (3, 4, 37, 36), (3, 4, 0, 36), (2, 3, -1, 12)],
)
def test_parameters_that_make_no_tree_are_refused(depth: int, top_k: int, nodes: int, pool: int) -> None:
    with pytest.raises(UserError, match=rf"a tree of depth {depth} and top_k {top_k} has {pool} candidates, .*{nodes}"):
        DynamicTree(depth, top_k, nodes)


@pytest.mark.parametrize("depth", [0, -2])
def test_a_chain_without_depth_is_refused(depth: int) -> None:
    with pytest.raises(UserError, match=rf"a chain needs a depth of at least 1, given {depth}\."):
        ChainTree(depth)


def test_every_registered_tree_is_tested_here() -> None:
    assert MAKERS.keys() == TREES.keys()
    assert all(isinstance(maker, TREES[name]) for name, makers in MAKERS.items() for maker in makers)
