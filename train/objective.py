"""Training-time test: unroll the head S steps on its own features and compare each step with the target.

Tokens are teacher-forced, features recursed: step s feeds the head's output at (t, s-1) and the ground-truth x_{t+1+s},
exactly what decoding does along an accepted path. The teacher is rebuilt from the stored final states, only at
supervised slots and only over the draft vocabulary; its full-vocabulary argmax was stored at extraction.

    loss = sum over steps s of step_weight_s * sum over slots of share * weight * loss(slot, s) / counts_s

`token` normalisation: every slot has share 1 and counts_s is their number; `sequence`: the slots of one reply share 1,
and counts_s is the number of replies. counts_s is taken over the whole accumulation window and all ranks, so that the
losses of its batches add up to the exact mean. EAGLE-1 adds SmoothL1(o_t, f_{t+1}), meaned over the hidden size.
docs/objective.md works an example of six tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.data.feature_batch import FeatureBatch
from eyas.data.feature_row import TokenRow
from eyas.models.draft_head import DraftHead
from eyas.models.layers import take_rows
from eyas.models.target_head import TargetHead
from eyas.models.ttt_attention import Layers, TTTContext
from eyas.train.draft_loss import Lesson, draft_loss, draft_outlook
from eyas.train.losses import LossMix
from eyas.train.slot_weights import UNWEIGHTED, SlotWeighting


@dataclass(frozen=True)
class ObjectivePlan:
    """What a training step minimises. One of `step_weights` per TTT step.

    `keep_oov` also trains slots whose target argmax cannot be drafted, `everywhere` slots in the prompt too.
    `feature_weight` weighs EAGLE-1's regression, `feature_noise` is the half-width of uniform noise on the first
    feature. `attention` names one of TTT_ATTENTIONS; `recompute` keeps no activations of a step but its features.
    """

    loss: LossMix
    step_weights: tuple[float, ...]
    keep_oov: bool = False
    everywhere: bool = False
    normalisation: Literal["token", "sequence"] = "token"
    weighting: SlotWeighting = UNWEIGHTED
    feature_weight: float = 0.0
    feature_noise: float = 0.0
    attention: str = "blocks"
    recompute: bool = False


@dataclass(frozen=True)
class Pairs:
    """The M trained (slot, step) pairs of a batch, sorted by the position that teaches them, then by step.

    `slot_M` and `position_M` are flat indices into B*T; `share_M` is each pair's part in the normaliser.
    """

    slot_M: Tensor
    step_M: Tensor
    position_M: Tensor
    share_M: Tensor


class TrainingTimeTest(nn.Module):
    """The head together with its objective, as one module whose forward is a training step."""

    def __init__(self, head: DraftHead, teacher: TargetHead, draft_ids_V: Tensor, plan: ObjectivePlan) -> None:
        """`teacher`: the target's head over the draft vocabulary; `draft_ids_V` maps target ids to draft ids or -1."""
        super().__init__()
        self.head = head
        self.teacher = teacher
        self.draft_ids_V = draft_ids_V
        self.plan = plan

    @property
    def steps(self) -> int:
        """The number of TTT steps."""
        return len(self.plan.step_weights)

    def counts(self, batch: FeatureBatch) -> Tensor:
        """Return the normaliser of each TTT step, float [S]: trained slots, or replies with one."""
        pairs = self._pairs(batch)
        shares = torch.zeros(self.steps, dtype=torch.float64, device=pairs.share_M.device)
        return shares.index_add_(0, pairs.step_M, pairs.share_M).round().float()

    def trains(self, row: TokenRow) -> bool:
        """Return whether a row has a slot to train; its stored argmax is -1 wherever no slot is taught."""
        taught_N = row.argmax_T[row.argmax_T >= 0].to(self.draft_ids_V.device)
        return bool(len(taught_N)) and (self.plan.keep_oov or bool((self.draft_ids_V[taught_N] >= 0).any()))

    def forward(self, batch: FeatureBatch, counts_S: Tensor) -> Tensor:
        """Return the loss of a batch, its share of the window whose normalisers are `counts_S`."""
        pairs = self._pairs(batch)
        wanted_N = self._supervised(batch, 0).nonzero().squeeze(-1)
        features = self._unroll(batch, wanted_N)
        place_M = torch.searchsorted(wanted_N, pairs.slot_M)
        feature_MD = take_rows(torch.stack(features).flatten(0, 2), pairs.step_M * len(wanted_N) + place_M)
        weight_S = torch.tensor(self.plan.step_weights, dtype=torch.float64, device=counts_S.device)
        weight_S = weight_S / counts_S.clamp(min=1.0)
        weight_M = weight_S[pairs.step_M] * pairs.share_M
        position_P, row_M = torch.unique_consecutive(pairs.position_M, return_inverse=True)
        lesson = Lesson(batch.final_hidden_BTD.flatten(0, 1)[position_P], self.teacher, row_M)
        if self.plan.weighting.active:
            weight_M = weight_M * self._slot_weights(batch, pairs, feature_MD, lesson)
        loss = self.head.score(
            feature_MD, lambda states, output: draft_loss(states, output, lesson, weight_M, self.plan.loss)
        )
        if self.plan.feature_weight:
            accurate = torch.promote_types(feature_MD.dtype, torch.float32)
            wanted_MD = lesson.final_PD[row_M].to(accurate)
            gap_M = F.smooth_l1_loss(feature_MD.to(accurate), wanted_MD, reduction="none").mean(-1)
            loss = loss + self.plan.feature_weight * torch.dot(gap_M, weight_M.to(accurate))
        return loss

    def _supervised(self, batch: FeatureBatch, step: int) -> Tensor:
        """Return which slots are supervised at a step, bool [B*T], whether or not their token can be drafted."""
        return batch.supervised(step, everywhere=self.plan.everywhere).flatten()

    def _slots(self, batch: FeatureBatch, step: int) -> Tensor:
        """Return the trained slots of a step, bool [B*T]."""
        slots_N = self._supervised(batch, step)
        if not self.plan.keep_oov:
            drafted_N = (self.draft_ids_V[batch.argmax_BT.clamp(min=0)] >= 0).flatten()
            teacher_N = batch.teacher_index(torch.arange(len(slots_N), device=slots_N.device), step)
            slots_N = slots_N & drafted_N[teacher_N.clamp(max=len(slots_N) - 1)]
        return slots_N

    def _pairs(self, batch: FeatureBatch) -> Pairs:
        slots = [self._slots(batch, step).nonzero().squeeze(-1) for step in range(self.steps)]
        slot_M = torch.cat(slots)
        step_M = torch.cat([torch.full_like(slots_N, step) for step, slots_N in enumerate(slots)])
        position_M = batch.teacher_index(slot_M, step_M)
        order_M = torch.argsort(position_M, stable=True)
        slot_M, step_M, position_M = slot_M[order_M], step_M[order_M], position_M[order_M]
        share_M = torch.ones(len(slot_M), dtype=torch.float64, device=slot_M.device)
        if self.plan.normalisation == "sequence":
            T = batch.input_ids_BT.shape[1]
            document_M = batch.document_BT.flatten()[slot_M] + slot_M // T * T
            reply_M = document_M * self.steps + step_M
            share_M = share_M / torch.bincount(reply_M)[reply_M]
        return Pairs(slot_M, step_M, position_M, share_M)

    def _unroll(self, batch: FeatureBatch, wanted_N: Tensor | None = None) -> list[Tensor]:
        """Return the features_BTD after each step; features_1ND of the wanted slots alone where those are given.

        The others are then step-0 keys and nothing more.
        """
        feature = self.head.fuse(self.head.states(batch.aux_hidden_BTF, batch.final_hidden_BTD))
        if self.plan.feature_noise and self.training:
            feature = feature + self.plan.feature_noise * (2 * torch.rand_like(feature) - 1)
        keys: tuple[Layers, ...] = ()
        values: tuple[Layers, ...] = ()
        features = []
        for step in range(self.steps):
            if self.plan.recompute:
                feature, key, value = checkpoint(
                    self._advance, batch, wanted_N, step, feature, keys, values,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                feature, key, value = self._advance(batch, wanted_N, step, feature, keys, values)
            keys, values = (*keys, key), (*values, value)
            features.append(feature)
        return features

    def _advance(
        self, batch: FeatureBatch, wanted_N: Tensor | None, step: int, feature: Tensor, keys: tuple[Layers, ...],
        values: tuple[Layers, ...],
    ) -> tuple[Tensor, Layers, Layers]:  # fmt: skip
        """Return (next feature, this step's keys, this step's values)."""
        context = TTTContext(
            batch.document_BT, attention=self.plan.attention, keys=keys, values=values, wanted_N=wanted_N,
            layers=self.head.config.num_layers,
        )  # fmt: skip
        token_ids, position_ids = batch.token_ids(step), batch.position_ids(step)
        if step and wanted_N is not None:
            token_ids, position_ids = (x.flatten()[wanted_N][None] for x in (token_ids, position_ids))
        feature = self.head.advance(feature, token_ids, position_ids, context)
        return feature, context.keys[-1], context.values[-1]

    def _slot_weights(self, batch: FeatureBatch, pairs: Pairs, feature_MD: Tensor, lesson: Lesson) -> Tensor:
        """Return the weight of each pair from what the head drafts now."""
        tokens_N = batch.input_ids_BT.flatten()
        draft_id_M = self.draft_ids_V[tokens_N[pairs.position_M + 1]]
        overlap_M, rank_M = self.head.score(
            feature_MD, lambda states, output: draft_outlook(states, output, lesson, draft_id_M)
        )
        at = (pairs.slot_M, pairs.step_M)
        overlap_NS = overlap_M.new_zeros(len(tokens_N), self.steps).index_put_(at, overlap_M)
        never = len(self.teacher.weight_VD)
        rank_NS = torch.full_like(overlap_NS, never, dtype=rank_M.dtype).index_put_(at, rank_M)
        supervised_NS = torch.stack([self._supervised(batch, step) for step in range(self.steps)], dim=1)
        weights = self.plan.weighting.weights(overlap_NS, rank_NS, supervised_NS, batch.input_ids_BT.shape[1])
        return weights[at]
