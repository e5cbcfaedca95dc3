"""Replay: the acceptance of rounds over a row that the target wrote greedily, without the target.

Rounds start where the last one failed, at the harder positions, so averaging over all slots over-states tau. Rounds are
walked one by one as the engine would: start at the slot before the first drafted token, accept n, go on n + 1 slots
later. A chain's drafts are computed for all slots in parallel (they equal what the runtime drafts there); trees are
drafted round by round by the runtime's own drafting state, many rows side by side, fed with the stored states.

The same rounds verified by sampling at T=1: the target's distribution is known at every node that lies on the row, so

    P(at least d accepted) = p(the row's tokens down to depth d - 1, while the tree has them) * sum of p over children

in the mean. Children of a token that the row does not hold are not counted: the distribution there was never stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import TreeMaker
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.sampling import Sampling
from eyas.inference.tree import TreeBatch
from eyas.kernels.verify_tree_greedy import verify_tree_greedy
from eyas.models.draft_head import DraftHead
from eyas.models.target import TargetOutput

Odds = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows_N, positions_N, tokens_N) -> p_N: how likely the target holds a token behind a position of a row, at T=1."""


@dataclass(frozen=True)
class Replay:
    """`greedy` counts the rounds as decoding at T=0 does; `sampled` what the same rounds accept at T=1, in the mean."""

    greedy: AcceptanceStats
    sampled: AcceptanceStats

    def __add__(self, other: "Replay") -> "Replay":
        return Replay(self.greedy + other.greedy, self.sampled + other.sampled)


def chain_rounds(hits_TS: Tensor, *, first: int, last: int) -> list[tuple[int, int]]:
    """Return (slot, accepted drafts) of every round of one reply at token positions first..last (inclusive).

    `hits_TS` is bool: whether the draft of slot t at step s equals the row's token t+2+s. The first reply token comes
    from the prefill; the round that starts at slot t has root t+1. Drafts past `last` are not counted.
    """
    run_T = hits_TS.long().cumprod(-1).sum(-1).tolist()
    rounds, slot = [], first - 1
    while (left := last - (slot + 1)) > 0:
        rounds.append((slot, min(run_T[slot], left)))
        slot += rounds[-1][1] + 1
    return rounds


def replay_chain(hits_TS: Tensor, *, first: int, last: int) -> AcceptanceStats:
    """Return the acceptance of replaying one reply at token positions first..last (inclusive)."""
    stats = AcceptanceStats(hits_TS.shape[1])
    for _, accepted in chain_rounds(hits_TS, first=first, last=last):
        stats.record(accepted, drafted=stats.depth)
    return stats


def sample_chain(hits_TS: Tensor, odds_TS: Tensor, *, first: int, last: int) -> AcceptanceStats:
    """Return what the rounds of `replay_chain` accept at T=1; `odds_TS` are the target's for every draft."""
    slots = [slot for slot, _ in chain_rounds(hits_TS, first=first, last=last)]
    depth, odds_RS = hits_TS.shape[1], odds_TS[slots].double()
    on_row_RS = (odds_RS * hits_TS[slots]).cumprod(-1)
    survival_RS = torch.cat((odds_RS[:, :1], on_row_RS[:, :-1] * odds_RS[:, 1:]), dim=1)
    return AcceptanceStats(depth, len(slots), depth * len(slots), survival_RS.sum(0).tolist())


def average_over_slots(hits_TS: Tensor, *, first: int, last: int) -> AcceptanceStats:
    """Return the slot average over the same reply: every slot counted as if a round started there. Over-states tau."""
    stats = AcceptanceStats(hits_TS.shape[1])
    run_T = hits_TS.long().cumprod(-1).sum(-1).tolist()
    for slot in range(first - 1, last - 1):
        stats.record(min(run_T[slot], last - (slot + 1)), drafted=stats.depth)
    return stats


@dataclass(frozen=True)
class WrittenRow:
    """A row that the target wrote greedily: its tokens, the target's states, and (first, last) of every reply."""

    tokens_T: Tensor
    aux_hidden_TF: Tensor
    final_hidden_TD: Tensor
    replies: list[tuple[int, int]]


@dataclass
class _Walk:
    """Where replay stands in a row: the slot of the next round, and the last token of the reply it is in."""

    number: int
    row: WrittenRow
    waiting: list[tuple[int, int]]
    slot: int = field(init=False)
    last: int = field(init=False)

    def begin(self) -> bool:
        """Go to the next reply that has a round; return whether there is one."""
        while self.waiting:
            first, self.last = self.waiting.pop(0)
            self.slot = first - 1
            if self.last > first:
                return True
        return False

    def go_on(self, accepted: int) -> bool:
        """Go to the next round; return whether there is one."""
        self.slot += accepted + 1
        return self.last > self.slot + 1 or self.begin()


@torch.inference_mode()
def replay_trees(head: DraftHead, maker: TreeMaker, rows: list[WrittenRow], *, odds: Odds | None = None) -> Replay:
    """Return the acceptance of trees over some rows, side by side; without `odds` nothing is said about T=1.

    `odds` counts the rows as they are given.
    """
    walks = [_Walk(number, row, list(row.replies)) for number, row in enumerate(rows)]
    walks = [walk for walk in walks if walk.begin()]
    drafting = EagleDrafting(head, maker)
    capacity = max((len(walk.row.tokens_T) for walk in walks), default=0)
    if any(walk.waiting for walk in walks):
        capacity *= 2  # rows that commit the prompt of another turn pad those that commit a round
    drafting.join([tuple(walk.row.tokens_T.tolist()) for walk in walks], [Sampling()] * len(walks), capacity=capacity)
    total = Replay(AcceptanceStats(maker.depth), AcceptanceStats(maker.depth))
    while walks:
        _commit(drafting, walks)
        trees = drafting.draft([int(walk.row.tokens_T[walk.slot + 1]) for walk in walks])
        batch = TreeBatch.of(trees)
        found = verify_tree_greedy(batch.tokens_RN, batch.parents_RN, batch.num_nodes_R, _text_below(batch, walks))
        accepted = found.num_accepted_B.tolist()
        for tree, count in zip(trees, accepted, strict=True):
            total.greedy.record(count, drafted=len(tree) - 1)
        if odds is not None:
            total = Replay(total.greedy, total.sampled + _sample_trees(batch, walks, found.path_BN, maker.depth, odds))
        for r in range(len(walks) - 1, -1, -1):
            if not walks[r].go_on(accepted[r]):
                drafting.leave(r)
                walks[r] = walks[-1]
                walks.pop()
    return total


def _commit(drafting: EagleDrafting, walks: list[_Walk]) -> None:
    """Commit every row's slots up to that of its next round."""
    spans = [(slice(done, walk.slot + 1), walk) for done, walk in zip(drafting.cache.lengths, walks, strict=False)]
    next_tokens = [walk.row.tokens_T[span.start + 1 : span.stop + 1].tolist() for span, walk in spans]
    aux = pad_sequence([walk.row.aux_hidden_TF[span] for span, walk in spans], batch_first=True)
    final = pad_sequence([walk.row.final_hidden_TD[span] for span, walk in spans], batch_first=True)
    device = drafting.features_RD.device
    drafting.extend(0, next_tokens, TargetOutput(aux.to(device), final.to(device)))


def _text_below(batch: TreeBatch, walks: list[_Walk]) -> Tensor:
    """Return the row's token that follows each node if the node lies on the row, [R, N]; -1 past the reply's end."""
    ids_RL = pad_sequence([walk.row.tokens_T for walk in walks], batch_first=True)
    position_RN = torch.tensor([walk.slot + 2 for walk in walks])[:, None] + batch.depths_RN
    last_R1 = torch.tensor([walk.last for walk in walks])[:, None]
    text_RN = ids_RL.gather(1, position_RN.clamp(max=ids_RL.shape[1] - 1))
    return torch.where(position_RN <= last_R1, text_RN, -1)


def _sample_trees(batch: TreeBatch, walks: list[_Walk], path_RN: Tensor, depth: int, odds: Odds) -> AcceptanceStats:
    """Return what one round of every row accepts at T=1; `path_RN` are the nodes on the row, then -1."""
    R, N = batch.tokens_RN.shape
    on_row_RN = torch.zeros(R, N, dtype=torch.bool).scatter_(1, path_RN.clamp(min=0), True)
    # Behind position slot + d stands a node of depth d; the last token's own distribution teaches no slot.
    position_RN = torch.tensor([walk.slot for walk in walks])[:, None] + batch.depths_RN
    known_RN = on_row_RN.gather(1, batch.parents_RN.clamp(min=0)) & (batch.depths_RN > 0)
    known_RN &= position_RN < torch.tensor([walk.last for walk in walks])[:, None]
    p_RN = torch.zeros(R, N, dtype=torch.float64)
    numbers_RN = torch.tensor([walk.number for walk in walks])[:, None].expand(R, N)
    p_RN[known_RN] = odds(numbers_RN[known_RN], position_RN[known_RN], batch.tokens_RN[known_RN]).double()
    reach_R = torch.ones(R, dtype=torch.float64)
    survived = []
    for level in range(1, depth + 1):
        survived.append(float((reach_R * (p_RN * (batch.depths_RN == level)).sum(1)).sum()))
        node_R = path_RN[:, level] if level < N else torch.full((R,), -1)
        reach_R = reach_R * torch.where(node_R < 0, 0.0, p_RN.gather(1, node_R.clamp(min=0)[:, None])[:, 0])
    return AcceptanceStats(depth, R, int(batch.num_nodes_R.sum()) - R, survived)
