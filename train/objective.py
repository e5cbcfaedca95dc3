"""Training-time test: unroll the head S steps on its own features and compare each step with the target.

Tokens are teacher-forced, features recursed: step s feeds the head's output at (t, s-1) and the ground-truth x_{t+1+s},
exactly what decoding does along an accepted path. The teacher is rebuilt from the stored final states, only at
supervised slots and only over the draft vocabulary; its full-vocabulary argmax was stored at extraction.

Per-step losses over the draft vocabulary, p the target renormalised there, q the head:
    kl   -sum p log q                     (the cross-entropy whose minimum is p; equal to KL up to a constant)
    ce   -log q[argmax p]
    lk   lambda * kl + (1 - lambda) * (1 - alpha),  alpha = sum min(p, q), lambda = exp(-3 alpha)   (arXiv 2602.23881)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.data.feature_batch import FeatureBatch
from eyas.data.feature_row import TokenRow
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target_head import TargetHead
from eyas.models.ttt_attention import TTTContext

LK_ETA = 3.0


def kl(log_q_NU: Tensor, p_NU: Tensor) -> Tensor:
    """Return the cross-entropy of q under p per slot, [N]."""
    return -(p_NU * log_q_NU).sum(-1)


def ce(log_q_NU: Tensor, p_NU: Tensor) -> Tensor:
    """Return -log q of the target's most likely draft token per slot, [N]."""
    return -log_q_NU.gather(-1, p_NU.argmax(-1, keepdim=True)).squeeze(-1)


def lk(log_q_NU: Tensor, p_NU: Tensor) -> Tensor:
    """Return the acceptance-aware hybrid per slot, [N]: KL while acceptance is low, acceptance once it is high."""
    alpha_N = torch.minimum(p_NU, log_q_NU.exp()).sum(-1)
    weight_N = torch.exp(-LK_ETA * alpha_N.detach())
    entropy_N = -(p_NU * p_NU.clamp(min=1e-30).log()).sum(-1)
    return weight_N * (kl(log_q_NU, p_NU) - entropy_N) + (1 - weight_N) * (1 - alpha_N)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "ce": ce, "lk": lk}


@dataclass(frozen=True)
class ObjectivePlan:
    """One of `step_weights` per TTT step; `keep_oov` also trains slots whose target argmax cannot be drafted."""

    loss: str
    step_weights: tuple[float, ...]
    keep_oov: bool = False


class TrainingTimeTest(nn.Module):
    """The head together with its objective, as one module whose forward is a training step."""

    def __init__(self, head: Eagle3Head, teacher: TargetHead, draft_ids_V: Tensor, plan: ObjectivePlan) -> None:
        """`teacher`: the target's head over the draft vocabulary; `draft_ids_V` maps target ids to draft ids or -1."""
        super().__init__()
        self.head = head
        self.teacher = teacher
        self.draft_ids_V = draft_ids_V
        self.plan = plan

    def counts(self, batch: FeatureBatch) -> Tensor:
        """Return how many slots of a batch each TTT step trains, float [S]: the weights of exact averaging."""
        return torch.stack([self._slots(batch, step).sum() for step in range(len(self.plan.step_weights))]).float()

    def trains(self, row: TokenRow) -> bool:
        """Return whether a row has a slot to train; its stored argmax is -1 wherever no slot is taught."""
        taught_N = row.argmax_T[row.argmax_T >= 0].to(self.draft_ids_V.device)
        return bool(len(taught_N)) and (self.plan.keep_oov or bool((self.draft_ids_V[taught_N] >= 0).any()))

    def _slots(self, batch: FeatureBatch, step: int) -> Tensor:
        """Return the trained slots of a step, bool [B*T]."""
        slots_BT = batch.supervised(step)
        if not self.plan.keep_oov:
            drafted_BT = self.draft_ids_V[batch.argmax_BT.clamp(min=0)] >= 0
            teacher_BT = torch.zeros_like(drafted_BT)
            teacher_BT[:, : -(1 + step)] = drafted_BT[:, 1 + step :]
            slots_BT = slots_BT & teacher_BT
        return slots_BT.flatten()

    def forward(self, batch: FeatureBatch, counts_S: Tensor) -> Tensor:
        """Return the loss of a batch: sum over steps of weight * (summed slot losses / counts_S of that step).

        `counts_S` are the trained slots of the whole accumulation window over all ranks, so that the losses of its
        batches add up to the exact mean over tokens.
        """
        loss_of = OBJECTIVES[self.plan.loss]
        p_NU, row_of = self._teacher(batch)
        context = TTTContext(batch.document_BT)
        feature = self.head.fuse(batch.aux_hidden_BTF)
        total = feature.new_zeros((), dtype=torch.float32)
        for step, weight in enumerate(self.plan.step_weights):
            slots_N = self._slots(batch, step).nonzero().squeeze(-1)
            feature, logits_NU = self.head.step(
                feature, batch.token_ids(step), batch.position_ids(step), context, logits_at=slots_N
            )
            p = p_NU[row_of[batch.teacher_index(slots_N, step)]]
            losses_N = loss_of(torch.log_softmax(logits_NU.float(), -1), p)
            total = total + weight * losses_N.sum() / counts_S[step].clamp(min=1.0)
        return total

    @torch.no_grad()
    def _teacher(self, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        """Return the teacher's distribution over the draft vocabulary at every position some step needs, fp32.

        Those of step 0 cover all later steps. Also returned: the row of each flat position (-1 where there is none).
        """
        needed_N = batch.teacher_index(batch.supervised(0).flatten().nonzero().squeeze(-1), 0)
        row_of = torch.full((batch.input_ids_BT.numel(),), -1, device=needed_N.device)
        row_of[needed_N] = torch.arange(len(needed_N), device=needed_N.device)
        with torch.autocast(device_type=needed_N.device.type, enabled=False):
            logits_NU = self.teacher.logits(batch.final_hidden_BTD.flatten(0, 1)[needed_N])
            return logits_NU.float().softmax(-1), row_of
