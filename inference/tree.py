"""Draft trees: the one type that a chain, a static tree and a dynamic tree all are.

Node 0 is the root, the last committed token; parents precede children. Who sees whom, positions and paths are derived
from the parents, never carried beside them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.tree_layout import ancestor_mask, check_trees


@dataclass(frozen=True)
class DraftTree:
    """tokens_N (int64, target ids), parents_N (int64, -1 for the root), depths_N and scores_N (log-probabilities)."""

    tokens_N: Tensor
    parents_N: Tensor
    depths_N: Tensor
    scores_N: Tensor

    def __post_init__(self) -> None:
        sizes = {name: len(value) for name, value in self.__dict__.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the tensors of a tree must have one entry per node, given {sizes}")
        check_trees(self.parents_N[None], torch.tensor([len(self.tokens_N)]))
        parents = self.parents_N[1:]
        if self.depths_N[0] != 0 or not torch.equal(self.depths_N[1:], self.depths_N[parents] + 1):
            raise ValueError(f"depths {self.depths_N.tolist()} do not follow from parents {self.parents_N.tolist()}")

    @classmethod
    def root(cls, token: int) -> "DraftTree":
        """Return the tree without drafts: a round over it is one step of plain decoding."""
        zero = torch.zeros(1, dtype=torch.int64)
        return cls(torch.tensor([token]), zero - 1, zero, torch.zeros(1))

    @classmethod
    def chain(cls, root: int, tokens: list[int], scores: list[float]) -> "DraftTree":
        """Return a path: root -> tokens[0] -> tokens[1] -> ..."""
        nodes = torch.arange(len(tokens) + 1)
        return cls(torch.tensor([root, *tokens]), nodes - 1, nodes, torch.tensor([0.0, *scores]))

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return int(self.depths_N.max())

    @property
    def ancestors_NN(self) -> Tensor:
        """Bool [N, N]: node i sees node j iff j is i or an ancestor of i."""
        return ancestor_mask(self.parents_N[None], torch.tensor([len(self)]))[0]
