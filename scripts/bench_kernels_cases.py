"""What `eyas bench kernels` runs: every op at the shapes of well-known targets, with its reference and its rivals."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.build_tree import build_tree, build_tree_reference
from eyas.kernels.coins import coins, coins_reference
from eyas.kernels.draft_gradients import draft_gradients
from eyas.kernels.draft_loss import draft_terms_reference
from eyas.kernels.draft_top_k import draft_top_k, draft_top_k_reference
from eyas.kernels.keep_path import keep_path, keep_path_reference
from eyas.kernels.tree_attention import tree_attention, tree_attention_reference
from eyas.kernels.tree_layout import ancestor_mask, pack_ancestors, unpack_ancestors
from eyas.kernels.truncate import BatchSampling
from eyas.kernels.ttt_attention import first_visible, ttt_attention, ttt_attention_reference
from eyas.kernels.verify_chain import Chains, verify_chain, verify_chain_reference
from eyas.kernels.verify_tree_greedy import verify_tree_greedy, verify_tree_greedy_reference
from eyas.kernels.verify_tree_sampling import verify_tree_sampling, verify_tree_sampling_reference
from eyas.train.losses import LossMix

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Shape:
    """A target's shape and the work of a round on it."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    draft_vocabulary: int = 32000
    rows: int = 8
    nodes: int = 60
    prefix: int = 4096
    chain: int = 5
    depth: int = 6
    top_k: int = 10
    slots: int = 2048
    line: int = 2048
    dtype: torch.dtype = torch.bfloat16

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


SHAPES = (
    Shape("Llama-3.1-8B", heads=32, kv_heads=8, head_dim=128, layers=32, vocabulary=128256),
    Shape("Qwen3-30B-A3B", heads=32, kv_heads=4, head_dim=128, layers=48, vocabulary=151936),
)


@dataclass(frozen=True)
class Case:
    """One measurement. `draw` makes inputs on the device; all functions take them.

    bytes_moved: what any implementation has to read and write once. exact: results are integers that must be equal, but
    for at most `may_differ` of them (coins within rounding of a boundary). compiled: torch.compile(reference) as well.
    """

    name: str
    bytes_moved: int
    draw: Callable[[], Inputs]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: tuple[float, float] = (0.0, 0.0)
    may_differ: float = 0.0
    compiled: bool = False
    rivals: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def fault(self, inputs: Inputs) -> str | None:
        """Return how the kernel's result differs from the reference's; None if it does not."""
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)
        got, want = _tensors(self.kernel(*inputs)), _tensors(self.reference(*copies))
        for a, b in zip(got, want, strict=True):
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
            if a.is_floating_point():
                atol, rtol = self.tolerance
                wrong = ~torch.isclose(a.float(), b.float(), atol=atol, rtol=rtol, equal_nan=True)
            else:
                wrong = a != b
            if float(wrong.float().mean()) > self.may_differ:
                return f"{int(wrong.sum())} of {wrong.numel()} values differ from the reference"
        return None


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return every measurement of a shape."""
    return [
        _tree_attention(shape, device),
        _build_tree(shape, device),
        _coins(shape, device),
        _greedy(shape, device),
        *(_tree_sampling(shape, device, *how) for how in ((1.0, 0, 1.0), (0.8, 50, 0.95))),
        _chain(shape, device),
        _keep_path(shape, device),
        _draft_top_k(shape, device),
        *(_draft_loss(shape, device, kind) for kind in ("kl", "lk")),
        _ttt_attention(shape, device),
    ]


def _trees(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, parents, number of nodes): a parent is one of the four nodes before."""
    parents = torch.full((shape.rows, shape.nodes), -1)
    for node in range(1, shape.nodes):
        parents[:, node] = torch.randint(max(node - 4, 0), node, (shape.rows,))
    tokens = torch.randint(0, 8, (shape.rows, shape.nodes))
    return tokens.to(device), parents.to(device), torch.full((shape.rows,), shape.nodes, device=device)


def _tree_attention(shape: Shape, device: torch.device) -> Case:
    B, N, L, D = shape.rows, shape.nodes, shape.prefix + shape.nodes, shape.head_dim
    scale = D**-0.5

    def draw() -> Inputs:
        _, parents, nodes = _trees(shape, device)
        q = torch.randn(B, shape.heads, N, D, dtype=shape.dtype, device=device)
        k, v = torch.randn(2, B, shape.kv_heads, L, D, dtype=shape.dtype, device=device)
        prefix = torch.full((B,), shape.prefix, device=device)
        return q, k, v, prefix, nodes, pack_ancestors(ancestor_mask(parents, nodes))

    def kernel(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor, nodes: Tensor, ancestors: Tensor) -> Tensor:
        return tree_attention(q, k, v, prefix_len_B=prefix, num_nodes_B=nodes, ancestors_BNW=ancestors, scale=scale)

    def reference(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor, nodes: Tensor, ancestors: Tensor) -> Tensor:
        return tree_attention_reference(q, k, v, prefix, nodes, ancestors, scale)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor, nodes: Tensor, ancestors: Tensor) -> Tensor:
        seen = torch.ones(B, 1, N, shape.prefix, dtype=torch.bool, device=device)
        mask = torch.cat((seen, unpack_ancestors(ancestors)[:, None]), dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return Case(
        "tree attention",
        shape.itemsize * (2 * B * shape.kv_heads * L * D + 2 * B * shape.heads * N * D),
        draw,
        kernel,
        reference,
        tolerance=(2e-2, 2e-2),
        rivals={"sdpa, dense mask": sdpa},
    )


def _build_tree(shape: Shape, device: torch.device) -> Case:
    k = shape.top_k
    pool = k + (shape.depth - 1) * k * k

    def draw() -> Inputs:
        scores = -torch.rand(shape.rows, pool, device=device).cumsum(1)
        parents = torch.arange(pool, device=device).sub(k).div(k, rounding_mode="floor").clamp(min=-1)
        depths = torch.arange(pool, device=device).sub(k).div(k * k, rounding_mode="floor") + 2
        tokens = torch.randint(0, shape.vocabulary, (shape.rows, pool), device=device)
        return tokens[:, 0], tokens, parents.expand(shape.rows, -1), depths, scores

    def kernel(root: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor) -> Any:
        return build_tree(root, tokens, parents, depths, scores, num_draft_tokens=shape.nodes - 1)

    def reference(root: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor) -> Any:
        return build_tree_reference(root, tokens, parents, depths, scores, shape.nodes - 1)

    return Case("tree build", shape.rows * (pool * 20 + shape.nodes * 36), draw, kernel, reference)


def _coins(shape: Shape, device: torch.device) -> Case:
    def draw() -> Inputs:
        seeds = torch.arange(shape.rows, device=device)
        return seeds, torch.randint(0, 10**6, (shape.rows, shape.nodes), device=device)

    return Case("coins", 16 * shape.rows * shape.nodes, draw, coins, coins_reference)


def _greedy(shape: Shape, device: torch.device) -> Case:
    def draw() -> Inputs:
        tokens, parents, nodes = _trees(shape, device)
        return tokens, parents, nodes, torch.randint(0, 8, tokens.shape, device=device)

    size = 8 * shape.rows * shape.nodes * 4
    return Case("greedy verification", size, draw, verify_tree_greedy, verify_tree_greedy_reference)


def _sampling(shape: Shape, device: torch.device, temperature: float, top_k: int, top_p: float) -> BatchSampling:
    return BatchSampling(
        torch.full((shape.rows,), temperature, device=device),
        torch.full((shape.rows,), top_k, device=device),
        torch.full((shape.rows,), top_p, device=device),
    )


def _tree_sampling(shape: Shape, device: torch.device, temperature: float, top_k: int, top_p: float) -> Case:
    how = _sampling(shape, device, temperature, top_k, top_p)

    def draw() -> Inputs:
        tokens, parents, nodes = _trees(shape, device)
        logits = 2 * torch.randn(shape.rows, shape.nodes, shape.vocabulary, dtype=shape.dtype, device=device)
        logits[..., :8] += 8
        return logits, tokens, parents, nodes, torch.rand(tokens.shape, dtype=torch.float64, device=device)

    def kernel(logits: Tensor, tokens: Tensor, parents: Tensor, nodes: Tensor, coins_BN: Tensor) -> Any:
        return verify_tree_sampling(logits, tokens, parents, nodes, sampling=how, coins_BN=coins_BN)

    def reference(logits: Tensor, tokens: Tensor, parents: Tensor, nodes: Tensor, coins_BN: Tensor) -> Any:
        return verify_tree_sampling_reference(logits, tokens, parents, nodes, how, coins_BN)

    return Case(
        f"sampling verification, T={temperature} top-k {top_k} top-p {top_p}",
        shape.itemsize * shape.rows * shape.nodes * shape.vocabulary,
        draw,
        kernel,
        reference,
        may_differ=0.13,
    )


def _chain(shape: Shape, device: torch.device) -> Case:
    B, K, V, U = shape.rows, shape.chain, shape.vocabulary, shape.draft_vocabulary
    how = _sampling(shape, device, 1.0, 0, 1.0)

    def draw() -> Inputs:
        target = torch.randn(B, K + 1, V, dtype=shape.dtype, device=device)
        draft = target[:, :-1, :U] + 0.1 * torch.randn(B, K, U, dtype=shape.dtype, device=device)
        ids = torch.where(torch.arange(V, device=device) < U, torch.arange(V, device=device), -1)
        tokens = torch.distributions.Categorical(logits=draft.float()).sample()
        drafted = torch.full((B,), K, device=device)
        coins_BK = torch.rand(B, K, dtype=torch.float64, device=device)
        return Chains(tokens, drafted, target, draft, ids), coins_BK, torch.rand(B, dtype=torch.float64, device=device)

    def kernel(chains: Chains, coins_BK: Tensor, bonus_coins_B: Tensor) -> Any:
        return verify_chain(
            chains,
            rule="block",
            target_sampling=how,
            draft_sampling=how,
            coins_BK=coins_BK,
            bonus_coins_B=bonus_coins_B,
        )

    def reference(chains: Chains, coins_BK: Tensor, bonus_coins_B: Tensor) -> Any:
        return verify_chain_reference(chains, "block", how, how, coins_BK, bonus_coins_B)

    size = shape.itemsize * B * ((K + 1) * V + K * U)
    return Case("block verification of a chain", size, draw, kernel, reference, may_differ=0.13)


def _keep_path(shape: Shape, device: torch.device) -> Case:
    S, moved = 2 * shape.layers, shape.depth - 1

    def draw() -> Inputs:
        cache = torch.randn(
            S, shape.rows, shape.kv_heads, shape.nodes + 16, shape.head_dim, dtype=shape.dtype, device=device
        )
        path = torch.full((shape.rows, shape.nodes), -1, device=device)
        path[:, : moved + 1] = torch.arange(moved + 1, device=device) * 2
        prefix = torch.full((shape.rows,), 16, device=device)
        return cache, prefix, path, torch.full((shape.rows,), moved, device=device)

    def kernel(cache: Tensor, *path: Tensor) -> Tensor:
        keep_path(cache, *path)
        return cache

    def reference(cache: Tensor, *path: Tensor) -> Tensor:
        keep_path_reference(cache, *path)
        return cache

    size = 2 * shape.itemsize * S * shape.rows * shape.kv_heads * moved * shape.head_dim
    return Case("path compaction, all layers", size, draw, kernel, reference)


def _draft_top_k(shape: Shape, device: torch.device) -> Case:
    B, K, U = shape.rows, shape.top_k, shape.draft_vocabulary

    def draw() -> Inputs:
        return (torch.randn(B, K, U, dtype=shape.dtype, device=device),)

    return Case(
        "draft top-k",
        shape.itemsize * B * K * U,
        draw,
        lambda logits: draft_top_k(logits, K),
        lambda logits: draft_top_k_reference(logits, K),
        tolerance=(1e-4, 1e-4),
        compiled=True,
    )


def _backward(loss: Callable[[], Tensor], *leaves: Tensor) -> list[Tensor]:
    out = loss()
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def _draft_loss(shape: Shape, device: torch.device, kind: str) -> Case:
    N, U = shape.slots, shape.draft_vocabulary
    mix = LossMix(((kind, 1.0),))

    def draw() -> Inputs:
        teacher = 2 * torch.randn(N, U, dtype=shape.dtype, device=device)
        student = teacher + torch.randn(N, U, dtype=shape.dtype, device=device)
        return student, teacher, torch.arange(N, device=device)

    def kernel(student: Tensor, teacher: Tensor, row: Tensor) -> list[Tensor]:
        return list(draft_gradients(student, teacher, row, mix.pull, needs=mix.needs))

    def reference(student: Tensor, teacher: Tensor, row: Tensor) -> list[Tensor]:
        student = student.detach().requires_grad_()
        return _backward(lambda: mix.pull(draft_terms_reference(student, teacher, row)).loss_N, student)

    # Both logits are read for the loss and again for the gradient, which is written once.
    return Case(
        f"draft loss {kind}, forward and backward",
        5 * shape.itemsize * N * U,
        draw,
        kernel,
        reference,
        tolerance=(1e-4, 2e-2),
        compiled=True,
    )


def _ttt_attention(shape: Shape, device: torch.device) -> Case:
    T, D, steps = shape.line, shape.head_dim, 3

    def draw() -> Inputs:
        q = torch.randn(1, shape.heads, T, D, dtype=shape.dtype, device=device)
        rest = torch.randn(2 * steps, 1, shape.kv_heads, T, D, dtype=shape.dtype, device=device)
        return q, rest, first_visible(torch.zeros(1, T, dtype=torch.int64, device=device))

    def with_gradients(attend: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
        def run(q: Tensor, rest: Tensor, first: Tensor) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (q, *rest)]
            slot = torch.arange(T, device=q.device)[None]
            return _backward(
                lambda: attend(leaves[0], leaves[1 : steps + 1], leaves[steps + 1 :], first, slot), *leaves
            )

        return run

    # Inputs and gradients once, the output once and its gradient once; the products dominate, not the memory.
    size = shape.itemsize * T * D * (4 * shape.heads + 4 * steps * shape.kv_heads)
    return Case(
        "TTT attention, third step, forward and backward",
        size,
        draw,
        with_gradients(ttt_attention),
        with_gradients(ttt_attention_reference),
        tolerance=(6e-2, 6e-2),
        compiled=True,
    )
