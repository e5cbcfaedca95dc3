"""The target's cache: any way of writing it gives the states of one plain forward; what it cannot hold is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.models.errors import UserError
from eyas.models.kv_cache import FP8, FULL, SLIDING, KVCache, attention_kinds, check_kv_dtype, to_cache
from eyas.models.target import Target
from eyas.tests.models.families import SERVED, family_config, family_model
from eyas.tests.toys import tiny_config, tiny_target

T = 13


def causal_rows(positions_RT: Tensor) -> Tensor:
    """Return the mask [R, 1, T, L] of tokens that see their own row up to themselves."""
    slots = torch.arange(int(positions_RT.max()) + 1)
    return slots[None, None, None, :] <= positions_RT[:, None, :, None]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SERVED)
def test_pieces_through_the_cache_equal_one_forward(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 2, 3))
    row = torch.randint(97, (1, T))
    whole = target.forward(row)
    cache = target.new_cache(batch=1, capacity=T)
    start = 0
    for count in (5, 1, 4, 3):
        cache.write_at(start, count)
        positions = torch.arange(start, start + count)[None]
        out = target.forward(
            row[:, start : start + count],
            position_ids_BT=positions,
            mask_B1TL=causal_rows(positions) if start else None,
            cache=cache,
        )
        close(out.final_hidden_BTD, whole.final_hidden_BTD[:, start : start + count])
        close(out.aux_hidden_BTF, whole.aux_hidden_BTF[:, start : start + count])
        start += count


def test_a_tree_forward_equals_one_forward_per_path_and_the_accepted_path_is_kept() -> None:
    target = tiny_target()
    prefix, tokens = torch.randint(97, (6,)), torch.randint(97, (6,))
    # 0 -> 1, 2;  1 -> 3;  2 -> 4;  4 -> 5
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    mask = torch.zeros(6, 12, dtype=torch.bool)
    mask[:, :6] = True
    for node, path in enumerate(paths):
        mask[node, [6 + n for n in path]] = True
    cache = target.new_cache(batch=1, capacity=20)
    cache.write_at(0, 6)
    target.forward(prefix[None], cache=cache)
    cache.write_at(6, 6)
    depths = torch.tensor([len(path) - 1 for path in paths])
    out = target.forward(tokens[None], position_ids_BT=6 + depths[None], mask_B1TL=mask[None, None], cache=cache)
    for node, path in enumerate(paths):
        alone = target.forward(torch.cat((prefix, tokens[path]))[None])
        close(out.final_hidden_BTD[0, node], alone.final_hidden_BTD[0, -1])
        close(out.aux_hidden_BTF[0, node], alone.aux_hidden_BTF[0, -1])
    cache.move(torch.zeros(2, dtype=torch.int64), 6 + torch.tensor(paths[5][1:3]), torch.tensor([7, 8]))
    cache.move(torch.tensor([0]), torch.tensor([11]), torch.tensor([9]))
    fresh = target.new_cache(batch=1, capacity=10)
    fresh.write_at(0, 10)
    target.forward(torch.cat((prefix, tokens[paths[5]]))[None], cache=fresh)
    for kept, true in zip(cache.buffers, fresh.buffers, strict=True):
        close(kept.keys[:, :, :10], true.keys)
        close(kept.values[:, :, :10], true.values)


def test_ragged_rows_equal_each_row_alone() -> None:
    target = tiny_target()
    rows = torch.randint(97, (3, T))
    cache = target.new_cache(batch=3, capacity=T)
    lengths = [4, 7, 1]
    # Prefill two rows together (the shorter one padded), then the third, then decode all three side by side.
    for members in ([0, 1], [2]):
        longest = max(lengths[r] for r in members)
        positions = torch.arange(longest).expand(len(members), -1)
        cache.write_rows_at(torch.tensor(members), positions)
        target.forward(
            rows[members, :longest], position_ids_BT=positions, mask_B1TL=causal_rows(positions), cache=cache
        )
    for step in range(5):
        positions = torch.tensor(lengths)[:, None] + step
        cache.write_rows_at(None, positions)
        out = target.forward(
            rows.gather(1, positions), position_ids_BT=positions, mask_B1TL=causal_rows(positions), cache=cache
        )
        for r in range(3):
            alone = target.forward(rows[r : r + 1, : lengths[r] + step + 1])
            close(out.final_hidden_BTD[r, 0], alone.final_hidden_BTD[0, -1])


def test_selected_rows_go_on_in_their_new_order() -> None:
    target = tiny_target()
    rows = torch.randint(97, (4, T))
    cache = target.new_cache(batch=4, capacity=T)
    positions = torch.arange(T - 1).expand(4, -1)
    cache.write_rows_at(None, positions)
    target.forward(rows[:, :-1], position_ids_BT=positions, mask_B1TL=causal_rows(positions), cache=cache)
    order = torch.tensor([3, 0, 2])
    cache.select_rows(order)
    last = torch.full((3, 1), T - 1)
    cache.write_rows_at(None, last)
    out = target.forward(rows[order, -1:], position_ids_BT=last, mask_B1TL=causal_rows(last), cache=cache)
    close(out.final_hidden_BTD[:, 0], target.forward(rows[order]).final_hidden_BTD[:, -1])


def test_a_full_cache_says_how_much_was_asked() -> None:
    cache = tiny_target().new_cache(batch=2, capacity=8)
    cache.write_at(3, 5)
    with pytest.raises(RuntimeError, match="KV cache of 8 tokens is full: asked for 9"):
        cache.write_at(4, 5)
    cache.write_rows_at(None, torch.tensor([[7], [0]]))
    with pytest.raises(RuntimeError, match="KV cache of 8 tokens is full: asked for 9"):
        cache.write_rows_at(None, torch.tensor([[0], [8]]))


def new_cache(config: Any) -> KVCache:
    return KVCache(config, batch=1, capacity=4, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("gpt_neo", {}, "full_attention, global, local with sliding window"),
        ("llama4_text", {"num_hidden_layers": 4}, "chunked_attention, full_attention with sliding window"),
        ("qwen3_next", {}, "full_attention, linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv, full_attention"),
    ],
)
def test_targets_with_other_attention_are_refused_with_the_reason(
    name: str, fields: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(name, **fields)
    for refuse in (attention_kinds, new_cache):
        with pytest.raises(UserError, match=rf"this target's attention is {reason}.*; the bundled runtime serves"):
            refuse(config)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_window_that_is_switched_off_is_no_window(name: str) -> None:
    kinds = attention_kinds(AutoConfig.for_model(name, sliding_window=4096, use_sliding_window=False))
    assert set(kinds) == set(attention_kinds(tiny_config())) == {FULL}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mistral window", (SLIDING, SLIDING, SLIDING)),
        ("phi3 window", (SLIDING, SLIDING, SLIDING)),
        ("qwen2 window", (FULL, SLIDING, SLIDING)),
        ("gemma2", (SLIDING, FULL, SLIDING)),
        ("gemma3_text", (SLIDING, FULL, SLIDING)),
        ("gpt_oss", (SLIDING, FULL, SLIDING)),
        ("qwen3_moe", (FULL, FULL, FULL)),
    ],
)
def test_the_kinds_of_layers_of_windowed_and_hybrid_targets(name: str, kinds: tuple[str, ...]) -> None:
    assert attention_kinds(family_config(name)) == kinds


@pytest.mark.parametrize("name", ["mistral window", "gemma2", "gpt_oss"])
def test_a_window_counts_positions_not_slots(name: str) -> None:
    """Nodes of a tree lie in slots behind each other but at positions of their depth: the window follows positions."""
    target = Target(family_model(name))
    prefix, tokens = torch.randint(97, (9,)), torch.randint(97, (7,))
    parents = [-1, 0, 0, 0, 0, 4, 5]
    paths = [[0]]
    for node in range(1, 7):
        paths.append([*paths[parents[node]], node])
    depths = torch.tensor([len(path) - 1 for path in paths])
    mask = torch.zeros(7, 16, dtype=torch.bool)
    mask[:, :9] = True
    for node, path in enumerate(paths):
        mask[node, [9 + n for n in path]] = True
    cache = target.new_cache(batch=1, capacity=16)
    cache.write_at(0, 9)
    target.forward(prefix[None], cache=cache)
    cache.write_at(9, 7)
    out = target.forward(
        tokens[None],
        position_ids_BT=9 + depths[None],
        mask_B1TL=mask[None, None],
        key_positions_BL=torch.cat((torch.arange(9), 9 + depths))[None],
        cache=cache,
    )
    for node, path in enumerate(paths):
        alone = target.forward(torch.cat((prefix, tokens[path]))[None])
        close(out.final_hidden_BTD[0, node], alone.final_hidden_BTD[0, -1])


def test_rows_move_grow_and_are_written_in_slices() -> None:
    target = tiny_target()
    rows = torch.randint(97, (3, T))
    cache = target.new_cache(batch=2, capacity=T)
    cache.write_at(0, 5, rows=slice(0, 2))
    target.forward(rows[:2, :5], cache=cache)
    cache.grow(batch=3, capacity=T + 4)
    assert cache.capacity == T + 4
    cache.write_at(0, 9, rows=slice(2, 3))
    target.forward(rows[2:, :9], cache=cache)
    cache.move_row(2, 0)
    positions = torch.tensor([[9, 10], [5, 6]])
    cache.write_rows_at(slice(0, 2), positions)
    new = torch.stack((rows[2, 9:11], rows[1, 5:7]))
    out = target.forward(new, position_ids_BT=positions, mask_B1TL=causal_rows(positions), cache=cache)
    for r, (row, length) in enumerate(((2, 11), (1, 7))):
        close(out.final_hidden_BTD[r, 1], target.forward(rows[row : row + 1, :length]).final_hidden_BTD[0, -1])


def test_latent_attention_is_refused_with_what_it_keeps() -> None:
    latent: dict[str, Any] = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    shape: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 12}
    config = AutoConfig.for_model("deepseek_v3", **latent, **shape, **heads, first_k_dense_replace=2)
    target = Target(AutoModelForCausalLM.from_config(config))
    cache = target.new_cache(batch=1, capacity=4)
    cache.write_at(0, 4)
    with pytest.raises(UserError, match=r"keeps 1 heads of 16 numbers per token, its config says 4 of 8 \(latent"):
        target.forward(torch.randint(97, (1, 4)), cache=cache)


def test_fixed_writes_and_kept_paths_are_those_of_the_growing_ones() -> None:
    target = tiny_target(layers=2, aux_layers=())
    prefix, nodes = torch.randint(97, (2, 4)), torch.randint(97, (2, 3))
    lengths = torch.tensor([4, 2])
    slots = lengths[:, None] + torch.arange(3)
    mask = causal_rows(slots)
    states = []
    for fixed in (False, True):
        cache = target.new_cache(batch=3, capacity=11)
        cache.write_at(0, 4, rows=slice(0, 2))
        target.forward(prefix, cache=cache)
        if fixed:
            cache.write_fixed(slots)
            assert cache.visible == 11
            wide = torch.nn.functional.pad(mask, (0, 11 - mask.shape[-1]))
        else:
            cache.write_rows_at(slice(0, 2), slots)
        out = target.forward(nodes, position_ids_BT=slots, mask_B1TL=wide if fixed else mask, cache=cache)
        # Row 0 keeps nodes 0 and 2, row 1 its root alone.
        if fixed:
            cache.keep_paths(lengths, torch.tensor([[0, 2, -1], [0, -1, -1]]), torch.tensor([1, 0]))
        else:
            cache.move(torch.tensor([0]), torch.tensor([6]), torch.tensor([5]))
        states.append((out.final_hidden_BTD, *(layer.both for layer in cache.buffers)))
    for ours, theirs in zip(*states, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_holds_the_nearest_of_its_numbers_and_the_largest_for_all_beyond_and_nan_for_what_is_none(
    dtype: torch.dtype,
) -> None:
    inf, nan = torch.inf, torch.nan
    given = [0.0, 1.0, 0.1, -3.3, 2.0**-9, 448.0, 470.0, -500.0, 60000.0, nan, inf, -inf]
    held = to_cache(torch.tensor(given, dtype=dtype), FP8)
    assert held.dtype == FP8
    expected = [0.0, 1.0, 0.1015625, -3.25, 2.0**-9, 448.0, 448.0, -448.0, 448.0, nan, nan, nan]
    torch.testing.assert_close(held.float(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    same = torch.tensor(given)
    assert to_cache(same, torch.float32) is same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_layer_reads_an_fp8_cache_in_its_own_dtype(ragged: bool, dtype: torch.dtype) -> None:
    cache = tiny_target(layers=1, aux_layers=()).new_cache(batch=2, capacity=9, dtype=FP8)
    states = torch.randn(2, 2, 2, 3, 16).to(dtype)
    if ragged:
        cache.write_rows_at(None, torch.tensor([[4, 5, 6], [4, 5, 6]]))
    else:
        cache.write_at(4, 3)
    assert cache.buffers[0].both.nbytes == 2 * 2 * 2 * 9 * 16
    rounded = states.float().to(FP8)
    for read, true in zip(cache.update(*states, 0), rounded, strict=True):
        assert read.dtype == dtype
        assert read[:, :, :4].eq(0).all()
        assert torch.equal(read[:, :, 4:].float(), true.float())


OPERATIONS: dict[str, Any] = {
    "move": lambda cache: cache.move(torch.tensor([0, 0, 2]), torch.tensor([3, 4, 5]), torch.tensor([2, 3, 1])),
    "move_row": lambda cache: cache.move_row(2, 0),
    "clear": lambda cache: cache.clear(slice(1, None)),
    "grow": lambda cache: cache.grow(batch=4, capacity=8),
    "select_rows": lambda cache: cache.select_rows(torch.tensor([2, 0])),
    "keep_paths": lambda cache: cache.keep_paths(
        torch.tensor([1, 0]), torch.tensor([[0, 2, 4], [0, 3, -1]]), torch.tensor([2, 1])
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_fp8_cache_is_moved_about_as_any_other(name: str) -> None:
    caches = [tiny_target(layers=2, aux_layers=()).new_cache(batch=3, capacity=6, dtype=dtype) for dtype in (None, FP8)]
    for layers in zip(*(cache.buffers for cache in caches), strict=True):
        numbers = torch.randn(layers[0].both.shape).to(FP8)
        for layer in layers:
            layer.both.copy_(numbers.to(layer.both.dtype))
    before = caches[1].buffers[1].both.float()
    for cache in caches:
        OPERATIONS[name](cache)
    wide, fp8 = (cache.buffers[1] for cache in caches)
    assert fp8.both.shape != before.shape or not torch.equal(fp8.both.float(), before)
    assert (wide.both.dtype, fp8.both.dtype, fp8.keys.dtype) == (torch.float32, FP8, FP8)
    assert torch.equal(fp8.both.float(), wide.both)
    assert torch.equal(fp8.values.float(), wide.values)


def test_fp8_caches_are_for_cards_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UserError, match=r"NVIDIA A100 \(compute capability 8.0\) has no .* card of 8.9 or later"):
        check_kv_dtype(FP8, card)
    check_kv_dtype(None, card)
    check_kv_dtype(FP8, torch.device("cpu"))
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        check_kv_dtype(FP8, card)
    with pytest.raises(UserError, match=r"or in torch.float8_e4m3fn, not in torch.float16"):
        check_kv_dtype(torch.float16, card)
