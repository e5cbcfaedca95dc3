"""Acceptance measured while training: replayed rounds of stored rows are the rounds that decoding runs."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from eyas.data.feature_batch import collate
from eyas.data.feature_row import FeatureRow
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import Target
from eyas.tests.toys import oracle_head, tiny_head, tiny_target
from eyas.tests.train.rows import greedy_row, loop_plan, objective
from eyas.train.loop import train_head
from eyas.train.validation import chain_drafts, generated_spans, held_out_acceptance

DEPTH = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def rows(target: Target) -> list[FeatureRow]:
    """Greedy rows of several lengths; a reply of 1 + 8 * 5 tokens is one and eight whole rounds of depth 4."""
    prompts = [[5, 6, 7], [40, 3], [11, 12, 13, 14, 15], [90, 1, 2, 4]]
    return [
        greedy_row(target, f"row-{i}", prompt, new_tokens=n)
        for i, (prompt, n) in enumerate(zip(prompts, (41, 30, 17, 2), strict=True))
    ]


@pytest.fixture(scope="module")
def overfit(target: Target, rows: list[FeatureRow], tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    """A full-vocabulary head trained on the first row alone until it knows it."""
    head = tiny_head(target, draft_vocab_size=target.vocab_size).train()
    plan = loop_plan(steps=100, learning_rate=4e-3, warmup_steps=5, floor=0.1, validation_depth=DEPTH)
    module = objective(target, head, loss="ce", weights=(1.0,) * DEPTH)
    train_head(
        module, rows[:1], rows[:1], plan, tmp_path_factory.mktemp("overfit"), accelerator=Accelerator(cpu=True),
        key="overfit", report=lambda fields: None,
    )  # fmt: skip
    return head.eval()


def decode(target: Target, head: Eagle3Head, row: FeatureRow, *, depth: int = DEPTH) -> Generation:
    """Return the engine's own chain decoding of a row's prompt, as far as the row goes."""
    prompt = row.input_ids_T[~row.generated_mask_T].tolist()
    request = GenerationRequest(tuple(prompt), len(row) - len(prompt))
    generation = Engine(target, head, ChainTree(depth)).generate(request)
    assert [*prompt, *generation.token_ids] == row.input_ids_T.tolist()
    return generation


def test_a_head_overfit_on_one_row_reaches_the_longest_acceptance_there_is(
    target: Target, rows: list[FeatureRow], overfit: Eagle3Head
) -> None:
    replayed = held_out_acceptance(overfit, rows[:1], depth=DEPTH, dtype=torch.float32).replay
    assert replayed.tau == DEPTH + 1
    assert decode(target, overfit, rows[0]).stats.tau == DEPTH + 1
    untrained = tiny_head(target, draft_vocab_size=target.vocab_size)
    assert held_out_acceptance(untrained, rows[:1], depth=DEPTH, dtype=torch.float32).replay.tau < 1.5


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("chain_tokens", [1, 64, 4096])
def test_replayed_acceptance_equals_decoding_of_the_same_rows(
    target: Target, rows: list[FeatureRow], overfit: Eagle3Head, depth: int, chain_tokens: int
) -> None:
    result = held_out_acceptance(overfit, rows, depth=depth, dtype=torch.float32, chain_tokens=chain_tokens)
    decoded = sum((decode(target, overfit, row, depth=depth).stats for row in rows), AcceptanceStats(depth))
    assert (result.replay.rounds, result.replay.survived) == (decoded.rounds, decoded.survived)
    assert result.replay.tau > 1.25  # equality at zero acceptance would prove nothing
    assert result.slot_average.rounds == sum(len(row) - 2 - int((~row.generated_mask_T).sum()) + 1 for row in rows)


def test_a_reduced_vocabulary_counts_undraftable_tokens_as_misses(target: Target, rows: list[FeatureRow]) -> None:
    head = tiny_head(target)
    result = held_out_acceptance(head, rows, depth=3, dtype=torch.float32)
    decoded = sum((decode(target, head, row, depth=3).stats for row in rows), AcceptanceStats(3))
    assert (result.replay.rounds, result.replay.survived) == (decoded.rounds, decoded.survived)


def test_the_hits_of_an_oracle_are_exactly_the_supervised_slots(target: Target, rows: list[FeatureRow]) -> None:
    text = rows[1].input_ids_T.tolist()
    head = oracle_head(target, text)
    head.use_embedding(target.embedding)
    batch = collate([[rows[1]]], length=len(text) + 3, dtype=torch.float32)
    hits_BTS = chain_drafts(head, batch, depth=3).hits_BTS
    for step in range(3):
        # Two prompt tokens and thirty generated ones: slots 1 .. 29 at step 0, one fewer at every later step.
        assert hits_BTS[0, :, step].nonzero().squeeze(-1).tolist() == list(range(1, 30 - step))
    result = held_out_acceptance(head, rows[1:2], depth=3, dtype=torch.float32)
    # 29 tokens after the prefill's: seven rounds of 3 + 1, and a last one with a single token left to accept.
    assert (result.replay.rounds, result.replay.survived) == (8, [8, 7, 7])


def test_validation_leaves_the_head_in_the_mode_it_found_it(target: Target, rows: list[FeatureRow]) -> None:
    head = tiny_head(target).train()
    held_out_acceptance(head, rows[3:], depth=2, dtype=torch.float32)
    assert head.training
    held_out_acceptance(head.eval(), rows[3:], depth=2, dtype=torch.float32)
    assert not head.training


@pytest.mark.parametrize(
    ("mask", "spans"),
    [([0, 0, 1, 1, 0, 1], [(2, 3), (5, 5)]), ([1, 1], [(0, 1)]), ([0, 0], []), ([1, 0, 1], [(0, 0), (2, 2)])],
)
def test_spans_of_generated_tokens(mask: list[int], spans: list[tuple[int, int]]) -> None:
    assert generated_spans(torch.tensor(mask)) == spans


def test_an_untrained_run_keeps_the_untouched_head_as_its_best(
    target: Target, rows: list[FeatureRow], tmp_path: Path
) -> None:
    head = tiny_head(target)
    plan = loop_plan(steps=1, learning_rate=1e-12)
    position = train_head(
        objective(target, head), rows[:1], rows[1:2], plan, tmp_path, accelerator=Accelerator(cpu=True), key="k",
        report=lambda fields: None,
    )  # fmt: skip
    assert position.best_step == 0
    assert (tmp_path / "best" / "model.safetensors").is_file()
