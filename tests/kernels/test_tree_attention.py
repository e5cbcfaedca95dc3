"""Tree attention against visible sets written by hand and torch's dense attention; the kernel against the reference."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.tree_attention import (
    _choose_splits,
    _launch_tree_attention,
    tree_attention,
    tree_attention_reference,
)
from eyas.kernels.tree_layout import ancestor_mask, pack_ancestors

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Inputs:
    """The tensors of one call, in the order of the launcher's and the reference's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    prefix: Tensor
    num_nodes: Tensor
    ancestors: Tensor

    def to(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(x.to(device) for x in vars(self).values())


def draw_inputs(
    parents_BN: Tensor,
    *,
    num_nodes: list[int],
    prefix: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Random q, k and v with NaN wherever nothing may be read; capacity 3 beyond what the fullest row needs."""
    rows, nodes = parents_BN.shape
    used = [p + n for p, n in zip(prefix, num_nodes, strict=True)]
    q = torch.randn(rows, heads, nodes, head_dim, dtype=dtype)
    k, v = torch.randn(2, rows, kv_heads, max(used) + 3, head_dim, dtype=dtype)
    for row in range(rows):
        q[row, :, num_nodes[row] :] = torch.nan
        k[row, :, used[row] :] = torch.nan
        v[row, :, used[row] :] = torch.nan
    lengths = torch.tensor(num_nodes)
    return Inputs(q, k, v, torch.tensor(prefix), lengths, pack_ancestors(ancestor_mask(parents_BN, lengths)))


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "reference": tree_attention_reference,
    "kernel": lambda *arguments: _launch_tree_attention(*arguments, splits=1),
    "kernel in 3 splits": lambda *arguments: _launch_tree_attention(*arguments, splits=3),
}


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize(
    ("window", "visible"),
    [
        (None, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5], [0, 1, 2, 4, 6]]),
        (3, [[0, 1, 2], [1, 2, 3], [1, 2, 4], [2, 4, 5], [2, 4, 6]]),
        (1, [[2], [3], [4], [5], [6]]),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_each_node_sees_the_positions_written_here(
    window: int | None, visible: list[list[int]], attention: Callable[..., Tensor], device: torch.device
) -> None:
    """With q = 0 all visible positions weigh the same, and with v = identity the output is the weights.

    Prefix of 2, then 0 -> 1, 2 and 2 -> 3, 4 at cache positions 2 to 6; text positions are 2, 3, 3, 4, 4.
    """
    num_nodes = torch.tensor([5])
    ancestors = pack_ancestors(ancestor_mask(torch.tensor([[-1, 0, 0, 2, 2]]), num_nodes))
    q, k, v = torch.zeros(1, 1, 5, 7), torch.randn(1, 1, 7, 7), torch.eye(7)[None, None]
    inputs = Inputs(q, k, v, torch.tensor([2]), num_nodes, ancestors)
    weights = attention(*inputs.to(device), 1.0, window)[0, 0].cpu()
    expected = torch.zeros(5, 7)
    for node, positions in enumerate(visible):
        expected[node, positions] = 1 / len(positions)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("window", [None, 9])
def test_reference_equals_torch_with_a_dense_mask(
    window: int | None, random_parents: Callable[[int, int], Tensor]
) -> None:
    """The mask is built here by walking up the parents, without the functions under test."""
    parents, num_nodes, prefix = random_parents(4, 13), [13, 1, 0, 6], [0, 5, 4, 21]
    inputs = draw_inputs(parents, num_nodes=num_nodes, prefix=prefix, heads=6, kv_heads=2, head_dim=20)
    out = tree_attention_reference(*inputs.to(torch.device("cpu")), 0.3, window)
    for row, (nodes, before) in enumerate(zip(num_nodes, prefix, strict=True)):
        mask = torch.zeros(nodes, before + nodes, dtype=torch.bool)
        for node in range(nodes):
            path = [node]
            while path[-1] > 0:
                path.append(int(parents[row, path[-1]]))
            # Nearest first: the node itself, its ancestors, the prefix from its end; a window keeps the first ones.
            nearest = [before + j for j in path] + list(range(before - 1, -1, -1))
            mask[node, nearest[:window]] = True
        q, k, v = inputs.q[row, :, :nodes], inputs.k[row, :, : before + nodes], inputs.v[row, :, : before + nodes]
        expected = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[row, :, :nodes], expected[0], atol=2e-6, rtol=2e-6)
        assert out[row, :, nodes:].eq(0).all()


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "head_dim", "dtype", "prefix", "window", "splits"),
    [
        (1, 1, 1, 32, torch.float32, [0, 1, 70], None, 1),
        (5, 3, 1, 80, torch.float32, [33, 0, 7], None, 1),
        (7, 9, 3, 96, torch.bfloat16, [64, 0, 31], None, 1),
        (60, 3, 3, 64, torch.float16, [5, 0, 40], None, 1),
        (63, 4, 1, 128, torch.bfloat16, [97, 3, 0], None, 2),
        (65, 1, 1, 33, torch.float32, [10, 0, 32], None, 1),
        (7, 8, 2, 256, torch.bfloat16, [50, 0, 9], None, 1),
        (5, 2, 1, 256, torch.float32, [40, 0, 1], 16, 1),
        (60, 2, 1, 1, torch.float32, [80, 0, 2], 7, 3),
        (5, 3, 3, 80, torch.float32, [200, 0, 1], None, 4),
        (63, 3, 1, 48, torch.float16, [200, 0, 33], 40, 2),
    ],
)
@pytest.mark.usefixtures("poisoned_empty", "interpreter_multiplies_bf16")
def test_kernel_equals_reference(
    nodes: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    prefix: list[int],
    window: int | None,
    splits: int,
    random_parents: Callable[[int, int], Tensor],
    device: torch.device,
) -> None:
    inputs = draw_inputs(
        random_parents(3, nodes),
        num_nodes=[nodes, 1, nodes // 2],
        prefix=prefix,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    scale = head_dim**-0.5
    expected = tree_attention_reference(*inputs.to(torch.device("cpu")), scale, window)
    result = _launch_tree_attention(*inputs.to(device), scale, window, splits=splits)
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert result[1, :, 1:].eq(0).all()


@pytest.mark.parametrize(
    ("nodes", "head_dim", "dtype", "window", "splits"),
    [(5, 80, torch.bfloat16, None, 1), (33, 64, torch.float16, 16, 3), (7, 33, torch.float32, None, 2)],
)
@pytest.mark.usefixtures("poisoned_empty", "interpreter_multiplies_bf16")
def test_an_fp8_cache_counts_as_the_numbers_it_holds(
    nodes: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    splits: int,
    random_parents: Callable[[int, int], Tensor],
    device: torch.device,
) -> None:
    parents, lengths = random_parents(3, nodes), {"num_nodes": [nodes, 1, nodes // 2], "prefix": [40, 0, 7]}
    inputs = draw_inputs(parents, **lengths, heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
    fp8 = replace(inputs, k=inputs.k.to(torch.float8_e4m3fn), v=inputs.v.to(torch.float8_e4m3fn))
    wide = replace(fp8, k=fp8.k.to(dtype), v=fp8.v.to(dtype))
    expected = tree_attention_reference(*wide.to(torch.device("cpu")), 0.2, window)
    assert torch.equal(tree_attention_reference(*fp8.to(torch.device("cpu")), 0.2, window), expected)
    result = _launch_tree_attention(*fp8.to(device), 0.2, window, splits=splits)
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_strided_tensors(random_parents: Callable[[int, int], Tensor], device: torch.device) -> None:
    inputs = draw_inputs(random_parents(2, 7), num_nodes=[7, 4], prefix=[5, 9], heads=4, kv_heads=2, head_dim=16)
    # [rows, positions, heads, dim] in memory, as a model's projections leave it.
    strided = replace(inputs, **{x: getattr(inputs, x).transpose(1, 2).contiguous().transpose(1, 2) for x in "qkv"})
    assert not strided.k.is_contiguous()
    expected = tree_attention_reference(*inputs.to(torch.device("cpu")), 0.25)
    result = _launch_tree_attention(*strided.to(device), 0.25, splits=1)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("prefix", "num_nodes", "read_prefix", "read_nodes"),
    [(10**9, 5, 20, 0), (18, 5, 18, 2), (-4, 5, 0, 5), (3, 10**9, 3, 5), (3, -1, 3, 0)],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_the_kernel_stays_inside_the_cache(
    prefix: int, num_nodes: int, read_prefix: int, read_nodes: int, device: torch.device
) -> None:
    """Lengths out of range act as the nearest ones in range; all ancestor bits are set and NaN surrounds the cache."""
    around = torch.full((3, 1, 40, 16), torch.nan)
    around[1, :, 10:30] = torch.randn(1, 20, 16)
    cache = around[1:2, :, 10:30]
    q, every_bit = torch.randn(1, 1, 5, 16), torch.full((1, 5, 1), -1)
    broken = Inputs(q, cache, cache, torch.tensor([prefix]), torch.tensor([num_nodes]), every_bit)
    clamped = replace(broken, prefix=torch.tensor([read_prefix]), num_nodes=torch.tensor([read_nodes]))
    arguments = broken.to(torch.device("cpu"))
    if device.type == "cuda":
        around = around.to(device)
        moved = around[1:2, :, 10:30]
        arguments = (q.to(device), moved, moved, *(x.to(device) for x in arguments[3:]))
    result = _launch_tree_attention(*arguments, 0.25, splits=2).cpu()
    expected = tree_attention_reference(*clamped.to(torch.device("cpu")), 0.25)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=2e-6)


def good_inputs(random_parents: Callable[[int, int], Tensor]) -> dict[str, object]:
    inputs = draw_inputs(random_parents(2, 5), num_nodes=[5, 3], prefix=[4, 0], heads=4, kv_heads=2, head_dim=8)
    return {
        "q_BHND": inputs.q,
        "k_BGLD": inputs.k,
        "v_BGLD": inputs.v,
        "prefix_len_B": inputs.prefix,
        "num_nodes_B": inputs.num_nodes,
        "ancestors_BNW": inputs.ancestors,
        "scale": 0.5,
    }


def test_the_op_is_the_reference_on_the_cpu(random_parents: Callable[[int, int], Tensor]) -> None:
    inputs = good_inputs(random_parents)
    assert torch.equal(tree_attention(**inputs, window=3), tree_attention_reference(**inputs, window=3))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q_BHND", lambda q: q.double(), "q is torch.float64"),
        ("q_BHND", lambda q: q.repeat(1, 1, 1, 33), "head dim 1 to 256"),
        ("q_BHND", lambda q: q[:, :3], "3 query heads cannot share 2 kv heads"),
        ("q_BHND", lambda q: q.mT.contiguous().mT, r"q has strides .* the last one must be 1"),
        ("k_BGLD", lambda k: k[..., :4], r"k is torch.float32 .* give torch.float32 \(2, 2, 12, 8\)"),
        ("v_BGLD", lambda v: v.half(), "v is torch.float16 .* give torch.float32"),
        ("k_BGLD", lambda k: k.to(torch.float8_e5m2), "k is torch.float8_e5m2 .* give torch.float32"),
        ("k_BGLD", lambda k: k.to(torch.float8_e4m3fn), "v is torch.float32 .* give torch.float8_e4m3fn"),
        ("prefix_len_B", lambda n: n.int(), "prefix_len_B is torch.int32 .* give torch.int64"),
        ("prefix_len_B", lambda n: n + 8, "row 0 has a prefix of 12 and 5 nodes: .* cache of 12 positions"),
        ("prefix_len_B", lambda n: n - 1, "row 1 has a prefix of -1"),
        ("num_nodes_B", lambda n: n + 1, "row 0 has a prefix of 4 and 6 nodes: q holds 0 to 5 nodes"),
        ("num_nodes_B", lambda n: n * 0 + 4, r"ancestors_BNW\[1, 3\] must hold node 3 itself"),
        ("ancestors_BNW", lambda words: words | 4, r"ancestors_BNW\[0, 0\] must hold node 0 itself and earlier nodes"),
    ],
)
def test_the_op_says_what_is_wrong(
    name: str, change: Callable[..., object], message: str, random_parents: Callable[[int, int], Tensor]
) -> None:
    inputs = good_inputs(random_parents)
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        tree_attention(**inputs)


def test_the_op_refuses_an_empty_window(random_parents: Callable[[int, int], Tensor]) -> None:
    with pytest.raises(ValueError, match="window is 0: give at least 1"):
        tree_attention(**good_inputs(random_parents), window=0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True], ids=["", "fp8 cache"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_the_op_runs_the_kernel_on_a_gpu(
    head_dim: int, dtype: torch.dtype, is_fp8: bool, random_parents: Callable[[int, int], Tensor]
) -> None:
    if is_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no fp8")
    inputs = draw_inputs(
        random_parents(3, 60),
        num_nodes=[60, 1, 33],
        prefix=[4000, 0, 1700],
        heads=16,
        kv_heads=4,
        head_dim=head_dim,
        dtype=dtype,
    )
    if is_fp8:
        inputs = replace(inputs, k=inputs.k.to(torch.float8_e4m3fn), v=inputs.v.to(torch.float8_e4m3fn))
    q, k, v, prefix, num_nodes, ancestors = inputs.to(torch.device("cuda"))
    assert _choose_splits(q, k) > 1
    result = tree_attention(
        q, k, v, prefix_len_B=prefix, num_nodes_B=num_nodes, ancestors_BNW=ancestors, scale=head_dim**-0.5
    )
    expected = tree_attention_reference(*inputs.to(torch.device("cpu")), head_dim**-0.5)
    torch.testing.assert_close(result.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
