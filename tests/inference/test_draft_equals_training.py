"""Training and drafting are the same computation: logits at (slot, TTT step) equal those of the runtime's own drafting.

The drafter is driven along the ground-truth text; a chain of tree nodes carries tokens x_{t+2}, x_{t+3}, ... below slot
t, which is what the unrolled steps 1, 2, ... of slot t embed.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_store import FeatureRow
from eyas.inference.draft import ChainTree
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.sampling import Sampling
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import TargetOutput
from eyas.models.ttt_attention import TTTContext
from eyas.tests.inference.heads import feature_row, greedy, random_prompt, soften
from eyas.tests.toys import tiny_head, tiny_target

STEPS = 4
TARGET = tiny_target()
FLAGS = [
    {},
    {"norm_output": True, "fc_norm": True},
    {"norm_before_residual": True, "norm_before_fc": True},
]


def rows() -> list[FeatureRow]:
    """Return rows of 3 to 19 tokens."""
    made = []
    for seed, (prompt, reply) in enumerate(((1, 2), (4, 9), (7, 12), (2, 6))):
        ids = random_prompt(prompt, seed=seed)
        made.append(feature_row(TARGET, ids, greedy(TARGET, ids, reply), name=str(seed)))
    return made


@torch.no_grad()
def unrolled(head: Eagle3Head, batch: FeatureBatch) -> Tensor:
    """Return training logits [S, B, T, U]."""
    context = TTTContext(batch.document_BT)
    feature = head.fuse(batch.aux_hidden_BTF)
    logits = []
    for step in range(STEPS):
        feature, step_logits = head.step(feature, batch.token_ids(step), batch.position_ids(step), context)
        logits.append(step_logits)
    return torch.stack(logits)


def drafted(head: Eagle3Head, row: FeatureRow, *, commits: list[int]) -> dict[tuple[int, int], Tensor]:
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


@pytest.mark.parametrize("lines", [[[0, 1], [2], [3]], [[3, 0, 2, 1]]], ids=["padded", "packed"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_training_logits_equal_the_runtimes_at_every_slot_and_step(
    flags: dict[str, bool], lines: list[list[int]]
) -> None:
    head, made = soften(tiny_head(TARGET, **flags)), rows()
    batch = collate([[made[i] for i in line] for line in lines], length=44, dtype=torch.float32)
    training = unrolled(head, batch)
    compared = 0
    for b, line in enumerate(lines):
        start = 0
        for i in line:
            T = len(made[i])
            for (slot, step), logits in drafted(head, made[i], commits=list(range(1, T))).items():
                torch.testing.assert_close(training[step, b, start + slot], logits, rtol=1e-4, atol=1e-4)
                compared += 1
            start += T
    assert compared == sum(sum(min(STEPS, T - 1 - slot) for slot in range(T - 1)) for T in map(len, made))


def test_committing_several_slots_at_once_changes_nothing() -> None:
    head, row = soften(tiny_head(TARGET)), rows()[2]
    one_by_one = drafted(head, row, commits=list(range(1, 19)))
    for commits in ([18], [7, 8, 12, 18], [1, 18]):
        for key, logits in drafted(head, row, commits=commits).items():
            torch.testing.assert_close(logits, one_by_one[key], rtol=1e-4, atol=1e-4)
