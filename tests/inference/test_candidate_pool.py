"""The pool of head's candidates and copies: probabilities worked out by hand."""

import math

import numpy as np
import pytest
import torch

from eyas.inference.candidate_pool import CandidatePool
from eyas.inference.copies import Copy

A, B, C, D = 11, 12, 13, 14


def pool(*rows: list[tuple[int, int, int, float]], trust: float = 1.0) -> CandidatePool:
    """Return a pool of (token, parent, depth, probability of the path) for every row."""
    tokens, parents, depths = (torch.tensor([[one[i] for one in row] for row in rows]) for i in range(3))
    scores = torch.tensor([[math.log(one[3]) for one in row] for row in rows])
    return CandidatePool.of((tokens, parents, depths, scores), [trust] * len(rows))


LEVEL = [(A, -1, 1, 0.6), (B, -1, 1, 0.3)]
LEVELS = [*LEVEL, (C, 0, 2, 0.3), (D, 0, 2, 0.15)]


def likely(found: CandidatePool, row: int = 0) -> dict[tuple[int, ...], float]:
    """Return the probability of every candidate of a row by the tokens of its path."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for place, (token, parent) in enumerate(zip(found.tokens_RP[row], found.parents_RP[row], strict=True)):
        if found.log_p_RP[row, place] > -np.inf:
            paths[place] = (*paths[int(parent)], int(token))
            assert found.depths_RP[row, place] == len(paths[place])
    del paths[-1]
    assert len(set(paths.values())) == len(paths), "a candidate is there twice"
    return {path: pytest.approx(math.exp(found.log_p_RP[row, place]), abs=1e-6) for place, path in paths.items()}


def test_without_copies_the_pool_is_the_heads_and_trust_counts_for_every_step() -> None:
    assert likely(pool(LEVELS)) == {(A,): 0.6, (B,): 0.3, (A, C): 0.3, (A, D): 0.15}
    assert likely(pool(LEVELS, trust=0.5).with_copies([None])) == {
        (A,): 0.3,
        (B,): 0.15,
        (A, C): 0.075,
        (A, D): 0.0375,
    }


def test_a_copy_that_agrees_makes_the_heads_best_child_likelier_and_goes_on_from_it() -> None:
    # 1 - .4 * .48 = .808; what is left to B is .192 / .4 of what it had; below A nothing was drawn: .808 * .75.
    found = pool(LEVEL).with_copies([Copy((A, D), matched=2)])
    assert likely(found) == {(A,): 0.808, (B,): 0.144, (A, D): 0.606}
    assert np.isfinite(found.head_RP[0]).tolist() == [True, True, False, False]


def test_a_copy_that_the_head_has_not_is_another_child_and_the_rest_lose_what_it_gains() -> None:
    found = pool(LEVELS).with_copies([Copy((C, D), matched=5)])
    assert likely(found) == {
        (A,): 0.6 * 0.19,
        (B,): 0.3 * 0.19,
        (A, C): 0.3 * 0.19,
        (A, D): 0.15 * 0.19,
        (C,): 0.81,
        (C, D): 0.81 * 0.94,
    }


def test_the_heads_second_child_stays_as_it_is_where_a_copy_says_less() -> None:
    assert likely(pool(LEVEL).with_copies([Copy((B,), matched=1)])) == {(A,): 0.6, (B,): 0.3}


def test_a_copy_follows_the_heads_paths_and_everything_below_changes_with_them() -> None:
    # A: 1 - .4 * .77 = .692. Below A the head prefers C (.5) to D (.25): D gets .26, C keeps .74 / .75 of its share.
    found = likely(pool(LEVELS).with_copies([Copy((A, D, B), matched=1)]))
    below = 0.692 * 0.26
    assert found == {
        (A,): 0.692,
        (B,): 0.3 * 0.308 / 0.4,
        (A, C): 0.692 * 0.5 * 0.74 / 0.75,
        (A, D): below,
        (A, D, B): below * 0.67,
    }


def test_rows_have_copies_of_their_own_lengths_or_none() -> None:
    found = pool(LEVEL, LEVEL, LEVEL).with_copies([None, Copy((C,), 4), Copy((A, B, C), 3)])
    assert likely(found, 0) == {(A,): 0.6, (B,): 0.3}
    assert likely(found, 1) == {(A,): 0.6 * 0.41, (B,): 0.3 * 0.41, (C,): 0.59}
    assert likely(found, 2).keys() == {(A,), (B,), (A, B), (A, B, C)}


def test_copies_alone() -> None:
    found = CandidatePool.empty(2).with_copies([Copy((A, B), 1), None])
    assert likely(found) == {(A,): 0.2, (A, B): 0.134}
    assert likely(found, 1) == {}
    assert CandidatePool.empty(3).with_copies([None] * 3).log_p_RP.shape == (3, 0)


@pytest.mark.parametrize("matched", range(1, 6))
@pytest.mark.parametrize("tokens", [(A, C), (A, B, C), (B, A), (C, A), (A, D, D)])
@pytest.mark.parametrize("trust", [0.3, 1.0])
def test_no_child_is_likelier_than_its_parent_and_siblings_share_one_whole(
    tokens: tuple[int, ...], matched: int, trust: float
) -> None:
    found = pool(LEVELS, trust=trust).with_copies([Copy(tokens, matched)])
    p, parents = np.exp(found.log_p_RP[0]), found.parents_RP[0]
    for node in range(-1, len(p)):
        children = p[parents == node].sum()
        assert children <= (1.0 if node < 0 else p[node]) + 1e-12


def test_of_a_level_not_drawn_only_what_a_copy_has_not_is_promised() -> None:
    step = np.log(np.array([[0.5]]))
    frontier = np.array([[0, 1]])
    assert np.exp(pool(LEVEL).promised(frontier, step)) == pytest.approx(np.array([[0.3, 0.15]]))
    # A is .808 now and the copy goes on from it with .75, more than the head's .5; B is .144 and has no copy below it.
    agreed = pool(LEVEL).with_copies([Copy((A, D), matched=2)])
    assert np.exp(agreed.promised(frontier, step)) == pytest.approx(np.array([[0.0, 0.072]]))
    # Of a surer head .808 * .9 - .808 * .75 is left.
    sure = np.exp(agreed.promised(frontier, np.log(np.array([[0.9]]))))
    assert sure == pytest.approx(np.array([[0.1212, 0.1296]]))
