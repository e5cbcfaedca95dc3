"""Verification: which drafted nodes the target accepts, and the token it adds.

greedy    walk from the root to the child that equals the target's argmax; the bonus is the argmax at the last one.
sampling  draw X from the target's distribution at the node; accept the child X if there is one, else X is the bonus.
          Lossless for deterministic trees without any draft probability, and the best possible for them.
NaN logits are never accepted: both raise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.kernels.verify_tree_greedy import verify_tree_greedy
from eyas.models.draw import draw


@dataclass(frozen=True)
class Verification:
    """`path`: accepted nodes from the root (0) down; `bonus_token`: the target's token after the last of them."""

    path: tuple[int, ...]
    bonus_token: int


Verifier = Callable[[DraftTree, Tensor, Sampling, torch.Generator], Verification]


def verify_greedy(tree: DraftTree, logits_NV: Tensor, _sampling: Sampling, _coins: torch.Generator) -> Verification:
    """Return the greedy verification of a tree under the target's logits."""
    argmax_N = torch.where(logits_NV.isnan().any(-1), -1, logits_NV.argmax(-1)).cpu()
    result = verify_tree_greedy(tree.tokens_N[None], tree.parents_N[None], torch.tensor([len(tree)]), argmax_N[None])
    accepted, bonus = int(result.num_accepted_B[0]), int(result.bonus_B[0])
    if bonus < 0:
        raise FloatingPointError("the target produced NaN logits; nothing of this round is accepted")
    return Verification(tuple(result.path_BN[0, : accepted + 1].tolist()), bonus)


def verify_by_sampling(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, coins: torch.Generator) -> Verification:
    """Return a lossless random verification of a deterministic tree."""
    path = [0]
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    while True:
        logits_V = logits_NV[path[-1]]
        if bool(logits_V.isnan().any()):
            raise FloatingPointError("the target produced NaN logits; nothing of this round is accepted")
        coin = torch.rand(1, generator=coins, dtype=torch.float64)
        token = int(draw(sampling.probabilities(logits_V)[None].cpu(), coin))
        child = next((i for i in range(path[-1] + 1, len(tree)) if parents[i] == path[-1] and tokens[i] == token), None)
        if child is None:
            return Verification(tuple(path), token)
        path.append(child)


VERIFIERS: dict[str, Verifier] = {"greedy": verify_greedy, "sampling": verify_by_sampling}
