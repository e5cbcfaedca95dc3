"""An 8-token target known by hand, rounds on it by the hundred thousand, and the test of what they emit."""

from collections.abc import Callable

import torch
from scipy.stats import chisquare
from torch import Tensor

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree, TreeBatch
from eyas.inference.verify import Verification, VerifyBatch
from eyas.models.draw import draw

V, ROOT = 8, 3
#        0
#      / | \
#     1  2  3      tokens 4, 1, 6
#    / \     \
#   4   5     6    tokens 4, 2, 0
TREE = DraftTree(
    torch.tensor([ROOT, 4, 1, 6, 4, 2, 0]),
    torch.tensor([-1, 0, 0, 0, 1, 1, 3]),
    torch.tensor([0, 1, 1, 1, 2, 2, 2]),
    torch.zeros(7),
)
# Of the same shape, with tokens the target likes: after 3 it says 1 or 0, after 1 it says 5, after 4 it says 0.
LIKELY = DraftTree(torch.tensor([ROOT, 1, 0, 4, 5, 2, 0]), TREE.parents_N, TREE.depths_N, torch.zeros(7))
CHAIN = DraftTree.chain(ROOT, [1, 5, 6], [0.0, 0.0, 0.0])  # the target's likeliest after 3, 1 and 5


def coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniforms(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


# Row x holds the logits of the target, or of the draft model, after token x; nothing earlier matters.
TARGET_VV = 1.5 * torch.randn(V, V, generator=coins(9))
DRAFT_VV = TARGET_VV + 1.2 * torch.randn(V, V, generator=coins(10))


def table(sampling: Sampling, logits_VV: Tensor = TARGET_VV) -> Tensor:
    """Return the distribution after each token, [V, V]."""
    return torch.stack([sampling.probabilities(row) for row in logits_VV])


def pair_truth(sampling: Sampling) -> Tensor:
    """Return the exact probability of each pair of first two tokens after the root, [V, V]."""
    p_VV = table(sampling)
    return p_VV[ROOT][:, None] * p_VV


def drawn_chains(count: int, depth: int, samplings: tuple[Sampling, ...], generator: torch.Generator) -> TreeBatch:
    """Return chains that a draft model drew, one per row, the settings in turn."""
    q_SVV = torch.stack([table(sampling, DRAFT_VV) for sampling in samplings])
    tokens = [torch.full((count,), ROOT)]
    kinds = torch.arange(count) % len(samplings)
    for _ in range(depth):
        tokens.append(draw(q_SVV[kinds, tokens[-1]], uniforms(count, generator=generator)))
    nodes = torch.arange(depth + 1).expand(count, -1)
    return TreeBatch(torch.stack(tokens, 1), nodes - 1, nodes, torch.full((count,), depth + 1))


def rounds(
    verify: Callable[[VerifyBatch], list[Verification]],
    tree: DraftTree | None,
    samplings: tuple[Sampling, ...],
    count: int,
    *,
    seed: int = 1,
    chunk: int = 20_000,
) -> tuple[list[Tensor], float]:
    """Return, per setting, how often each pair of first two tokens came out ([V, V]), and the mean number accepted.

    The settings alternate from row to row of one batch. Without a tree every row gets a chain of 3 drawn from the draft
    model. A round that emits one token is followed by the target's own draw for the second.
    """
    generator = coins(seed)
    counts = [torch.zeros(V, V) for _ in samplings]
    accepted = 0
    for start in range(0, count, chunk):
        size = min(chunk, count - start)
        settings = [samplings[r % len(samplings)] for r in range(size)]
        if tree is None:
            trees = drawn_chains(size, 3, samplings, generator)
            q_SVV = torch.stack([table(sampling, DRAFT_VV) for sampling in samplings])
            before = trees.tokens_RN[:, :-1]
            drawn = list(q_SVV[torch.arange(size)[:, None] % len(samplings), before])
        else:
            one = TreeBatch.of([tree])
            trees = TreeBatch(*(column.expand(size, *column.shape[1:]) for column in vars(one).values()))
            drawn = []
        N = trees.tokens_RN.shape[1]
        batch = VerifyBatch(
            trees, TARGET_VV[trees.tokens_RN], settings, uniforms(size, N, generator=generator), [None] * size, drawn
        )
        found = verify(batch)
        accepted += sum(len(verification.path) - 1 for verification in found)
        tokens_RN = trees.tokens_RN.tolist()
        emitted = [
            [*(row[node] for node in verification.path[1:]), verification.bonus_token]
            for row, verification in zip(tokens_RN, found, strict=True)
        ]
        first = torch.tensor([tokens[0] for tokens in emitted])
        p_SVV = torch.stack([table(sampling) for sampling in samplings])
        kind = torch.arange(size) % len(samplings)
        fresh = draw(p_SVV[kind, first], uniforms(size, generator=generator))
        second = torch.tensor([tokens[1] if len(tokens) > 1 else -1 for tokens in emitted])
        second = torch.where(second < 0, fresh, second)
        for k in range(len(samplings)):
            mine = kind == k
            counts[k].view(-1).index_add_(0, first[mine] * V + second[mine], torch.ones(int(mine.sum())))
    return counts, accepted / count


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Return the p-value of counts under exact probabilities.

    Cells that expect under 5 are pooled; impossible ones must be empty.
    """
    expected = float(counts.sum()) * probabilities
    assert float(counts[expected == 0].sum()) == 0
    small = (expected < 5) & (expected > 0)
    cells, truth = counts[expected >= 5], expected[expected >= 5]
    if small.any():
        cells, truth = torch.cat((cells, counts[small].sum()[None])), torch.cat((truth, expected[small].sum()[None]))
    scaled = truth.double() * (cells.double().sum() / truth.double().sum())
    return float(chisquare(cells.double().numpy(), scaled.numpy()).pvalue)
