"""Drafting with an EAGLE head: committed slots with target features, then tree levels with the head's own features.

    committed slots 0..t    feature from the target,  token x_{t+1}  -> logits of depth 1
    a node of depth d       feature from its parent,  its own token  -> logits of depth d+1,   RoPE position t+d

One `step` of the head serves all rows of the session: at a commit, and at every level of their trees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.inference.cost_aware_tree import CostAwareTree
from eyas.inference.draft import TreeMaker
from eyas.inference.drafter import Drafting
from eyas.inference.paced_drafting import PacedDrafting
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.models.draft_cache import DraftCache
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.target import Target, TargetOutput


@dataclass(frozen=True)
class EagleDrafter:
    """A head and the kind of tree it draws."""

    head: DraftHead
    tree: TreeMaker

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    def max_nodes(self) -> int:
        return self.tree.max_nodes

    def check(self, target: Target) -> None:
        """Raise UserError when a head was made for a target of other layers, width, layer count or vocabulary."""
        config = self.head.config
        expected: dict[str, tuple[object, object]] = {
            "hidden size": (config.target_hidden_size, target.config.hidden_size),
            "layers": (config.target_num_layers, target.config.num_hidden_layers),
            "vocabulary": (config.vocab_size, target.vocab_size),
        }
        if config.aux_layers:  # an EAGLE-1 head reads the final state, which every target gives
            expected["aux layers"] = (config.aux_layers, target.aux_layers)
        for what, (of_head, of_target) in expected.items():
            if of_head != of_target:
                raise UserError(
                    f"this head was made for a target with {what} {of_head}, the target given has {of_target}."
                )
        self.tree.check(config.draft_vocab_size)
        self.head.lend(target)

    def open(self) -> Drafting:
        drafting = EagleDrafting(self.head, self.tree)
        return PacedDrafting(drafting, self.tree) if isinstance(self.tree, CostAwareTree) else drafting


class EagleDrafting:
    """The drafting state of a session's rows. The head may be less precise than the target: drafts are only guesses.

    `features_RD` and `logits_RU` are those of each row's last committed slot.
    """

    def __init__(self, head: DraftHead, tree: TreeMaker) -> None:
        weight = next(head.parameters())
        self.head = head
        self.tree = tree
        self.rows = 0
        self.samplings: list[Sampling] = []
        self.cache = DraftCache(
            kv_heads=head.config.num_key_value_heads,
            head_dim=head.config.head_dim,
            capacity=0,
            dtype=weight.dtype,
            device=weight.device,
            batch=0,
            layers=head.config.num_layers,
        )
        self.features_RD = weight.new_empty(0, head.config.hidden_size)
        self.logits_RU = weight.new_empty(0, head.config.draft_vocab_size)

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        self.rows += len(prompts)
        self.samplings += samplings
        # Behind the committed slots lie a tree's nodes, or the padding of a commit of up to depth + 1 slots.
        spare = max(self.tree.scratch, self.tree.depth + 1)
        self.cache.grow(batch=self.rows, capacity=capacity + spare)

    @torch.inference_mode()
    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        counts = [len(tokens) for tokens in next_tokens]
        starts = self.cache.lengths[first : first + len(counts)]
        longest, device = max(counts), self.features_RD.device
        tokens_RT = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in next_tokens], device=device)
        positions_RT = torch.tensor(starts, device=device)[:, None] + torch.arange(longest, device=device)
        self.cache.commit(*counts, first=first)
        read_RTF = self.head.states(states.aux_hidden_BTF, states.final_hidden_BTD)[:, :longest]
        fused_RTD = self.head.fuse(read_RTF.to(self.features_RD.dtype))
        last_R = torch.tensor([r * longest + count - 1 for r, count in enumerate(counts)], device=device)
        feature, logits = self.head.step(fused_RTD, tokens_RT, positions_RT, self.cache, logits_at=last_R)
        behind = first + len(counts)
        features_RD = feature.flatten(0, 1)[last_R]
        self.features_RD = torch.cat((self.features_RD[:first], features_RD, self.features_RD[behind:]))
        self.logits_RU = torch.cat((self.logits_RU[:first], logits, self.logits_RU[behind:]))

    @torch.inference_mode()
    def draft(self, roots: list[int]) -> list[DraftTree]:
        assert len(roots) == self.rows == len(self.features_RD)
        trees = self.tree.make(self, roots)
        self.cache.discard_tree()
        return trees

    @torch.inference_mode()
    def expand(
        self, features_RKD: Tensor, tokens_RK: Tensor, *, depth: int, tree_mask_RKN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run K nodes of one depth in every row and return (their features_RKD, draft logits_RKU of their children)."""
        self.cache.draft(tree_mask_RKN, rows=self.rows)
        lengths_R = torch.tensor(self.cache.lengths[: self.rows], device=tokens_RK.device)
        positions_RK = (lengths_R - 1 + depth)[:, None].expand_as(tokens_RK)
        return self.head.step(features_RKD, tokens_RK, positions_RK, self.cache)

    def leave(self, row: int) -> None:
        self.rows -= 1
        self.samplings[row] = self.samplings[-1]
        self.samplings.pop()
        kept = list(range(self.rows + 1))
        kept[row] = self.rows
        if row != self.rows:
            self.cache.move_row(self.rows, row)
        self.cache.lengths[self.rows] = 0
        kept_R = torch.tensor(kept[: self.rows], dtype=torch.int64, device=self.features_RD.device)
        self.features_RD, self.logits_RU = self.features_RD[kept_R], self.logits_RU[kept_R]
