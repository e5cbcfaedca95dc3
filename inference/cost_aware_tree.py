"""The cost-aware tree: a dynamic tree of as many levels and nodes as pay on this machine."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eyas.inference.budget import Budget, best_budget, expected_gains
from eyas.inference.calibration import Calibration
from eyas.inference.draft import DynamicTree, HeadState
from eyas.inference.latency import LatencyTable
from eyas.inference.tree import DraftTree


@dataclass(frozen=True)
class PricedTrees:
    """Trees, how many drafts of each are accepted by the calibration alone and with trust, and the round's seconds."""

    trees: list[DraftTree]
    promised_R: list[float]
    expected_R: list[float]
    seconds: float


@dataclass(frozen=True)
class CostAwareTree:
    """A dynamic tree of at most `depth` levels and `num_draft_tokens` nodes: as many of both as pay on this machine.

    A round costs drafting and one target forward; its worth is the tokens it should emit. Another level is drawn while
    the best rate it promises is above the best one without it; then as many nodes are kept as make the rate highest,
    the same number in every row because the forward is as wide as its widest row. None at all is a choice too.
    """

    depth: int
    top_k: int
    num_draft_tokens: int
    calibration: Calibration
    latency: LatencyTable

    def __post_init__(self) -> None:
        _ = self.shape  # raises for numbers that make no tree

    @cached_property
    def shape(self) -> DynamicTree:
        return DynamicTree(self.depth, self.top_k, self.num_draft_tokens, self.calibration)

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def scratch(self) -> int:
        return self.shape.scratch

    def check(self, draft_vocab_size: int) -> None:
        """A tree that is wider than the draft vocabulary takes all of it."""

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        return self.price(state, roots, [1.0] * len(roots)).trees

    def price(self, state: HeadState, roots: list[int], trust_R: list[float]) -> PricedTrees:
        """Return the trees that pay best; `trust_R`, at most 1, corrects every step of each row's paths by a factor."""
        R = len(roots)
        verify_N = self.latency.verify_seconds(R)[: self.max_nodes]
        trust_R1 = torch.tensor(trust_R)[:, None]
        temperatures = [sampling.temperature for sampling in state.samplings]

        def budget(depths_RP: Tensor, scores_RP: Tensor) -> tuple[Budget, Tensor]:
            gains_RN = expected_gains(scores_RP, depths_RP, trust_R1, most=len(verify_N) - 1)
            return best_budget(gains_RN, verify_N, self.latency.draft_seconds(R, int(depths_RP.max()))), gains_RN

        def pays(depths_RP: Tensor, scores_RP: Tensor, frontier_RK: Tensor) -> bool:
            depths_RP, scores_RP, frontier_RK = depths_RP.cpu(), scores_RP.cpu(), frontier_RK.cpu()
            deeper = int(depths_RP.max()) + 1
            hits_R = torch.tensor(self.calibration.hit_rates(deeper, temperatures))
            promised_RK = frontier_RK + hits_R.log()[:, None]
            here, _ = budget(depths_RP, scores_RP)
            there, _ = budget(
                torch.cat((depths_RP, torch.full_like(promised_RK, deeper, dtype=torch.int64)), dim=1),
                torch.cat((scores_RP, promised_RK), dim=1),
            )
            return there.rate > here.rate

        tokens, parents, depths_RP, scores_RP = (column.cpu() for column in self.shape.candidates(state, pays))
        chosen, gains_RN = budget(depths_RP, scores_RP)
        if chosen.nodes == 0:
            trees = [DraftTree.root(root) for root in roots]
        else:
            trees = self.shape.rerank(roots, tokens, parents, depths_RP, scores_RP, count=chosen.nodes)
        promised_R = [float(tree.scores_N[1:].double().exp().sum()) for tree in trees]
        return PricedTrees(trees, promised_R, gains_RN[:, chosen.nodes].tolist(), chosen.seconds)
