"""Static trees: EAGLE-1's own, any list of paths against the head's ranked guesses, and lists that make no tree."""

from typing import Any

import pytest

from eyas.inference.draft import StaticTree
from eyas.inference.static_tree import EAGLE1_PATHS, StaticShape
from eyas.models.errors import UserError
from eyas.tests.inference.heads import soften
from eyas.tests.inference.test_draft import ROW, SLOTS, SPIKY, TARGET, draw, log_probabilities
from eyas.tests.toys import tiny_head


def test_eagle_1s_tree_has_26_nodes_and_depth_5() -> None:
    shape = StaticShape.of(EAGLE1_PATHS)
    assert shape.depth == 5
    assert shape.depths_N.bincount().tolist() == [1, 4, 8, 8, 3, 2]
    assert StaticTree().max_nodes == 26
    assert shape.parents_N.tolist() == [
        -1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 8, 13, 13, 13, 21, 21,
    ]  # fmt: skip
    # Four nodes are run for the second level, four for the third, one each for the last two.
    assert [len(level.run) for level in shape.levels] == [1, 4, 4, 1, 1]


@pytest.mark.parametrize("paths", [EAGLE1_PATHS, SPIKY, ((1,),), tuple(reversed(SPIKY))], ids=len)
def test_every_node_is_the_child_of_its_rank(paths: tuple[tuple[int, ...], ...]) -> None:
    head = soften(tiny_head(TARGET))
    tree = draw(StaticTree(paths), head)
    assert len(tree) == len(paths) + 1
    expected = {}
    for path in paths:
        tokens: tuple[int, ...] = ()
        score = 0.0
        for rank in path:
            ranked = sorted(log_probabilities(head, tokens), key=lambda child: -child[1])
            tokens, score = (*tokens, ranked[rank][0]), score + ranked[rank][1]
        expected[tokens] = score
    found = {}
    for node in range(1, len(tree)):
        above = tree.ancestors_NN[node].nonzero().flatten().tolist()
        found[tuple(tree.tokens_N[above[1:]].tolist())] = float(tree.scores_N[node])
    assert found == pytest.approx(expected, abs=1e-4)
    assert len(ROW) > SLOTS


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "needs paths, each of them once; given 0"),
        (((0,), (1,), (0,)), r"twice: \(0,\)"),
        (((0,), (1, 0)), r"path \(1, 0\) of the static tree has no parent \(1,\); name every node's path"),
        (((0,), (0, 0, 0)), r"path \(0, 0, 0\) of the static tree has no parent \(0, 0\)"),
        (((0,), (-1,)), r"path \(-1,\) of the static tree must be child ranks of 0 or more"),
        (((0,), (0.5,)), "must be child ranks"),
        (((),), "must be child ranks"),
    ],
)
def test_lists_that_make_no_tree_are_refused(paths: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StaticTree(paths)


def test_a_rank_beyond_the_draft_vocabulary_is_refused() -> None:
    StaticTree(((2,),)).check(3)
    with pytest.raises(UserError, match="asks for child rank 3; the head drafts 3 tokens"):
        StaticTree(((0,), (3,))).check(3)
