"""Drafting with an EAGLE head: committed slots with target features, then tree levels with the head's own features.

    committed slots 0..t    feature from the target,  token x_{t+1}  -> logits of depth 1
    a node of depth d       feature from its parent,  its own token  -> logits of depth d+1,   RoPE position t+d

`TREES` names the makers. A dynamic tree (EAGLE-2): every level expands its frontier by top_k children each, keeps the
top_k by cumulative probability as the next frontier, and at the end the best num_draft_tokens of all candidates form
the tree. That is connected, because a child never scores above its parent and ties go to the parent.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.inference.tree import DraftTree
from eyas.models.draft_cache import DraftCache
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.target import TargetOutput


class EagleDrafter:
    """The drafting state of one request. The head may be less precise than the target: drafts are only guesses."""

    def __init__(self, head: DraftHead, *, capacity: int) -> None:
        self.head = head
        self.cache = DraftCache(
            kv_heads=head.config.num_key_value_heads,
            head_dim=head.config.head_dim,
            capacity=capacity,
            dtype=head.dtype,
            device=head.device,
        )
        self.feature_D: Tensor | None = None
        self.logits_U: Tensor | None = None

    def states(self, out: TargetOutput) -> Tensor:
        """Return the states of a batch-1 target forward that the head reads, [T, F]."""
        return self.head.states(out.aux_hidden_BTF[0], out.final_hidden_BTD[0])

    @torch.inference_mode()
    def extend(self, states_TF: Tensor, next_tokens_T: Tensor) -> None:
        """Commit T slots: the target states that the head reads, and the token that follows each."""
        T = len(next_tokens_T)
        start = self.cache.length
        self.cache.commit(T)
        positions = torch.arange(start, start + T, device=next_tokens_T.device)[None]
        feature = self.head.fuse(states_TF[None].to(self.head.dtype))
        last = torch.tensor([T - 1], device=next_tokens_T.device)
        feature, logits = self.head.step(feature, next_tokens_T[None], positions, self.cache, logits_at=last)
        self.feature_D, self.logits_U = feature[0, -1], logits[0]

    @torch.inference_mode()
    def expand(
        self, features_KD: Tensor, tokens_K: Tensor, *, depth: int, tree_mask_KN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run K nodes of one depth and return (their features_KD, draft logits_KU of their children)."""
        self.cache.draft(tree_mask_KN)
        positions = torch.full((1, len(tokens_K)), self.cache.length - 1 + depth, device=tokens_K.device)
        feature, logits = self.head.step(features_KD[None], tokens_K[None], positions, self.cache)
        return feature[0], logits[0]


class TreeMaker(Protocol):
    """Drafts a tree below `root` from a drafter's state, leaving the drafter's committed slots as they were."""

    @property
    def depth(self) -> int: ...

    @property
    def max_nodes(self) -> int: ...

    @property
    def scratch(self) -> int:
        """Tree nodes the draft cache must hold while drafting."""
        ...

    def make(self, drafter: EagleDrafter, root: int) -> DraftTree: ...


@dataclass(frozen=True)
class ChainTree:
    """The head's own greedy continuation, `depth` tokens."""

    depth: int

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise UserError(f"a chain needs a depth of at least 1, given {self.depth}.")

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    @property
    def scratch(self) -> int:
        return self.depth

    def make(self, drafter: EagleDrafter, root: int) -> DraftTree:
        feature, logits = drafter.feature_D, drafter.logits_U
        assert feature is not None
        assert logits is not None
        tokens: list[int] = []
        scores: list[float] = []
        total = 0.0
        for level in range(1, self.depth + 1):
            best = torch.log_softmax(logits.float(), -1).max(-1)
            total += float(best.values)
            token = drafter.head.to_target_ids(best.indices)
            tokens.append(int(token))
            scores.append(total)
            if level < self.depth:
                mask = torch.ones(1, level, dtype=torch.bool, device=token.device)
                features, level_logits = drafter.expand(feature[None], token[None], depth=level, tree_mask_KN=mask)
                feature, logits = features[0], level_logits[0]
        drafter.cache.discard_tree()
        return DraftTree.chain(root, tokens, scores)


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: `depth` levels, `top_k` wide, the best `num_draft_tokens` candidates kept."""

    depth: int
    top_k: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        pool = self.top_k + (self.depth - 1) * self.top_k**2
        if self.depth < 1 or self.top_k < 1 or not 1 <= self.num_draft_tokens <= pool:
            raise UserError(
                f"a tree of depth {self.depth} and top_k {self.top_k} has {max(pool, 0)} candidates, so "
                f"num_draft_tokens must be between 1 and that; given {self.num_draft_tokens}."
            )

    @property
    def max_nodes(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def scratch(self) -> int:
        return self.top_k * (self.depth - 1)

    def make(self, drafter: EagleDrafter, root: int) -> DraftTree:
        return self._rerank(root, *(column.cpu() for column in self._candidates(drafter)))

    def _candidates(self, drafter: EagleDrafter) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (tokens, parents, depths, scores) of every candidate in level order, on the head's device."""
        assert drafter.feature_D is not None
        assert drafter.logits_U is not None
        device = drafter.logits_U.device
        k = min(self.top_k, drafter.head.config.draft_vocab_size)
        best = torch.log_softmax(drafter.logits_U.float(), -1).topk(k)
        # The pool lists every candidate in level order; a parent is a pool index, -1 for the root.
        tokens, scores = [drafter.head.to_target_ids(best.indices)], [best.values]
        parents = [torch.full((k,), -1, device=device)]
        depths = [torch.ones(k, dtype=torch.int64, device=device)]
        frontier, pool_size = torch.arange(k, device=device), k
        features = drafter.feature_D.expand(k, -1)
        frontier_tokens, frontier_scores = tokens[0], scores[0]
        own = seen = torch.eye(k, dtype=torch.bool, device=device)
        for depth in range(2, self.depth + 1):
            features, logits = drafter.expand(features, frontier_tokens, depth=depth - 1, tree_mask_KN=seen)
            child = torch.log_softmax(logits.float(), -1).topk(k)
            totals = (child.values + frontier_scores[:, None]).flatten()
            child_tokens = drafter.head.to_target_ids(child.indices).flatten()
            tokens.append(child_tokens)
            scores.append(totals)
            parents.append(frontier.repeat_interleave(k))
            depths.append(torch.full_like(parents[-1], depth))
            kept = totals.topk(k)
            origin = kept.indices // k
            frontier, pool_size = pool_size + kept.indices, pool_size + len(totals)
            features, frontier_tokens, frontier_scores = features[origin], child_tokens[kept.indices], kept.values
            seen = torch.cat((seen[origin], own), dim=1)
        drafter.cache.discard_tree()
        return torch.cat(tokens), torch.cat(parents), torch.cat(depths), torch.cat(scores)

    def _rerank(self, root: int, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor) -> DraftTree:
        """Return the tree of the best candidates; the stable sort makes ties go to the parent."""
        chosen = torch.sort(scores, descending=True, stable=True).indices[: self.num_draft_tokens].sort().values
        of_chosen = parents[chosen]
        position = torch.where(of_chosen < 0, 0, torch.searchsorted(chosen, of_chosen.clamp(min=0)) + 1)
        return DraftTree(
            tokens_N=torch.cat((torch.tensor([root]), tokens[chosen])),
            parents_N=torch.cat((torch.tensor([-1]), position)),
            depths_N=torch.cat((torch.tensor([0]), depths[chosen])),
            scores_N=torch.cat((torch.zeros(1), scores[chosen])),
        )


TREES = {"chain": ChainTree, "dynamic": DynamicTree}
