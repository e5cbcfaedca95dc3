"""The kernels of a round one after the other: in the interpreter against the references, on a GPU in a CUDA graph."""

import pytest
import torch
from torch import Tensor

from eyas.kernels.build_tree import build_tree
from eyas.kernels.coins import coins
from eyas.kernels.draft_top_k import draft_top_k
from eyas.kernels.keep_path import keep_path
from eyas.kernels.tree_attention import tree_attention
from eyas.kernels.triton_support import interpreted
from eyas.kernels.truncate import BatchSampling
from eyas.kernels.verify_tree_sampling import verify_tree_sampling

ROWS, TOP_K, VOCABULARY, HEAD_DIM, CAPACITY = 3, 3, 40, 16, 40
POOL = TOP_K + 2 * TOP_K**2
NODES = 8


def inputs(device: torch.device) -> dict[str, Tensor]:
    """What a round starts from: draft logits, the cache, the target's logits, and how each row samples."""
    drawn = {
        "draft_logits": torch.randn(ROWS, 7, VOCABULARY),
        "cache": torch.randn(2, ROWS, 2, CAPACITY, HEAD_DIM),
        "query": torch.randn(ROWS, 4, NODES, HEAD_DIM),
        "target_logits": 3 * torch.randn(ROWS, NODES, VOCABULARY),
        "root": torch.arange(ROWS),
        "prefix": torch.tensor([5, 0, 20]),
        "seeds": torch.tensor([3, 4, 5]),
        "temperature": torch.tensor([1.0, 0.0, 0.7]),
        "top_k": torch.tensor([0, 0, 5]),
        "top_p": torch.tensor([1.0, 1.0, 0.9]),
    }
    return {name: x.to(device) for name, x in drawn.items()}


def round_of(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Draft two levels (a root node and six more), build the tree, attend, verify, compact; the cache is changed."""
    best = draft_top_k(x["draft_logits"], TOP_K)
    first, rest = best.log_probs_BNK[:, 0], best.log_probs_BNK[:, 1:]
    second = first[:, :, None] + rest[:, :TOP_K]
    third = second[:, 0, :, None] + rest[:, TOP_K:]
    scores = torch.cat((first, second.flatten(1), third.flatten(1)), dim=1)
    tokens = best.ids_BNK.flatten(1)
    index = torch.arange(POOL, device=tokens.device)
    parents = (index.sub(TOP_K).div(TOP_K, rounding_mode="floor")).clamp(min=-1).expand(ROWS, -1)
    depths = 1 + (index >= TOP_K).long() + (index >= TOP_K + TOP_K**2).long()
    tree = build_tree(x["root"], tokens, parents, depths, scores, num_draft_tokens=NODES - 1)
    nodes = torch.full_like(x["root"], NODES)
    out = tree_attention(
        x["query"],
        *x["cache"],
        prefix_len_B=x["prefix"],
        num_nodes_B=nodes,
        ancestors_BNW=tree.ancestors_BNW,
        scale=HEAD_DIM**-0.5,
    )
    verification = verify_tree_sampling(
        x["target_logits"],
        tree.tokens_BN,
        tree.parents_BN,
        nodes,
        sampling=BatchSampling(x["temperature"], x["top_k"], x["top_p"]),
        coins_BN=coins(x["seeds"], x["prefix"][:, None] + tree.depths_BN),
    )
    keep_path(x["cache"], x["prefix"], verification.path_BN, verification.num_accepted_B)
    return *tree, out, *verification, x["cache"]


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), atol=1e-5 if a.is_floating_point() else 0, rtol=1e-5)


@pytest.mark.usefixtures("poisoned_empty")
def test_a_round_of_kernels_is_a_round_of_references() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off on a machine with a GPU")
    start = inputs(torch.device("cpu"))
    expected = round_of({name: x.clone() for name, x in start.items()})
    with interpreted():
        assert_equal(round_of({name: x.clone() for name, x in start.items()}), expected)
    assert expected[-2].min() >= 0  # every row emits a bonus token


@pytest.mark.gpu
def test_a_round_runs_without_synchronisation_and_in_a_cuda_graph() -> None:
    start = inputs(torch.device("cuda"))
    expected = round_of({name: x.cpu() for name, x in start.items()})
    held = {name: x.clone() for name, x in start.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels are compiled here, not while capturing
            round_of({name: x.clone() for name, x in start.items()})
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = round_of({name: x.clone() for name, x in start.items()})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(eager, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = round_of(held)
    for name, x in start.items():
        held[name].copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(result, expected)
