"""Makers of draft trees: what an EAGLE head's guesses are turned into, for all rows of a session at once.

`trees.py` names them all. A dynamic tree (EAGLE-2): every level expands its frontier by top_k children each, keeps the
top_k by cumulative probability as the next frontier, and at the end the best num_draft_tokens of all candidates form
the tree. That is connected, because a child never scores above its parent and ties go to the parent.
A static tree (EAGLE-1) has the same shape in every round: see `static_tree.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.inference.calibration import Calibration
from eyas.inference.sampling import Sampling
from eyas.inference.static_tree import EAGLE1_PATHS, StaticShape
from eyas.inference.tree import DraftTree
from eyas.kernels.build_tree import Trees, build_tree
from eyas.kernels.draft_top_k import MAX_K, draft_top_k
from eyas.kernels.tree_layout import ancestor_mask, pack_ancestors
from eyas.kernels.triton_support import available
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError


class HeadState(Protocol):
    """What a maker reads of a session's drafting state: the head, each row's last slot, and how to run tree nodes."""

    head: DraftHead
    samplings: list[Sampling]
    features_RD: Tensor
    logits_RU: Tensor

    def expand(
        self, features_RKD: Tensor, tokens_RK: Tensor, *, depth: int, tree_mask_RKN: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class TreeMaker(Protocol):
    """Drafts a tree below every row's root."""

    @property
    def depth(self) -> int: ...

    @property
    def max_nodes(self) -> int:
        """Nodes of a tree, root included."""
        ...

    @property
    def scratch(self) -> int:
        """Tree nodes the draft cache must hold while drafting."""
        ...

    def check(self, draft_vocab_size: int) -> None:
        """Raise UserError when a head with so many draft tokens cannot draw this tree."""
        ...

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]: ...


@runtime_checkable
class FixedMaker(TreeMaker, Protocol):
    """A maker that can draft without the host."""

    @property
    def fixed(self) -> bool:
        """Whether all its trees have one number of nodes, and nothing about them is decided on the host.

        Calibrated scores are: they depend on a row's temperature.
        """
        ...

    def num_nodes(self, draft_vocab_size: int) -> int:
        """Return how many nodes every tree of a head with so many draft tokens has, root included."""
        ...

    def grow(self, state: HeadState, root_R: Tensor) -> Trees:
        """Return the trees of `make` as tensors on the head's device; reads nothing back."""
        ...


def best_children(logits_RKU: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, draft ids) of the k likeliest children of every node, [R, K, k], best first."""
    if available(logits_RKU.device) and k <= MAX_K:
        best = draft_top_k(logits_RKU, k)
        return best.log_probs_BNK, best.ids_BNK
    log_p_RKU = torch.log_softmax(logits_RKU.float(), -1)
    values, ids = log_p_RKU.max(-1, keepdim=True) if k == 1 else log_p_RKU.topk(k)
    return values, ids


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
        return self.depth - 1

    def check(self, draft_vocab_size: int) -> None:
        """A chain can be drawn by any head."""

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        tokens_RK, scores_RK = self._levels(state)
        rows = zip(roots, tokens_RK.tolist(), scores_RK.tolist(), strict=True)
        return [DraftTree.chain(root, row_tokens, row_scores) for root, row_tokens, row_scores in rows]

    def grow(self, state: HeadState, root_R: Tensor) -> Trees:
        """Return the same chains as tensors on the head's device, all of one shape; reads nothing back."""
        tokens_RK, scores_RK = self._levels(state)
        node_RN = torch.arange(self.max_nodes, device=root_R.device).expand(len(root_R), -1)
        whole_R = torch.full_like(root_R, self.max_nodes)
        return Trees(
            tokens_BN=torch.cat((root_R[:, None], tokens_RK), dim=1),
            parents_BN=node_RN - 1,
            depths_BN=node_RN,
            scores_BN=torch.cat((torch.zeros_like(scores_RK[:, :1]), scores_RK), dim=1),
            ancestors_BNW=pack_ancestors(ancestor_mask(node_RN - 1, whole_R)),
        )

    @property
    def fixed(self) -> bool:
        return True

    def num_nodes(self, draft_vocab_size: int) -> int:
        return self.max_nodes

    def _levels(self, state: HeadState) -> tuple[Tensor, Tensor]:
        """Return (tokens_RK, scores_RK) of the chain below every root."""
        R, device = len(state.logits_RU), state.logits_RU.device
        features_R1D, logits_R1U = state.features_RD[:, None], state.logits_RU[:, None]
        total_R1 = torch.zeros(R, 1, device=device)
        tokens, scores = [], []
        for level in range(1, self.depth + 1):
            log_p_R11, ids_R11 = best_children(logits_R1U, 1)
            total_R1 = total_R1 + log_p_R11[:, 0]
            tokens.append(state.head.to_target_ids(ids_R11[:, 0]))
            scores.append(total_R1)
            if level < self.depth:
                mask = torch.ones(R, 1, level, dtype=torch.bool, device=device)
                features_R1D, logits_R1U = state.expand(features_R1D, tokens[-1], depth=level, tree_mask_RKN=mask)
        return torch.cat(tokens, 1), torch.cat(scores, 1)


Columns = tuple[Tensor, Tensor, Tensor, Tensor]  # tokens, parents, depths, scores of candidates in level order, [R, P]
Ints = NDArray[np.int64]
Reals = NDArray[np.floating[Any]]
GoesOn = Callable[[Columns, Tensor], bool]  # (the candidates so far, which of them would be expanded_RK)


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: `depth` levels, `top_k` wide, the best `num_draft_tokens` candidates kept.

    A score is the log-probability that the head gives a path or, with a calibration, that of the path's acceptance.
    """

    depth: int
    top_k: int
    num_draft_tokens: int
    calibration: Calibration | None = None

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

    def check(self, draft_vocab_size: int) -> None:
        """A tree that is wider than the draft vocabulary takes all of it."""

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        if available(state.logits_RU.device):
            trees = self.grow(state, torch.tensor(roots, device=state.logits_RU.device))
            return [DraftTree(*row) for row in zip(*(column.cpu() for column in trees[:4]), strict=True)]
        return self.rerank(roots, *self.candidates(state), count=self.num_draft_tokens)

    def grow(self, state: HeadState, root_R: Tensor) -> Trees:
        """Return the same trees as tensors on the head's device, all of one shape; reads nothing back."""
        tokens_RP, parents_RP, depths_RP, scores_RP = self.candidates(state)
        count = self.num_nodes(state.head.config.draft_vocab_size) - 1
        return build_tree(root_R, tokens_RP, parents_RP, depths_RP[0], scores_RP, num_draft_tokens=count)

    @property
    def fixed(self) -> bool:
        return self.calibration is None

    def num_nodes(self, draft_vocab_size: int) -> int:
        k = min(self.top_k, draft_vocab_size)
        return 1 + min(self.num_draft_tokens, k + (self.depth - 1) * k**2)

    def candidates(self, state: HeadState, goes_on: GoesOn | None = None) -> Columns:
        """Return every candidate in level order, on the head's device; a parent is a place in that order, -1 the root.

        Before every level but the first `goes_on`, where given, is asked whether to draw it.
        """
        logits_RU = state.logits_RU
        R, device = len(logits_RU), logits_RU.device
        k = min(self.top_k, state.head.config.draft_vocab_size)
        log_p_R1K, ids_R1K = best_children(logits_RU[:, None], k)
        tokens, scores = [state.head.to_target_ids(ids_R1K[:, 0])], [self._judged(state, log_p_R1K[:, 0], 1)]
        parents = [torch.full((R, k), -1, device=device)]
        depths = [torch.ones(R, k, dtype=torch.int64, device=device)]
        frontier, pool_size = torch.arange(k, device=device).expand(R, k), k
        features = state.features_RD[:, None].expand(R, k, -1)
        frontier_tokens, frontier_scores = tokens[0], scores[0]
        own = seen = torch.eye(k, dtype=torch.bool, device=device).expand(R, k, k)
        for depth in range(2, self.depth + 1):
            if goes_on is not None and not goes_on(_columns(tokens, parents, depths, scores), frontier):
                break
            features, logits = state.expand(features, frontier_tokens, depth=depth - 1, tree_mask_RKN=seen)
            log_p_RKK, ids_RKK = best_children(logits, k)
            totals = (self._judged(state, log_p_RKK, depth) + frontier_scores[..., None]).flatten(1)
            child_tokens = state.head.to_target_ids(ids_RKK).flatten(1)
            tokens.append(child_tokens)
            scores.append(totals)
            parents.append(frontier.repeat_interleave(k, dim=1))
            depths.append(torch.full_like(parents[-1], depth))
            kept = totals.topk(k)
            origin = kept.indices // k
            frontier, pool_size = pool_size + kept.indices, pool_size + totals.shape[1]
            features = features.gather(1, origin[..., None].expand(-1, -1, features.shape[-1]))
            frontier_tokens, frontier_scores = child_tokens.gather(1, kept.indices), kept.values
            seen = torch.cat((seen.gather(1, origin[..., None].expand(-1, -1, seen.shape[-1])), own), dim=2)
        return _columns(tokens, parents, depths, scores)

    def _judged(self, state: HeadState, log_q: Tensor, depth: int) -> Tensor:
        """Return the scores of children below their parents, from the head's own log-probabilities [R, ...]."""
        if self.calibration is None:
            return log_q
        return self.calibration.log_accept(log_q, depth=depth, temperatures=[s.temperature for s in state.samplings])

    @staticmethod
    def rerank(
        roots: list[int], tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, *, count: int
    ) -> list[DraftTree]:
        """Return the trees of the best `count` candidates; the stable sort makes ties go to the parent."""
        on_host = tuple(column.cpu().numpy() for column in (tokens, parents, depths, scores))
        best_RC = best_candidates(on_host[3], count)
        return [
            tree_of(root, *row, chosen_C=best_C) for root, *row, best_C in zip(roots, *on_host, best_RC, strict=True)
        ]


def _columns(*lists: list[Tensor]) -> Columns:
    tokens, parents, depths, scores = (torch.cat(column, 1) for column in lists)
    return tokens, parents, depths, scores


def best_candidates(scores_RP: Reals, count: int) -> Ints:
    """Return the places of the best `count` candidates, ascending; the stable sort makes ties go to the parent."""
    return np.sort(np.argsort(-scores_RP, axis=1, kind="stable")[:, :count], axis=1)


def tree_of(
    root: int, tokens_P: Ints, parents_P: Ints, depths_P: Ints, scores_P: Reals, *, chosen_C: Ints
) -> DraftTree:
    """Return the tree of chosen candidates (ascending places) below a root; the parents of all are chosen too."""
    parents_C = parents_P[chosen_C]
    positions_C = np.where(parents_C < 0, 0, np.searchsorted(chosen_C, parents_C) + 1)

    def below(first: int, rest: NDArray[Any]) -> Tensor:
        column = np.empty(len(rest) + 1, dtype=rest.dtype)
        column[0], column[1:] = first, rest
        return torch.from_numpy(column)

    return DraftTree(
        below(root, tokens_P[chosen_C]),
        below(-1, positions_C),
        below(0, depths_P[chosen_C]),
        below(0, scores_P[chosen_C]),
    )


@dataclass(frozen=True)
class StaticTree:
    """EAGLE-1's tree: in every round the same paths of child ranks (0: the head's best child, 1: its second, ...)."""

    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS

    def __post_init__(self) -> None:
        _ = self.shape  # raises for paths that make no tree

    @cached_property
    def shape(self) -> StaticShape:
        return StaticShape.of(self.paths)

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def max_nodes(self) -> int:
        return len(self.shape.parents_N)

    @property
    def scratch(self) -> int:
        return sum(len(level.run) for level in self.shape.levels[1:])

    def check(self, draft_vocab_size: int) -> None:
        """Raise UserError when a rank exceeds the head's vocabulary."""
        widest = max(max(path) for path in self.paths)
        if widest >= draft_vocab_size:
            raise UserError(f"the static tree asks for child rank {widest}; the head drafts {draft_vocab_size} tokens.")

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        R, device = len(roots), state.logits_RU.device
        features_RKD, logits_RKU = state.features_RD[:, None], state.logits_RU[:, None]
        above_RK = torch.zeros(R, 1, device=device)
        tokens, scores = [torch.tensor(roots, device=device)[:, None]], [above_RK]
        for depth, level in enumerate(self.shape.levels):
            if depth > 0:
                run = torch.tensor(level.run, device=device)
                origin = torch.tensor(level.origin, device=device)
                mask = level.sight_KN.to(device).expand(R, -1, -1)
                features_RKD, logits_RKU = state.expand(
                    features_RKD[:, origin], tokens[-1][:, run], depth=depth, tree_mask_RKN=mask
                )
                above_RK = scores[-1][:, run]
            log_p_RKW, ids_RKW = best_children(logits_RKU, level.width)
            parent, rank = torch.tensor(level.parent, device=device), torch.tensor(level.rank, device=device)
            tokens.append(state.head.to_target_ids(ids_RKW[:, parent, rank]))
            scores.append(above_RK[:, parent] + log_p_RKW[:, parent, rank])
        rows = zip(torch.cat(tokens, 1).cpu(), torch.cat(scores, 1).cpu(), strict=True)
        shape = self.shape
        return [DraftTree(row_tokens, shape.parents_N, shape.depths_N, row_scores) for row_tokens, row_scores in rows]
