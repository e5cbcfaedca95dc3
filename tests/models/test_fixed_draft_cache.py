"""The draft cache of fixed shapes against the one of growing ones, row by row."""

import pytest
import torch
from torch import Tensor

from eyas.models.draft_cache import DraftCache
from eyas.models.fixed_draft_cache import FixedDraftCache

ROWS, HEADS, KV, DIM, CAPACITY = 3, 4, 2, 8, 17
LENGTHS = (5, 1, 3)


def new_cache() -> DraftCache:
    return DraftCache(
        kv_heads=KV, head_dim=DIM, capacity=CAPACITY, dtype=torch.float32, device=torch.device("cpu"), batch=ROWS
    )


def states(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(ROWS, heads, count, DIM) for heads in (HEADS, KV, KV))  # type: ignore[return-value]


def test_commits_and_trees_are_those_of_the_growing_cache_and_lengths_may_change_in_place() -> None:
    plain, under = new_cache(), new_cache()
    length_B = torch.tensor(LENGTHS)
    fixed = FixedDraftCache(under, length_B)
    first = states(max(LENGTHS))
    for cache in (plain, under):
        cache.commit(*LENGTHS)
        cache.attend(*first)
    for counts in ((2, 3, 1), (1, 1, 3)):
        own = torch.eye(2, dtype=torch.bool)
        for mask in (own, torch.cat((own.flip(0), own), dim=1)):
            q, k, v = states(2)
            plain.draft(mask, rows=ROWS)
            fixed.draft(mask.expand(ROWS, -1, -1))
            torch.testing.assert_close(fixed.attend(q, k, v), plain.attend(q, k, v))
        plain.discard_tree()
        fixed.discard_tree()
        q, k, v = states(3)
        longest = max(counts)
        plain.commit(*counts)
        fixed.commit(3)
        ours, theirs = fixed.attend(q, k, v), plain.attend(*(x[:, :, :longest] for x in (q, k, v)))
        for row, count in enumerate(counts):
            torch.testing.assert_close(ours[row, :, :count], theirs[row, :, :count])
        length_B += torch.tensor(counts)
        for row, length in enumerate(plain.lengths):
            assert int(length_B[row]) == length
            torch.testing.assert_close(under.keys[:, row, :, :length], plain.keys[:, row, :, :length])
            torch.testing.assert_close(under.values[:, row, :, :length], plain.values[:, row, :, :length])


def test_a_mask_of_other_nodes_than_the_caches_is_a_fault_of_ours() -> None:
    fixed = FixedDraftCache(new_cache(), torch.tensor(LENGTHS))
    with pytest.raises(AssertionError, match="mask covers 3 tree nodes, the cache will hold 2"):
        fixed.draft(torch.ones(ROWS, 2, 3, dtype=torch.bool))
    with pytest.raises(AssertionError, match=r"call commit\(\) or draft\(\)"):
        fixed.attend(*states(2))
