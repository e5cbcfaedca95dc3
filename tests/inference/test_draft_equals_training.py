"""Training and drafting are the same computation: logits at (slot, TTT step) equal those of the runtime's own drafting.

The drafter is driven along the ground-truth text; a chain of tree nodes carries tokens x_{t+2}, x_{t+3}, ... below slot
t, which is what the unrolled steps 1, 2, ... of slot t embed.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_row import FeatureRow
from eyas.inference.draft import ChainTree
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.sampling import Sampling
from eyas.kernels import ttt_attention_blocks
from eyas.models.draft_head import DraftHead
from eyas.models.target import TargetOutput
from eyas.models.ttt_attention import TTT_ATTENTIONS
from eyas.models.warm_start import vocabulary_of
from eyas.tests.inference.heads import feature_row, greedy, random_prompt, soften
from eyas.tests.toys import tiny_eagle1, tiny_head, tiny_target
from eyas.train.losses import LossMix
from eyas.train.objective import ObjectivePlan, TrainingTimeTest

STEPS = 4
TARGET = tiny_target()
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"norm_output": True, "fc_norm": True}),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    ("eagle3", {"num_layers": 3}),
    ("eagle1", {}),
    ("eagle1", {"num_layers": 2}),
]
LINES = {"alone": [[0], [1], [2]], "padded": [[0, 1], [2]], "packed": [[2, 0, 1]]}


def make_head(kind: str, **shape: Any) -> DraftHead:
    return tiny_eagle1(TARGET, **shape) if kind == "eagle1" else soften(tiny_head(TARGET, **shape))


def rows() -> list[FeatureRow]:
    """Return rows of 3, 9 and 17 tokens."""
    made = []
    for seed, (prompt, reply) in enumerate(((1, 2), (4, 5), (7, 10))):
        ids = random_prompt(prompt, seed=seed)
        made.append(feature_row(TARGET, ids, greedy(TARGET, ids, reply), name=str(seed)))
    return made


@torch.no_grad()
def unrolled(head: DraftHead, batch: FeatureBatch, attention: str, *, recompute: bool = False) -> Tensor:
    """Return training logits [S, B, T, U]."""
    vocabulary = vocabulary_of(head)
    plan = ObjectivePlan(LossMix((("kl", 1.0),)), (1.0,) * STEPS, attention=attention, recompute=recompute)
    module = TrainingTimeTest(head, TARGET.head.rows(vocabulary.token_ids_U), vocabulary.draft_ids_V, plan)
    return torch.stack([head.logits(feature) for feature in module._unroll(batch)])


def drafted(head: DraftHead, row: FeatureRow, *, commits: list[int]) -> dict[tuple[int, int], Tensor]:
    """Return the runtime's logits_U by (slot, step), committing slots up to each of `commits` in one piece."""
    ids, logits = row.input_ids_T, {}
    drafting = EagleDrafting(head, ChainTree(STEPS))
    drafting.join([tuple(ids.tolist())], [Sampling()], capacity=len(ids))
    for start, stop in pairwise([0, *commits]):
        states = TargetOutput(row.aux_hidden_TF[None, start:stop], row.final_hidden_TD[None, start:stop])
        drafting.extend(0, [ids[start + 1 : stop + 1].tolist()], states)
        slot = stop - 1
        logits[slot, 0] = drafting.logits_RU[0]
        features = drafting.features_RD[None]
        for step in range(1, STEPS):
            if slot + 1 + step < len(ids):
                seen = torch.ones(1, 1, step, dtype=torch.bool)
                token = ids[slot + 1 + step].view(1, 1)
                features, step_logits = drafting.expand(features, token, depth=step, tree_mask_RKN=seen)
                logits[slot, step] = step_logits[0, 0]
        drafting.cache.discard_tree()
    return logits


def largest_difference(head: DraftHead, training: Tensor, lines: list[list[int]]) -> float:
    """Return how far training logits are from the runtime's, over all slots and steps that a row has."""
    made, differences = rows(), []
    for b, line in enumerate(lines):
        start = 0
        for i in line:
            T = len(made[i])
            for (slot, step), logits in drafted(head, made[i], commits=list(range(1, T))).items():
                differences.append(float((training[step, b, start + slot] - logits).abs().max()))
            start += T
    assert len(differences) == sum(min(STEPS, T - 1 - slot) for T in (3, 9, 17) for slot in range(T - 1))
    return max(differences)


def batch_of(lines: list[list[int]]) -> FeatureBatch:
    made = rows()
    return collate([[made[i] for i in line] for line in lines], length=31, dtype=torch.float32)


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=str)
def test_training_logits_equal_the_runtimes_at_every_slot_and_step(
    kind: str, shape: dict[str, Any], lines: list[list[int]], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt_attention_blocks, "QUERY_BLOCK", 5)
    head = make_head(kind, **shape)
    assert largest_difference(head, unrolled(head, batch_of(lines), attention), lines) < 1e-4


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
@pytest.mark.parametrize(("kind", "layers"), [("eagle3", 1), ("eagle1", 1), ("eagle3", 3), ("eagle1", 2)])
def test_slots_that_go_on_without_the_others_are_the_same_slots(
    kind: str, layers: int, lines: list[list[int]], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt_attention_blocks, "QUERY_BLOCK", 5)
    head, batch = make_head(kind, num_layers=layers), batch_of(lines)
    vocabulary = vocabulary_of(head)
    plan = ObjectivePlan(LossMix((("kl", 1.0),)), (1.0,) * STEPS, attention=attention)
    module = TrainingTimeTest(head, TARGET.head.rows(vocabulary.token_ids_U), vocabulary.draft_ids_V, plan)
    slots = torch.arange(batch.input_ids_BT.numel())
    for wanted_N in (slots[slots % 3 != 1], slots[17:23], slots[:0], slots):
        alone = module._unroll(batch, wanted_N)
        for some, all_of_them in zip(alone, module._unroll(batch), strict=True):
            torch.testing.assert_close(some[0], all_of_them.flatten(0, 1)[wanted_N], rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class WithoutStep(FeatureBatch):
    """A batch whose later steps keep the rotary position of the first."""

    def position_ids(self, step: int) -> Tensor:
        return self.position_BT


@pytest.mark.parametrize("attention", TTT_ATTENTIONS)
@pytest.mark.parametrize(("kind", "layers"), [("eagle1", 1), ("eagle3", 1), ("eagle3", 2)])
@pytest.mark.parametrize("mutation", ["rotary without the step", "mask shifted by the step", "no gate at documents"])
def test_a_wrong_rotary_mask_or_gate_is_seen(
    kind: str, layers: int, mutation: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, lines = make_head(kind, num_layers=layers), LINES["packed"]
    batch = batch_of(lines)
    if mutation == "rotary without the step":
        batch = WithoutStep(**batch.__dict__)
    elif mutation == "no gate at documents":
        batch = replace(batch, document_BT=batch.document_BT.clamp(max=0))
    else:
        right = TTT_ATTENTIONS[attention]

        def shifted(q: Tensor, keys: list[Tensor], values: list[Tensor], first: Tensor, slot: Tensor) -> Tensor:
            k, v = ([x[0].roll(len(x) - 1, dims=2), *x[1:]] for x in (keys, values))
            return right(q, k, v, first, slot)

        monkeypatch.setitem(TTT_ATTENTIONS, attention, shifted)
    assert largest_difference(head, unrolled(head, batch, attention), lines) > 1e-2


@pytest.mark.parametrize("layers", [1, 2])
def test_committing_several_slots_at_once_changes_nothing(layers: int) -> None:
    head, row = make_head("eagle3", num_layers=layers), rows()[2]
    one_by_one = drafted(head, row, commits=list(range(1, 17)))
    for commits in ([16], [7, 8, 12, 16], [1, 16]):
        for key, logits in drafted(head, row, commits=commits).items():
            torch.testing.assert_close(logits, one_by_one[key], rtol=1e-4, atol=1e-4)
