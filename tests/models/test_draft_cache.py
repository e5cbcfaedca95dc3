"""The draft cache: tree nodes see the committed slots and the nodes their mask names; none of them is ever kept."""

import pytest
import torch
from torch import Tensor

from eyas.models.draft_cache import DraftCache

HEADS, KV, DIM = 4, 2, 8


def new_cache(capacity: int = 12) -> DraftCache:
    return DraftCache(kv_heads=KV, head_dim=DIM, capacity=capacity, dtype=torch.float32, device=torch.device("cpu"))


def states(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, HEADS, count, DIM), torch.randn(1, KV, count, DIM), torch.randn(1, KV, count, DIM)


def attend_to(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return one query's attention over the listed keys, [HEADS, DIM], head by head."""
    out = []
    for h in range(HEADS):
        g = h // (HEADS // KV)
        weights = (torch.stack([k[g] for k in keys]) @ q[h] / DIM**0.5).softmax(0)
        out.append(weights @ torch.stack([v[g] for v in values]))
    return torch.stack(out)


def test_slots_see_earlier_slots_and_nodes_see_slots_and_their_own_ancestors() -> None:
    cache = new_cache()
    seen: list[tuple[Tensor, Tensor]] = []  # key and value of every slot and node so far
    for count in (3, 1):
        q, k, v = states(count)
        cache.commit(count)
        out = cache.attend(q, k, v)
        for i in range(count):
            seen.append((k[0, :, i], v[0, :, i]))
            expected = attend_to(q[0, :, i], *(list(part) for part in zip(*seen, strict=True)))
            torch.testing.assert_close(out[0, :, i], expected, rtol=1e-5, atol=1e-5)
    # Two nodes of depth 1, then two of depth 2, both below the second.
    masks = [torch.eye(2, dtype=torch.bool), torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)]
    for mask in masks:
        q, k, v = states(2)
        cache.draft(mask)
        out = cache.attend(q, k, v)
        seen += [(k[0, :, i], v[0, :, i]) for i in range(2)]
        for i in range(2):
            visible = seen[:4] + [seen[4 + n] for n in mask[i].nonzero().flatten().tolist()]
            expected = attend_to(q[0, :, i], *(list(part) for part in zip(*visible, strict=True)))
            torch.testing.assert_close(out[0, :, i], expected, rtol=1e-5, atol=1e-5)


def test_a_discarded_tree_leaves_no_trace() -> None:
    with_tree, without = new_cache(), new_cache()
    first, later = states(3), states(2)
    for cache in (with_tree, without):
        cache.commit(3)
        cache.attend(*first)
    with_tree.draft(torch.eye(4, dtype=torch.bool))
    with_tree.attend(*states(4))
    with_tree.discard_tree()
    outs = []
    for cache in (with_tree, without):
        cache.commit(2)
        outs.append(cache.attend(*later))
    assert torch.equal(*outs)
    assert with_tree.lengths == without.lengths == [5]
    assert torch.equal(with_tree.keys[..., :5, :], without.keys[..., :5, :])
    assert torch.equal(with_tree.values[..., :5, :], without.values[..., :5, :])


def test_ragged_rows_equal_each_row_alone() -> None:
    counts, nodes = (3, 1, 5), 2
    together = DraftCache(
        kv_heads=KV, head_dim=DIM, capacity=12, dtype=torch.float32, device=torch.device("cpu"), batch=3
    )
    alone = [new_cache() for _ in counts]
    mask = torch.stack([torch.eye(2), torch.ones(2, 2), torch.tensor([[1, 0], [1, 1]])]).bool()
    for _ in range(2):  # commit ragged, draft, forget, and again from ragged lengths
        parts = [[torch.randn(1, heads, 5, DIM) for heads in (HEADS, KV, KV)] for _ in counts]
        together.commit(*counts)
        out = together.attend(*(torch.cat(part) for part in zip(*parts, strict=True)))
        for r, count in enumerate(counts):
            alone[r].commit(count)
            expected = alone[r].attend(*(part[:, :, :count] for part in parts[r]))
            torch.testing.assert_close(out[r : r + 1, :, :count], expected, rtol=1e-5, atol=1e-5)
        parts = [[torch.randn(1, heads, nodes, DIM) for heads in (HEADS, KV, KV)] for _ in counts]
        together.draft(mask, rows=3)
        out = together.attend(*(torch.cat(part) for part in zip(*parts, strict=True)))
        together.discard_tree()
        for r in range(3):
            alone[r].draft(mask[r])
            torch.testing.assert_close(out[r : r + 1], alone[r].attend(*parts[r]), rtol=1e-5, atol=1e-5)
            alone[r].discard_tree()
        together.move_row(2, 0)
        alone[0], counts = alone[2], (counts[2], counts[1], 0)
        assert together.lengths == [alone[0].lengths[0], alone[1].lengths[0], 0]
        alone[2], counts = new_cache(), (counts[0], counts[1], 2)


def test_every_layer_keeps_keys_of_its_own() -> None:
    shape = {"kv_heads": KV, "head_dim": DIM, "dtype": torch.float32, "device": torch.device("cpu")}
    both = DraftCache(**shape, capacity=9, layers=2)  # type: ignore[arg-type]
    alone = [new_cache(), new_cache()]
    for count in (3, 1):
        both.commit(count)
        for layer, cache in enumerate(alone):
            step = states(count)
            cache.commit(count)
            assert torch.equal(both.attend(*step, layer=layer), cache.attend(*step))
    both.grow(batch=2, capacity=12)
    both.move_row(0, 1)
    assert both.lengths == [0, 4]
    for layer, cache in enumerate(alone):
        assert torch.equal(both.keys[layer, 1:, :, :4], cache.keys[0, :, :, :4])
        assert torch.equal(both.values[layer, 1:, :, :4], cache.values[0, :, :, :4])
    with pytest.raises(AssertionError, match=r"call commit\(\) or draft\(\) before each step"):
        both.attend(*states(1), layer=1)


def test_a_full_cache_says_so() -> None:
    cache = new_cache(capacity=4)
    cache.commit(3)
    cache.attend(*states(3))
    cache.draft(torch.eye(2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="draft cache of 4 slots is full at 5"):
        cache.attend(*states(2))


def test_steps_must_be_announced_and_trees_discarded() -> None:
    cache = new_cache()
    with pytest.raises(AssertionError, match=r"call commit\(\) or draft\(\) before each step"):
        cache.attend(*states(1))
    cache.commit(1)
    cache.attend(*states(1))
    with pytest.raises(AssertionError, match=r"call commit\(\) or draft\(\) before each step"):
        cache.attend(*states(1))
    cache.draft(torch.ones(1, 1, dtype=torch.bool))
    cache.attend(*states(1))
    with pytest.raises(AssertionError, match="mask covers 1 tree nodes, the cache will hold 2"):
        cache.draft(torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(AssertionError, match="discard the tree before committing"):
        cache.commit(1)
