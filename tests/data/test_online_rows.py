"""Features computed while training are the features a store would have held, with and without a cache."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.data.encode import encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.feature_batch import FeatureBatch
from eyas.data.feature_row import FeatureRow, RowSource
from eyas.data.online_rows import OnlineRows
from eyas.data.state_format import bytes_per_token
from eyas.models.errors import UserError
from eyas.models.target import TargetOutput
from eyas.tests.data.toys import corpus_rows, spec_of
from eyas.tests.toys import tiny_target
from eyas.train.batches import Batches

TARGET = tiny_target()
ALONE, TOGETHER = ExtractionPlan(40, 1, 2), ExtractionPlan(40, 128, 9)


def online(*, plan: ExtractionPlan = ALONE, cache_bytes: int = 0, **fields: object) -> OnlineRows:
    return OnlineRows(TARGET, corpus_rows(), plan, spec_of(TARGET, **fields), cache_bytes=cache_bytes)


def stored(folder: Path, *, plan: ExtractionPlan = ALONE, **fields: object) -> RowSource:
    return extract(TARGET, corpus_rows(), plan, folder, spec=spec_of(TARGET, **fields), progress=lambda *_: None)


def batches(source: RowSource) -> list[FeatureBatch]:
    """Return the batches of three epochs, as training takes them."""
    feed = Batches(source, line_length=64, lines_per_batch=2, packed=True, seed=5)
    count = 3 * len(feed._epoch(0))
    return [feed.get(number) for number in range(count)]


def assert_batches(given: Sequence[FeatureBatch], expected: Sequence[FeatureBatch], *, exact: bool) -> None:
    assert len(given) == len(expected) > 3
    for a, b in zip(given, expected, strict=True):
        for name, value in a.__dict__.items():
            tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(value, getattr(b, name), equal_nan=True, **tolerance)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("cache_bytes", [0, 20_000, 10**9])
def test_batches_are_those_of_a_store_to_the_last_bit(tmp_path: Path, state_dtype: str, cache_bytes: int) -> None:
    store = stored(tmp_path, state_dtype=state_dtype)
    assert_batches(
        batches(online(state_dtype=state_dtype, cache_bytes=cache_bytes)), batches(store), exact=True
    )  # fmt: skip


def test_rows_asked_for_together_are_computed_together_and_differ_by_rounding_alone(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []
    source = online(plan=TOGETHER)
    inner = source.target.forward

    def noted(ids: Tensor, **kwargs: Tensor) -> TargetOutput:
        shapes.append(tuple(ids.shape))
        return inner(ids, **kwargs)  # type: ignore[arg-type]

    source.target.forward = noted  # type: ignore[method-assign, assignment]
    try:
        given = batches(source)
    finally:
        del source.target.forward
    assert max(rows for rows, _ in shapes) > 1
    assert all(rows * length <= 128 for rows, length in shapes)
    assert_batches(given, batches(stored(tmp_path, plan=TOGETHER)), exact=False)


def computed(source: OnlineRows, wanted: Sequence[int]) -> int:
    """Return how many tokens the target computes for some rows."""
    tokens = 0
    inner = source.target.forward

    def counted(ids: Tensor, **kwargs: Tensor) -> TargetOutput:
        nonlocal tokens
        tokens += ids.numel()
        return inner(ids, **kwargs)  # type: ignore[arg-type]

    source.target.forward = counted  # type: ignore[method-assign, assignment]
    try:
        source.rows(wanted)
    finally:
        del source.target.forward
    return tokens


def test_a_cache_computes_every_row_once_and_no_cache_every_time() -> None:
    every = list(range(9))
    cached, bare = online(cache_bytes=10**9), online()
    total = sum(cached.lengths)
    assert [computed(cached, every) for _ in range(2)] == [total, 0]
    assert [computed(bare, every) for _ in range(2)] == [total, total]
    assert bare.cached_bytes == 0
    assert computed(bare, [0, 0, 0]) == bare.lengths[0]


def test_the_cache_stays_within_its_bytes_and_keeps_what_was_used_last() -> None:
    cost = bytes_per_token(hidden_size=40, aux_layers=3, state_dtype="float32")
    source = online(cache_bytes=40 * (cost.every + cost.taught))
    for index in range(9):
        source.rows([index])
        assert 0 < source.cached_bytes <= source.cache_bytes
    held = list(source._cache)
    assert held[-1] == 8
    assert sum(row.bytes for row in source._cache.values()) == source.cached_bytes
    assert computed(source, held) == 0
    source.rows([held[0]])
    assert list(source._cache)[-1] == held[0]
    tiny = online(cache_bytes=100)
    tiny.rows([2])
    assert tiny.cached_bytes == 0  # no row fits


def test_cached_rows_keep_nothing_of_their_batch_alive() -> None:
    source = online(plan=TOGETHER, cache_bytes=10**9)
    source.rows(list(range(9)))
    for row in source._cache.values():
        assert row.aux_TF.untyped_storage().nbytes() == row.aux_TF.nbytes


def test_tokens_cost_no_forward_and_name_the_written_token_where_a_slot_is_taught() -> None:
    source = online()
    given = corpus_rows()
    tokens = [source.tokens(index) for index in range(9)]
    assert computed(source, []) == 0
    for row, (name, example) in zip(tokens, given, strict=True):
        assert row.id == name
        mask, ids = example.generated_mask_T.tolist(), example.input_ids_T.tolist()
        expected = [
            ids[p + 1] if p + 1 < len(ids) and mask[p] and mask[p + 1] else -1 for p in range(len(ids))
        ]  # fmt: skip
        assert row.argmax_T.tolist() == expected


def test_a_target_that_mixes_rows_is_refused_before_training() -> None:
    target = tiny_target()
    inner = target.forward

    def leaky(ids: Tensor, **kwargs: Tensor) -> TargetOutput:
        out = inner(ids, **kwargs)  # type: ignore[arg-type]
        return TargetOutput(out.aux_hidden_BTF + 0.05 * out.aux_hidden_BTF.roll(1, 0), out.final_hidden_BTD)

    given = corpus_rows()
    OnlineRows(target, given, TOGETHER, spec_of(target), cache_bytes=0).check()
    target.forward = leaky  # type: ignore[method-assign, assignment]
    with pytest.raises(UserError, match="batched forward mixes rows"):
        OnlineRows(target, given, TOGETHER, spec_of(target), cache_bytes=0).check()
    twice = [("a", encode_reply([5], [6]))] * 2
    with pytest.raises(UserError, match="row a occurs twice"):
        OnlineRows(target, twice, TOGETHER, spec_of(target), cache_bytes=0).check()


def test_features_are_plain_tensors_that_training_may_use() -> None:
    (row,) = online().rows([2])
    assert isinstance(row, FeatureRow)
    weight = torch.randn(row.aux_hidden_TF.shape[1], 3, requires_grad=True)
    feed = Batches(online(), line_length=64, lines_per_batch=1, packed=True, seed=0)
    (feed.get(0).aux_hidden_BTF @ weight).sum().backward()
    assert weight.grad is not None
