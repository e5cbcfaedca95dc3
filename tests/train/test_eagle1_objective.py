"""EAGLE-1's objective: the next state regressed, a little of its distribution, noise on the first feature."""

from dataclasses import replace

import pytest
import torch

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_row import FeatureRow
from eyas.models.target import Target
from eyas.tests.toys import tiny_eagle1, tiny_target
from eyas.tests.train.rows import objective, random_row
from eyas.tests.train.slow_reference import trained_slots
from eyas.train.losses import LossMix


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def row(target: Target) -> FeatureRow:
    return random_row(target, "plain", prompt=5, reply=7, seed=6)


def batch_of(row: FeatureRow) -> FeatureBatch:
    return collate([[row]], length=23, dtype=torch.float32)


def test_eagle1_regresses_the_targets_next_state_and_its_distribution(target: Target, row: FeatureRow) -> None:
    head = tiny_eagle1(target).train()
    module = objective(target, head, loss="kl", weights=(1.0, 0.5), feature_weight=1.0)
    module.plan = replace(module.plan, loss=LossMix((("kl", 0.1),)))
    batch = batch_of(row)
    value = float(module(batch, module.counts(batch)).detach())
    expected = 0.0
    features = module._unroll(batch)
    for step, weight in enumerate((1.0, 0.5)):
        slots = trained_slots(row, step, drafted=None)
        losses = []
        for t in slots:
            o, f = features[step][0, t].detach(), row.final_hidden_TD[t + 1 + step]
            gap = (o - f).abs()
            smooth = torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
            p, log_q = target.head.logits(f).softmax(-1), target.head.logits(o).log_softmax(-1)
            losses.append(float(smooth - 0.1 * (p * log_q).sum()))
        expected += weight * sum(losses) / len(losses)
    assert value == pytest.approx(expected, rel=1e-5)


def test_feature_noise_is_for_training_alone(target: Target, row: FeatureRow) -> None:
    module = objective(target, tiny_eagle1(target), feature_noise=0.3)
    batch = batch_of(row)
    quiet = module.eval()._unroll(batch)[0]
    assert torch.equal(quiet, module._unroll(batch)[0])
    assert not torch.equal(quiet, module.train()._unroll(batch)[0])
