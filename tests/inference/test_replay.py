"""Replay against real decoding: the same rounds, accepted counts and stops, for heads that are right and wrong."""

from dataclasses import replace

import pytest
import torch

from eyas.data.feature_batch import collate
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.inference.replay import average_over_slots, replay_chain
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import Target
from eyas.tests.inference.heads import FlakyHead, feature_row, greedy, knowing_head, random_prompt, reduced_oracle
from eyas.tests.toys import tiny_head, tiny_target
from eyas.train.validation import chain_drafts, generated_spans, held_out_acceptance

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))


def hits(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def runs(lengths: list[int], *, depth: int) -> torch.Tensor:
    """Return hits whose slot t has exactly lengths[t] right drafts before the first wrong one."""
    return torch.arange(depth)[None] < torch.tensor(lengths)[:, None]


def test_rounds_are_walked_as_the_engine_walks_them() -> None:
    # Prompt 0..2, reply 3..9. Rounds start at slots 2 (2 accepted), 5 (0) and 6 (2 of 3: token 10 is past the end).
    lengths = [3, 3, 2, 3, 3, 0, 3, 3, 3, 3]
    stats = replay_chain(runs(lengths, depth=3), first=3, last=9)
    assert (stats.rounds, stats.drafted, stats.survived) == (3, 9, [2, 2, 0])
    cut = replay_chain(runs(lengths, depth=3), first=3, last=8)
    assert (cut.rounds, cut.survived) == (3, [2, 1, 0])  # the last round's one draft is the last token: no bonus
    cut = replay_chain(runs(lengths, depth=3), first=3, last=7)
    assert (cut.rounds, cut.survived) == (2, [1, 1, 0])


def test_a_wrong_draft_ends_the_round_whatever_comes_after() -> None:
    stats = replay_chain(hits([[0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]), first=1, last=4)
    # Slot 0 accepts none; slot 1 accepts one (not two); its bonus is the last token.
    assert (stats.rounds, stats.survived) == (2, [1, 0, 0])


@pytest.mark.parametrize("last", [3, 2])
def test_a_reply_of_one_token_or_none_has_no_round(last: int) -> None:
    stats = replay_chain(runs([3] * 5, depth=3), first=3, last=last)
    assert (stats.rounds, stats.tau) == (0, 1.0)


def test_the_slot_average_over_states_where_rounds_start_at_the_harder_slots() -> None:
    # Rounds start at slots 0 (none accepted), 1 (one), 3, 4, 6, 7 and never at 2, 5, 8, where all drafts are right.
    table = runs([0, 1, 2] * 4, depth=2)
    replay, average = (count(table, first=1, last=10) for count in (replay_chain, average_over_slots))
    assert (replay.rounds, replay.survived, replay.tau) == (6, [3, 0], 1.5)
    assert average.rounds == 9
    assert average.survived == [6, 2]  # slot 8 has room for one draft only
    assert average.tau == pytest.approx(1 + 8 / 9)


def compare(target: Target, head: Eagle3Head, request: GenerationRequest, text: list[int], *, depth: int) -> Generation:
    """Check that replaying the written row gives the engine's own counts; return what the engine wrote.

    `text`: the target's greedy continuation of the prompt, stops ignored.
    """
    written = Engine(target, head, ChainTree(depth)).generate(request)
    assert list(written.token_ids) == text[: len(written.token_ids)]
    row = feature_row(target, request.prompt_ids, list(written.token_ids))
    replay = held_out_acceptance(head, [row], depth=depth, dtype=torch.float32).replay
    assert replay == written.stats
    return written


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_replay_equals_decoding_for_heads_that_are_often_wrong(depth: int) -> None:
    inside = total = 0
    stats = AcceptanceStats(depth)
    for seed in range(5):
        prompt = random_prompt(3 + 3 * seed, seed=seed)
        reply = greedy(TARGET, prompt, 40)
        head = knowing_head(FlakyHead, TARGET, [*prompt, *reply], seed=seed)
        open_end = compare(TARGET, head, GenerationRequest(prompt, 30), reply, depth=depth)
        stats += open_end.stats
        for limit in (1, 2, 5, 6):
            compare(TARGET, head, GenerationRequest(prompt, limit), reply, depth=depth)
        for place in (2, 3, 5, 11):
            request = GenerationRequest(prompt, 30, frozenset({reply[place]}))
            written = compare(TARGET, head, request, reply, depth=depth)
            assert written.finish_reason == "stop"
            if written.rounds:
                inside += written.rounds[-1].accepted == len(written.rounds[-1].tokens)
            total += 1
    assert 0.45 < stats.survival[0] < 0.75  # right about 6 times in 10
    assert total == 20
    assert inside >= 4, "too few stops fell inside an accepted block for this test to mean anything"


@pytest.mark.parametrize("size", [61, 97])
def test_replay_equals_decoding_for_a_real_head(size: int) -> None:
    head = tiny_head(TARGET, draft_vocab_size=size)
    total = AcceptanceStats(4)
    for seed in range(4):
        prompt = random_prompt(4, seed=seed)
        text = greedy(TARGET, prompt, 32)
        written = compare(TARGET, head, GenerationRequest(prompt, 32), text, depth=4)
        total += written.stats
    assert total.accepted > 0


def test_replay_of_many_rows_is_the_sum_over_rows() -> None:
    head = tiny_head(TARGET)
    rows, expected = [], AcceptanceStats(3)
    for seed in range(5):
        prompt = random_prompt(2 + 3 * seed, seed=seed)
        written = Engine(TARGET, head, ChainTree(3)).generate(GenerationRequest(prompt, 20 + seed))
        expected += written.stats
        rows.append(feature_row(TARGET, prompt, list(written.token_ids), name=str(seed)))
    for chain_tokens in (1, 100, 2048):
        found = held_out_acceptance(head, rows, depth=3, dtype=torch.float32, chain_tokens=chain_tokens)
        assert found.replay == expected


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    prompt = random_prompt(5, seed=1)
    reply = greedy(TARGET, prompt, 11)
    drafted = reply[1:]  # ten labelled positions: the first reply token comes from the prefill
    outside = {drafted[2], drafted[7]}
    assert sum(token in outside for token in drafted) == 2
    vocabulary = DraftVocabulary(torch.tensor([token for token in range(97) if token not in outside]), 97)
    counts = torch.bincount(torch.tensor(drafted), minlength=97)
    assert vocabulary.coverage(counts) == 0.8

    head = reduced_oracle(TARGET, [*prompt, *reply], vocabulary)
    row = feature_row(TARGET, prompt, reply)
    average = held_out_acceptance(head, [row], depth=1, dtype=torch.float32).slot_average
    assert (average.rounds, average.survived) == (10, [8])
    compare(TARGET, head, GenerationRequest(prompt, 11), reply, depth=3)


def test_every_reply_of_a_row_is_replayed_on_its_own() -> None:
    assert generated_spans(torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])) == [(1, 2), (5, 5), (7, 7)]
    assert generated_spans(torch.zeros(4)) == []
    row = feature_row(TARGET, random_prompt(4, seed=0), greedy(TARGET, random_prompt(4, seed=0), 16))
    two = replace(row, generated_mask_T=row.generated_mask_T & (torch.arange(20) != 9))
    head = knowing_head(FlakyHead, TARGET, row.input_ids_T.tolist())
    batch = collate([[two]], length=20, dtype=torch.float32)
    table = chain_drafts(head, batch, depth=3).hits_BTS[0]
    expected = replay_chain(table, first=4, last=8) + replay_chain(table, first=10, last=19)
    assert held_out_acceptance(head, [two], depth=3, dtype=torch.float32).replay == expected
    assert not bool(table[7:9].any())  # token 9 was not generated, so no slot that ends on it counts
