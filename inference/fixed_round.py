"""A round in fixed shapes: the same kernels on the same buffers whatever the rows hold, so that it can be a CUDA graph.

    load    host -> device   root, length, node count, settings and coins of every row, in three copies
    draft   the head's tree below every root, by the maker's own `grow`
    verify  target forward over B x N nodes, the tree verification, accepted keys moved into place
    refeed  the accepted tokens with the target's states, committed to the head
    read    device -> host   accepted and bonus tokens of every row, the one wait

The envelope is B rows (a power of two; those beyond the running ones are idle: no nodes), N nodes, the depth and the
capacity of the caches. Attention reads lengths on the device, so nothing in between asks the host. Texts are those of
the ragged round in `session.py`: the same coins, the same rules, the same order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.inference.draft import FixedMaker
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.request import Running
from eyas.inference.round_graphs import Stage, captured
from eyas.inference.sampling import Sampling
from eyas.kernels.build_tree import Trees
from eyas.kernels.tree_layout import WORD_BITS
from eyas.kernels.truncate import BatchSampling
from eyas.kernels.verify_tree_sampling import verify_tree_sampling
from eyas.models.draft_head import DraftHead
from eyas.models.fixed_draft_cache import FixedDraftCache
from eyas.models.kv_cache import KVCache
from eyas.models.target import Target
from eyas.models.tree_attention import TreeLayout


class Outcome(NamedTuple):
    """What one row's round came to: its accepted draft tokens and the target's own token after them."""

    accepted: tuple[int, ...]
    bonus_token: int


class _RowInputs:
    """What the host says of every row, in buffers that are filled and copied without waiting."""

    def __init__(self, rows: int, coins: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._ints_4B = torch.zeros(4, rows, dtype=torch.int64, pin_memory=pinned)
        self._settings_2B = torch.zeros(2, rows, pin_memory=pinned)
        self._coins_BC = torch.zeros(rows, coins, dtype=torch.float64, pin_memory=pinned)
        here = [x.to(device, copy=True) for x in (self._ints_4B, self._settings_2B, self._coins_BC)]
        self._here = tuple(here)
        self.root_B, self.length_B, self.num_nodes_B, top_k_B = here[0]
        self.sampling = BatchSampling(here[1][0], top_k_B, here[1][1])
        self.coins_BC = here[2]

    def load(self, running: Sequence[Running], num_nodes: int) -> None:
        self._ints_4B.zero_()
        self._settings_2B.copy_(torch.tensor([[0.0], [1.0]]))
        width = self._coins_BC.shape[1]
        for r, row in enumerate(running):
            how = row.request.sampling
            self._ints_4B[:, r] = torch.tensor([row.tokens[-1], row.cached, num_nodes, how.top_k])
            self._settings_2B[:, r] = torch.tensor([how.temperature, how.top_p])
            if how.temperature > 0:
                self._coins_BC[r] = torch.tensor(row.coins.take(row.coins_used, width), dtype=torch.float64)
        for there, here in zip((self._ints_4B, self._settings_2B, self._coins_BC), self._here, strict=True):
            here.copy_(there, non_blocking=True)


class FixedRound:
    """Rounds of up to `rows` rows on one pair of caches, which must not be allocated anew while this lives.

    Also a `HeadState`: makers draft on it as they draft on a session's own.
    """

    head: DraftHead
    samplings: list[Sampling]
    features_RD: Tensor
    logits_RU: Tensor

    def __init__(
        self, target: Target, cache: KVCache, drafting: EagleDrafting | None, *, rows: int, graphs: bool
    ) -> None:
        self.target, self.cache, self.drafting = target, cache, drafting
        self.graphs = graphs
        self.rows = rows
        self.buffers = cache.buffers[0].both, None if drafting is None else drafting.cache.keys
        self.device = target.device
        depth, self.num_nodes = 0, 1
        if drafting is not None:
            assert isinstance(drafting.tree, FixedMaker)
            depth = drafting.tree.depth
            self.num_nodes = drafting.tree.num_nodes(drafting.head.config.draft_vocab_size)
            self.maker = drafting.tree
            self.head, self.samplings = drafting.head, drafting.samplings
            self.features_RD = drafting.features_RD.new_zeros(rows, drafting.features_RD.shape[1])
            self.logits_RU = drafting.logits_RU.new_zeros(rows, drafting.logits_RU.shape[1])
        self.inputs = _RowInputs(rows, depth + 1, self.device)
        if drafting is not None:
            self.context = FixedDraftCache(drafting.cache, self.inputs.length_B)
        N, P = self.num_nodes, min(depth + 1, self.num_nodes)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        scores_BN = torch.zeros(rows, N, device=self.device)
        self.trees = Trees(ints(rows, N), ints(rows, N), ints(rows, N), scores_BN, ints(rows, N, -(-N // WORD_BITS)))
        self.path_BP, self.result_BP1 = ints(rows, P), ints(rows, P + 1)
        self._host_result = torch.zeros(rows, P + 1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        # The target's states at the nodes, from its forward to the head's; their widths come with the first forward.
        self.states: tuple[Tensor, Tensor] | None = None
        self.stages: tuple[Stage, ...] | None = None

    def fits(self, cache: KVCache, drafting: EagleDrafting | None) -> bool:
        """Return whether the caches are still those that this was made on."""
        now = cache.buffers[0].both, None if drafting is None else drafting.cache.keys
        return all(mine is theirs for mine, theirs in zip(self.buffers, now, strict=True))

    @torch.inference_mode()
    def run(self, running: Sequence[Running]) -> list[Outcome]:
        """Run one round of some rows and return what each came to; a bonus of -1 says that logits were NaN."""
        self.start(running)
        draft, verify, refeed = self.stages or self._prepare()
        draft()
        verify()
        self._host_result.copy_(self.result_BP1, non_blocking=True)
        read = torch.cuda.Event() if self.device.type == "cuda" else None
        if read is not None:
            read.record()
        refeed()  # runs while the host waits for the verification and looks for stops
        if read is not None:
            read.synchronize()
        if self.drafting is not None:
            self.drafting.features_RD, self.drafting.logits_RU = self._states_of(len(running))
        outcomes = []
        for accepted, *emitted in self._host_result[: len(running)].tolist():
            outcomes.append(Outcome(tuple(emitted[:accepted]), emitted[accepted]))
        for r, (row, outcome) in enumerate(zip(running, outcomes, strict=True)):
            if self.drafting is not None:
                self.drafting.cache.lengths[r] = row.cached + len(outcome.accepted) + 1
        return outcomes

    def start(self, running: Sequence[Running]) -> None:
        """Hand the rows over to the device; waits for nothing."""
        self.inputs.load(running, self.num_nodes)
        if self.drafting is not None:
            features_RD, logits_RU = self._states_of(len(running))
            features_RD.copy_(self.drafting.features_RD)
            logits_RU.copy_(self.drafting.logits_RU)

    def _states_of(self, count: int) -> tuple[Tensor, Tensor]:
        return self.features_RD[:count], self.logits_RU[:count]

    def _prepare(self) -> tuple[Stage, ...]:
        """Choose how this round is launched, once: captured where it can be, plainly elsewhere."""
        plain = (self.draft_stage, self.verify_stage, self.refeed_stage)
        kept = () if self.drafting is None else (self.features_RD, self.logits_RU)
        self.stages = captured(plain, kept, device=self.device) if self.graphs else plain
        return self.stages

    def expand(
        self, features_RKD: Tensor, tokens_RK: Tensor, *, depth: int, tree_mask_RKN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run K nodes of one depth in every row and return (their features_RKD, draft logits_RKU of their children)."""
        self.context.draft(tree_mask_RKN)
        positions_RK = (self.inputs.length_B - 1 + depth)[:, None].expand_as(tokens_RK)
        return self.head.step(features_RKD, tokens_RK, positions_RK, self.context)

    def _grow(self) -> Trees:
        root_B = self.inputs.root_B
        if self.drafting is None:
            zero_B1 = torch.zeros_like(root_B)[:, None]
            return Trees(root_B[:, None], zero_B1 - 1, zero_B1, zero_B1.float(), zero_B1[..., None] + 1)
        self.context.discard_tree()
        return self.maker.grow(self, root_B)

    def draft_stage(self) -> None:
        """Draft the trees below the roots."""
        for held, new in zip(self.trees, self._grow(), strict=True):
            held.copy_(new)

    def verify_stage(self) -> None:
        """Run the target over the trees, verify them and move the accepted nodes' keys into place."""
        trees, inputs, N = self.trees, self.inputs, self.num_nodes
        slots_BN = inputs.length_B[:, None] + torch.arange(N, device=self.device)
        # Nodes past the last position are cut by the request's limit anyway.
        positions_BN = (inputs.length_B[:, None] + trees.depths_BN).clamp(max=self.target.position_limit - 1)
        self.cache.write_fixed(slots_BN)
        out = self.target.forward(
            trees.tokens_BN,
            position_ids_BT=positions_BN,
            tree=TreeLayout(inputs.length_B, inputs.num_nodes_B, trees.ancestors_BNW),
            cache=self.cache,
        )
        found = verify_tree_sampling(
            self.target.head.logits(out.final_hidden_BTD),
            trees.tokens_BN,
            trees.parents_BN,
            inputs.num_nodes_B,
            sampling=inputs.sampling,
            coins_BN=inputs.coins_BC.gather(1, trees.depths_BN),
        )
        self.cache.keep_paths(inputs.length_B, found.path_BN, found.num_accepted_B)
        P = self.path_BP.shape[1]
        accepted_B1 = found.num_accepted_B[:, None]
        self.path_BP.copy_(found.path_BN[:, :P].clamp(min=0))
        # Place i holds the token that follows the path's node i: an accepted draft, and at last the bonus.
        behind_BP = torch.cat((self.path_BP[:, 1:], self.path_BP[:, :1]), dim=1)
        place_P = torch.arange(P, device=self.device)
        drafted_BP = trees.tokens_BN.gather(1, behind_BP)
        emitted_BP = torch.where(place_P < accepted_B1, drafted_BP, found.bonus_B[:, None])
        self.result_BP1.copy_(torch.cat((accepted_B1, emitted_BP), dim=1))
        if self.drafting is not None:
            if self.states is None:
                self.states = torch.zeros_like(out.aux_hidden_BTF), torch.zeros_like(out.final_hidden_BTD)
            self.states[0].copy_(out.aux_hidden_BTF)
            self.states[1].copy_(out.final_hidden_BTD)

    def refeed_stage(self) -> None:
        """Commit the accepted tokens to the head with the target's states before each; the surplus lies behind."""
        if self.drafting is None:
            return
        assert self.states is not None
        B, P = self.path_BP.shape
        aux_BPF, final_BPD = (
            states.gather(1, self.path_BP[..., None].expand(-1, -1, states.shape[-1])) for states in self.states
        )
        accepted_B, emitted_BP = self.result_BP1[:, 0], self.result_BP1[:, 1:]
        fused_BPD = self.head.fuse(self.head.states(aux_BPF, final_BPD).to(self.features_RD.dtype))
        positions_BP = self.inputs.length_B[:, None] + torch.arange(P, device=self.device)
        last_B = torch.arange(B, device=self.device) * P + accepted_B
        self.context.discard_tree()
        self.context.commit(P)
        feature, logits = self.head.step(
            fused_BPD, emitted_BP.clamp(min=0), positions_BP, self.context, logits_at=last_B
        )
        self.features_RD.copy_(feature.flatten(0, 1)[last_B])
        self.logits_RU.copy_(logits)
