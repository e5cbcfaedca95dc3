"""The self-test: a head that learns one row by heart drafts nearly all of it, in training's count and in decoding."""

import pytest
import torch

from eyas.data.feature_batch import collate
from eyas.inference.draft import ChainTree, DynamicTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.draft_head import DraftHead
from eyas.tests.toys import tiny_eagle1, tiny_head, tiny_target
from eyas.tests.train.rows import greedy_row, objective
from eyas.train.validation import held_out_acceptance

DEPTH, REPLY = 3, 41
MOST = 1 + DEPTH  # every round accepts all it drafted


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_one_row_is_learnt_by_heart(kind: str) -> None:
    target = tiny_target()
    prompt = [5, 17, 3, 80, 44]
    row = greedy_row(target, "row", prompt, new_tokens=REPLY)
    head: DraftHead = tiny_head(target, draft_vocab_size=97) if kind == "eagle3" else tiny_eagle1(target)
    module = objective(
        target, head.train(), loss="ce", weights=(1.0,) * DEPTH, feature_weight=0.1 if kind == "eagle1" else 0.0
    )
    batch = collate([[row]], length=len(row), dtype=torch.float32)
    before = held_out_acceptance(head, [row], depth=DEPTH, dtype=torch.float32).replay.tau
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        module(batch, module.counts(batch)).backward()
        optimizer.step()
    assert before < 0.5 * MOST
    assert held_out_acceptance(head, [row], depth=DEPTH, dtype=torch.float32).replay.tau >= 0.95 * MOST
    request = GenerationRequest(tuple(prompt), REPLY)
    plain = Engine(target).generate(request)
    for tree in (ChainTree(DEPTH), DynamicTree(DEPTH, 3, 8)):
        decoded = Engine(target, head.eval(), tree).generate(request)
        assert decoded.token_ids == plain.token_ids
        assert decoded.stats.tau >= 0.95 * MOST
