"""Replay of trees against real decoding, round for round, and what the same rounds accept at T=1 by enumeration."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.data.feature_row import FeatureRow
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, DynamicTree, HeadState, StaticTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.replay import Odds, WrittenRow, replay_trees
from eyas.inference.tree import DraftTree
from eyas.models.draft_head import DraftHead
from eyas.models.eagle3 import Attend
from eyas.tests.inference.heads import FlakyHead, feature_row, greedy, knowing_head, random_prompt, soften, table_head
from eyas.tests.toys import OracleHead, tiny_eagle1, tiny_head, tiny_target
from eyas.train.validation import held_out_acceptance, written

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
MAKERS: dict[str, TreeMaker] = {
    "chain": ChainTree(3),
    "static": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": DynamicTree(4, 3, 9),
    "wide": DynamicTree(1, 7, 7),
    "more than the vocabulary": DynamicTree(2, 70, 80),
}
HEADS: dict[str, DraftHead] = {
    "eagle3": soften(tiny_head(TARGET)),
    "every token": soften(tiny_head(TARGET, draft_vocab_size=97, norm_output=True, fc_norm=True)),
    "two layers": soften(tiny_head(TARGET, num_layers=2)),
    "eagle1": tiny_eagle1(TARGET),
}
PROMPTS = [random_prompt(length, seed=length) for length in (3, 11, 1, 6)]
LIMITS = (40, 17, 2, 1)
TEXTS = [greedy(TARGET, prompt, 40) for prompt in PROMPTS]
HEADS["wrong at every third"] = table_head(
    TARGET, [[*prompt, *text] for prompt, text in zip(PROMPTS, TEXTS, strict=True)], flawed=True
)


class LeaningHead(OracleHead):
    """A real head whose drafts lean towards a text: often right, and its trees branch."""

    def step(
        self,
        feature_BTD: Tensor,
        token_ids_BT: Tensor,
        position_ids_BT: Tensor,
        context: Attend,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        feature, sure = super().step(feature_BTD, token_ids_BT, position_ids_BT, context, logits_at=logits_at)
        own = self.logits(feature if logits_at is None else feature.flatten(0, 1)[logits_at])
        return feature, 0.4 * own + 0.25 * sure


def decoded(head: DraftHead, maker: TreeMaker, prompt: tuple[int, ...], limit: int, **request: Any) -> AcceptanceStats:
    return Engine(TARGET, head, maker).generate(GenerationRequest(prompt, limit, **request)).stats


def rows() -> list[FeatureRow]:
    return [
        feature_row(TARGET, prompt, text[:limit], name=str(number))
        for number, (prompt, text, limit) in enumerate(zip(PROMPTS, TEXTS, LIMITS, strict=True))
    ]


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", HEADS)
def test_replayed_trees_are_those_that_decoding_runs(name: str, maker: TreeMaker) -> None:
    head = HEADS[name]
    expected = AcceptanceStats(maker.depth)
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        expected += decoded(head, maker, prompt, limit)
    found = replay_trees(head, maker, [written(row) for row in rows()]).greedy
    assert found == expected
    assert found.rounds > 20
    if name == "wrong at every third":
        assert found.tau > 1.5, "trees that are never accepted show nothing"
    elif maker.max_nodes > 50:
        assert found.accepted > 10


@pytest.mark.parametrize("maker", [MAKERS["dynamic"], MAKERS["static"]], ids=["dynamic", "static"])
def test_replay_equals_decoding_for_a_head_that_is_often_right(maker: TreeMaker) -> None:
    total, inside = AcceptanceStats(maker.depth), 0
    for number, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        head = knowing_head(FlakyHead, TARGET, [*prompt, *text], seed=number)
        for place in (None, 4, 5, 6, 11, 19):
            stop = frozenset() if place is None else frozenset({text[place]})
            generation = Engine(TARGET, head, maker).generate(GenerationRequest(prompt, 40, stop))
            row = feature_row(TARGET, prompt, list(generation.token_ids))
            assert replay_trees(head, maker, [written(row)]).greedy == generation.stats
            if generation.rounds:
                inside += generation.rounds[-1].accepted == len(generation.rounds[-1].tokens)
            total += generation.stats
    assert total.tau > 2
    assert inside >= 3, "too few rounds ended inside an accepted path"


def test_every_reply_of_a_row_is_replayed_behind_the_text_before_it() -> None:
    head, maker = HEADS["eagle3"], DynamicTree(3, 3, 8)
    whole = feature_row(TARGET, PROMPTS[0], TEXTS[0])
    parted = replace(whole, generated_mask_T=whole.generated_mask_T & (torch.arange(len(whole)) != 20))
    assert written(parted).replies == [(3, 19), (21, 42)]
    ids = whole.input_ids_T.tolist()
    expected = decoded(head, maker, PROMPTS[0], 17) + decoded(head, maker, tuple(ids[:21]), 22)
    assert replay_trees(head, maker, [written(parted)]).greedy == expected


def test_a_row_that_goes_on_to_a_long_turn_disturbs_none_beside_it() -> None:
    head, maker = HEADS["eagle3"], DynamicTree(3, 3, 8)
    whole = feature_row(TARGET, PROMPTS[0], TEXTS[0])
    places = torch.arange(len(whole))
    turns = replace(whole, generated_mask_T=((places > 2) & (places < 38)) | (places > 40))
    late = replace(whole, generated_mask_T=((places > 2) & (places < 5)) | (places > 36))
    given = [written(row) for row in (whole, late, turns)]
    together = replay_trees(head, maker, given).greedy
    alone = [replay_trees(head, maker, [row]).greedy for row in given]
    assert together == alone[0] + alone[1] + alone[2]


def test_nothing_to_replay_is_nothing_counted() -> None:
    for given in ([], [written(rows()[3])]):
        found = replay_trees(HEADS["eagle3"], MAKERS["dynamic"], given)
        assert (found.greedy.rounds, found.greedy.tau) == (0, 1.0)


def test_rows_in_pieces_or_side_by_side_count_the_same_and_the_head_stays_as_it_was() -> None:
    head = HEADS["wrong at every third"].train()
    settings: dict[str, Any] = {"depth": 3, "dtype": torch.float32, "tree": DynamicTree(3, 3, 8)}
    whole = held_out_acceptance(head, rows(), **settings)
    assert whole.tree is not None
    assert whole.tree.tau > 1.5
    for tokens in (1, 50):
        assert held_out_acceptance(head, rows(), **settings, tree_tokens=tokens).tree == whole.tree
    halves = [held_out_acceptance(head, half, **settings) for half in (rows()[:1], rows()[1:])]
    assert halves[0] + halves[1] == whole
    assert head.training
    assert head.eval().lm_head.weight.requires_grad
    real = HEADS["eagle3"]
    in_bf16 = held_out_acceptance(real, rows(), **{**settings, "dtype": torch.bfloat16}).tree
    assert in_bf16 is not None
    assert in_bf16.rounds > 20
    assert real.dtype == torch.float32


@dataclass
class Recorded:
    """A maker that keeps every tree it made."""

    maker: TreeMaker
    trees: list[DraftTree] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return self.maker.depth

    @property
    def max_nodes(self) -> int:
        return self.maker.max_nodes

    @property
    def scratch(self) -> int:
        return self.maker.scratch

    def check(self, draft_vocab_size: int) -> None:
        self.maker.check(draft_vocab_size)

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        made = self.maker.make(state, roots)
        self.trees += made
        return made


def softmax_odds(ids: list[int], row: int = 0) -> Odds:
    """Return the target's own softmax over one text."""
    p_TV = TARGET.head.logits(TARGET.forward(torch.tensor([ids])).final_hidden_BTD[0]).double().softmax(-1)

    def odds(rows_N: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
        assert set(rows_N.tolist()) <= {row}
        return p_TV[positions_N, tokens_N]

    return odds


def enumerated(ids: list[int], slot: int, last: int, tree: DraftTree, *, off_row: bool) -> list[float]:
    """Return P(at least d accepted) at T=1 by running the target below every node; `off_row`: below all of them."""
    survival = [0.0] * tree.depth
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    for node in range(1, len(tree)):
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        words = [tokens[n] for n in path[1:]]
        text = ids[: slot + 2] + words
        if not off_row and (text[:-1] != ids[: len(text) - 1] or len(text) - 2 >= last):
            continue
        logits = TARGET.head.logits(TARGET.forward(torch.tensor([text])).final_hidden_BTD[0]).double()
        p = logits.softmax(-1)
        chance = 1.0
        for place, word in enumerate(words, start=slot + 1):
            chance *= float(p[place, word])
        survival[len(words) - 1] += chance
    return survival


@pytest.mark.parametrize("maker", [ChainTree(3), DynamicTree(3, 3, 10)], ids=["chain", "dynamic"])
def test_at_temperature_one_every_known_branch_is_counted_with_its_chance(maker: TreeMaker) -> None:
    row = feature_row(TARGET, PROMPTS[0], TEXTS[0][:24])
    ids, last = row.input_ids_T.tolist(), len(row) - 1
    recorded = Recorded(maker)
    head = knowing_head(LeaningHead, TARGET, ids)
    found = replay_trees(head, recorded, [written(row)], odds=softmax_odds(ids))
    slots = [len(PROMPTS[0]) - 1]
    for made in Engine(TARGET, head, maker).generate(GenerationRequest(PROMPTS[0], 24)).rounds[:-1]:
        slots.append(slots[-1] + len(made.tokens))
    assert len(recorded.trees) == len(slots) == found.sampled.rounds
    for off_row in (False, True):
        sums = [0.0] * maker.depth
        for slot, tree in zip(slots, recorded.trees, strict=True):
            for level, chance in enumerate(enumerated(ids, slot, last, tree, off_row=off_row)):
                sums[level] += chance
        if not off_row:
            assert found.sampled.survived == pytest.approx(sums, rel=1e-4)
        else:  # what is not known is not counted, so the truth is never below, and the first step is the truth
            assert found.sampled.survived[0] == pytest.approx(sums[0], rel=1e-4)
            assert all(seen <= true + 1e-6 for seen, true in zip(found.sampled.survived, sums, strict=True))
    assert found.greedy.tau > 1.3
    assert found.sampled.survived[1] > 0.01
    assert (found.sampled.rounds, found.sampled.drafted) == (found.greedy.rounds, found.greedy.drafted)


def test_a_chain_at_temperature_one_is_the_same_by_both_ways() -> None:
    row = rows()[0]
    head = knowing_head(LeaningHead, TARGET, row.input_ids_T.tolist())
    by_tree = replay_trees(head, ChainTree(4), [written(row)], odds=softmax_odds(row.input_ids_T.tolist())).sampled
    odds = measured_odds([row])
    found = held_out_acceptance(head, [row], depth=4, dtype=torch.float32, odds=odds)
    assert found.sampled is not None
    assert found.sampled.survived == pytest.approx(by_tree.survived, rel=1e-4)
    assert (found.sampled.rounds, found.sampled.drafted) == (by_tree.rounds, by_tree.drafted)
    assert found.sampled.survived[1] > 0.01


def measured_odds(rows: list[FeatureRow]) -> Any:
    from eyas.train.target_odds import measure_odds

    return measure_odds(TARGET.head, TARGET.head, torch.arange(97), rows)


def test_a_written_row_holds_what_the_target_showed() -> None:
    row = rows()[1]
    found = written(row)
    assert isinstance(found, WrittenRow)
    assert torch.equal(found.tokens_T, row.input_ids_T)
    assert torch.equal(found.aux_hidden_TF, row.aux_hidden_TF)
    assert found.replies == [(11, 27)]
