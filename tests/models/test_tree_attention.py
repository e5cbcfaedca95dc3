"""Attention over trees through transformers' interface: the layout as a mask, what is refused, what is left alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, Gemma3Config

from eyas.kernels.tree_layout import ancestor_mask, pack_ancestors
from eyas.kernels.triton_support import interpreted
from eyas.models import tree_attention
from eyas.models.errors import UserError
from eyas.models.kv_cache import FP8
from eyas.models.target import Target
from eyas.models.tree_attention import (
    ADDED,
    EYAS_TREE,
    TreeLayout,
    attend,
    over_trees,
    switch_to_trees,
    why_not,
)
from eyas.tests.models.families import SERVED, family_model

PARENTS = torch.tensor([[-1, 0, 0, 2, 3], [-1, 0, 1, -1, -1]])
NODES = torch.tensor([5, 3])
PREFIX = torch.tensor([2, 4])
DEPTHS = torch.tensor([[0, 1, 1, 2, 3], [0, 1, 2, 0, 0]])
LAYOUT = TreeLayout(PREFIX, NODES, pack_ancestors(ancestor_mask(PARENTS, NODES)))
KERNEL_FAMILIES = [name for name in SERVED if name not in ("gemma2", "gpt_oss")]


@pytest.fixture
def kernels() -> Iterator[None]:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off on a machine with a GPU")
    with interpreted():
        yield


def test_the_layout_as_a_mask_shows_prefix_ancestors_and_self() -> None:
    mask = LAYOUT.mask(10)
    seen = [[row.nonzero().flatten().tolist() for row in tree] for tree in mask]
    assert seen[0] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5, 6]]
    # Nodes 3 and 4 of the second tree are padding: the prefix and themselves.
    prefix = [0, 1, 2, 3]
    assert seen[1] == [[*prefix, 4], [*prefix, 4, 5], [*prefix, 4, 5, 6], [*prefix, 7], [*prefix, 8]]


def test_a_slot_holds_its_own_position_but_for_nodes() -> None:
    positions = PREFIX[:, None] + DEPTHS
    expected = [[0, 1, 2, 3, 3, 4, 5, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6, 4, 4, 9]]
    assert LAYOUT.key_positions(positions, 10).tolist() == expected


def forward(target: Target, kv_dtype: torch.dtype | None = None, **mask: Tensor | TreeLayout) -> Tensor:
    """Return the final states of two trees behind prefixes of their own."""
    generator = torch.Generator().manual_seed(1)
    prefix, nodes = (torch.randint(97, (2, count), generator=generator) for count in (4, 5))
    cache = target.new_cache(batch=2, capacity=12, dtype=kv_dtype)
    cache.write_at(0, 4)
    target.forward(prefix, cache=cache)
    cache.write_fixed(PREFIX[:, None] + torch.arange(5))
    positions = PREFIX[:, None] + DEPTHS
    return target.forward(nodes, position_ids_BT=positions, cache=cache, **mask).final_hidden_BTD  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SERVED)
def test_a_layout_is_its_mask_in_every_family(name: str) -> None:
    target = Target(family_model(name))
    positions = LAYOUT.key_positions(PREFIX[:, None] + DEPTHS, 12)
    by_mask = forward(target, mask_B1TL=LAYOUT.mask(12)[:, None], key_positions_BL=positions)
    torch.testing.assert_close(forward(target, tree=LAYOUT), by_mask)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", KERNEL_FAMILIES)
def test_the_kernel_says_what_the_mask_says_in_every_family_it_serves(name: str) -> None:
    target = Target(family_model(name))
    positions = LAYOUT.key_positions(PREFIX[:, None] + DEPTHS, 12)
    by_mask = forward(target, mask_B1TL=LAYOUT.mask(12)[:, None], key_positions_BL=positions)
    assert target.config._attn_implementation == "sdpa"
    by_kernel = forward(target, tree=LAYOUT)
    assert target.config._attn_implementation == EYAS_TREE
    for row, nodes in enumerate(NODES.tolist()):
        torch.testing.assert_close(by_kernel[row, :nodes], by_mask[row, :nodes], rtol=1e-4, atol=1e-4)
    # The same model's other forwards are the library's, as before.
    again = forward(target, mask_B1TL=LAYOUT.mask(12)[:, None], key_positions_BL=positions)
    torch.testing.assert_close(again, by_mask, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama", "mistral window"])
def test_the_kernel_is_given_an_fp8_cache_as_it_lies_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, given = Target(family_model(name)), []
    original = tree_attention.tree_attention

    def noted(q_BHND: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, **rest: Any) -> Tensor:
        given.append((q_BHND.dtype, k_BGLD.dtype, v_BGLD.dtype))
        return original(q_BHND, k_BGLD, v_BGLD, **rest)

    monkeypatch.setattr(tree_attention, "tree_attention", noted)
    positions = LAYOUT.key_positions(PREFIX[:, None] + DEPTHS, 12)
    by_mask = forward(target, FP8, mask_B1TL=LAYOUT.mask(12)[:, None], key_positions_BL=positions)
    assert given == []
    by_kernel = forward(target, FP8, tree=LAYOUT)
    assert given == [(torch.float32, FP8, FP8)] * len(target.layers)
    exact = forward(target, tree=LAYOUT)
    for row, nodes in enumerate(NODES.tolist()):
        torch.testing.assert_close(by_kernel[row, :nodes], by_mask[row, :nodes], rtol=1e-4, atol=1e-4)
        assert float((by_kernel - exact)[row, :nodes].abs().max()) > 1e-3  # rounded it is


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_what_the_kernel_would_leave_out_is_said(name: str, tmp_path: object) -> None:
    model = family_model(name)
    model.set_attn_implementation("eager")
    reason = why_not(model, head_dim=16, dtype=torch.float32)
    assert reason is not None
    assert "soft-cap or sinks" in reason
    wide = family_model("llama")
    assert "257 wide" in str(why_not(wide, head_dim=257, dtype=torch.float32))
    assert "float64" in str(why_not(wide, head_dim=16, dtype=torch.float64))
    assert why_not(wide, head_dim=256, dtype=torch.bfloat16) is None


@pytest.mark.parametrize("name", ADDED)
def test_a_layer_that_adds_something_to_its_scores_is_refused_when_it_comes_to_it(name: str) -> None:
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    x = torch.zeros(2, 1, 5, 16)
    with (
        pytest.raises(UserError, match=rf"attention has {name}, which the tree kernel leaves out; .* eager"),
        over_trees(LAYOUT, (None,)),
    ):
        attend(module, x, x, x, None, **{name: 1.0})


def test_layers_that_do_not_ask_are_noticed() -> None:
    with (
        pytest.raises(UserError, match=r"0 of this target's 2 layers attend through transformers' attention interface"),
        over_trees(LAYOUT, (None, None)),
    ):
        pass


def test_text_layers_alone_are_switched_where_a_model_has_others() -> None:
    text = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    model = AutoModelForImageTextToText.from_config(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    )
    switch_to_trees(model)
    assert model.config.get_text_config()._attn_implementation == EYAS_TREE
    assert model.config.vision_config._attn_implementation == "sdpa"
