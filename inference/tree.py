"""Draft trees: the one type that a chain, a static tree and a dynamic tree all are.

Node 0 is the root, the last committed token; parents precede children. Who sees whom, positions and paths are derived
from the parents, never carried beside them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.kernels.tree_layout import ancestor_mask, check_trees, pack_ancestors, sight_mask
from eyas.models.tree_attention import TreeLayout


@dataclass(frozen=True)
class DraftTree:
    """tokens_N (int64, target ids), parents_N (int64, -1 for the root), depths_N and scores_N (log-probabilities).

    `drawn_KV` is None for a deterministic tree. For a chain whose tokens were drawn at random it holds, for each of
    the K draft tokens, the fp64 distribution it was drawn from.
    """

    tokens_N: Tensor
    parents_N: Tensor
    depths_N: Tensor
    scores_N: Tensor
    drawn_KV: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(value) for name, value in self.__dict__.items() if name != "drawn_KV"}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the tensors of a tree must have one entry per node, given {sizes}")
        check_trees(self.parents_N[None], torch.tensor([len(self.tokens_N)]))
        parents, depths = self.parents_N.tolist(), self.depths_N.tolist()
        if depths != [0, *(depths[parent] + 1 for parent in parents[1:])]:
            raise ValueError(f"depths {depths} do not follow from parents {parents}")
        if self.drawn_KV is not None:
            K = len(self.tokens_N) - 1
            if len(self.drawn_KV) != K or parents[1:] != list(range(K)):
                raise ValueError("only a chain can be drawn, with one distribution per draft token")
            if not bool((self.drawn_KV.gather(1, self.tokens_N[1:, None]) > 0).all()):
                raise ValueError("a drawn token has probability 0 in the distribution it was drawn from")

    @classmethod
    def root(cls, token: int) -> "DraftTree":
        """Return the tree without drafts: a round over it is one step of plain decoding."""
        zero = torch.zeros(1, dtype=torch.int64)
        return cls(torch.tensor([token]), zero - 1, zero, torch.zeros(1))

    @classmethod
    def chain(cls, root: int, tokens: list[int], scores: list[float], *, drawn_KV: Tensor | None = None) -> "DraftTree":
        """Return a path: root -> tokens[0] -> tokens[1] -> ..."""
        nodes = torch.arange(len(tokens) + 1)
        return cls(torch.tensor([root, *tokens]), nodes - 1, nodes, torch.tensor([0.0, *scores]), drawn_KV)

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return int(self.depths_N.max())

    def follow(self, tokens: list[int]) -> list[int]:
        """Return the nodes that spell some tokens behind the root, as far as there are any."""
        nodes = list(zip(self.parents_N.tolist(), self.tokens_N.tolist(), strict=True))
        node, path = 0, []
        for token in tokens:
            if (node, token) not in nodes:
                break
            node = nodes.index((node, token))
            path.append(node)
        return path

    @property
    def ancestors_NN(self) -> Tensor:
        """Bool [N, N]: node i sees node j iff j is i or an ancestor of i."""
        return ancestor_mask(self.parents_N[None], torch.tensor([len(self)]))[0]


@dataclass(frozen=True)
class TreeBatch:
    """R trees side by side, the shorter ones padded: parent -1, depth 0, token 0, and each padding node sees itself."""

    tokens_RN: Tensor
    parents_RN: Tensor
    depths_RN: Tensor
    num_nodes_R: Tensor

    @classmethod
    def of(cls, trees: list[DraftTree]) -> "TreeBatch":
        """Return the batch of some trees."""

        def padded(rows: list[Tensor], value: int) -> Tensor:
            return rows[0][None] if len(rows) == 1 else pad_sequence(rows, batch_first=True, padding_value=value)

        return cls(
            tokens_RN=padded([tree.tokens_N for tree in trees], 0),
            parents_RN=padded([tree.parents_N for tree in trees], -1),
            depths_RN=padded([tree.depths_N for tree in trees], 0),
            num_nodes_R=torch.tensor([len(tree) for tree in trees]),
        )

    def to(self, device: torch.device) -> "TreeBatch":
        """Return the batch on a device."""
        columns = (self.tokens_RN, self.parents_RN, self.depths_RN, self.num_nodes_R)
        return TreeBatch(*(column.to(device) for column in columns))

    def sight(self, lengths_R: Tensor) -> Tensor:
        """Return mask_RNL of a forward: each node sees its row's first `lengths` slots and, behind them, its path."""
        R, N = self.tokens_RN.shape
        tree_RNN = ancestor_mask(self.parents_RN, self.num_nodes_R)
        if R == 1:
            return torch.cat((torch.ones(1, N, int(lengths_R[0]), dtype=torch.bool), tree_RNN), dim=2)
        tree_RNN = tree_RNN | torch.eye(N, dtype=torch.bool)
        return sight_mask(lengths_R, tree_RNN, int(lengths_R.max()) + N)

    def layout(self, lengths_R: Tensor, device: torch.device) -> TreeLayout:
        """Return where the trees lie behind their rows' first `lengths` slots, on a device."""
        ancestors_RNW = pack_ancestors(ancestor_mask(self.parents_RN, self.num_nodes_R))
        return TreeLayout(lengths_R, self.num_nodes_R, ancestors_RNW).to(device)
