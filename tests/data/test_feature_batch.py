"""The slot algebra of contracts.md section 1, on examples small enough to write out by hand."""

import pytest
import torch

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.tests.data.toys import feature_row, slots

# Two turns: prompt 0..3, reply 4..7, user 8..10, reply 11..13.
TWO_TURNS = feature_row("two", list(range(50, 64)), [4, 5, 6, 7, 11, 12, 13])


def line(*rows: object, length: int) -> FeatureBatch:
    return collate([list(rows)], length=length, dtype=torch.float32)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, [3, 4, 5, 10, 11]), (1, [3, 4, 10]), (2, [3]), (3, []), (30, [])],
)
def test_supervised_slots_of_two_turns_shrink_by_one_per_step(step: int, expected: list[int]) -> None:
    assert slots(line(TWO_TURNS, length=17).supervised(step)) == expected


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (3, 8), (5, 9)])
def test_a_span_a_to_e_supervises_slots_a_minus_1_to_e_minus_2(first: int, last: int, step: int) -> None:
    row = feature_row("span", list(range(10)), list(range(first, last + 1)))
    assert slots(line(row, length=12).supervised(step)) == list(range(first - 1, last - 1 - step))


def test_worked_example_of_eight_tokens() -> None:
    # position   0   1   2   3   4   5   6   7
    # token     40  41  42  70  71  72   2  43      the target wrote 70 71 72 and its end of turn 2
    batch = line(feature_row("worked", [40, 41, 42, 70, 71, 72, 2, 43], [3, 4, 5, 6]), length=8)
    embedded = {
        0: [41, 42, 70, 71, 72, 2, 43, 0],
        1: [42, 70, 71, 72, 2, 43, 0, 0],
        2: [70, 71, 72, 2, 43, 0, 0, 0],
        3: [71, 72, 2, 43, 0, 0, 0, 0],
    }
    rope = {s: [s, 1 + s, 2 + s, 3 + s, 4 + s, 5 + s, 6 + s, 7 + s] for s in range(4)}
    supervised = {0: [2, 3, 4], 1: [2, 3], 2: [2], 3: []}
    teacher_positions = {0: [3, 4, 5], 1: [4, 5], 2: [5], 3: []}
    taught_tokens = {0: [71, 72, 2], 1: [72, 2], 2: [2], 3: []}
    for step in range(4):
        assert batch.token_ids(step).tolist() == [embedded[step]]
        assert batch.position_ids(step).tolist() == [rope[step]]
        assert slots(batch.supervised(step)) == supervised[step]
        teacher = batch.teacher_index(torch.tensor(supervised[step], dtype=torch.int64), step)
        assert teacher.tolist() == teacher_positions[step]
        assert batch.input_ids_BT.flatten()[teacher + 1].tolist() == taught_tokens[step]
        # The states at the teacher's position are the ones that were computed there.
        assert batch.final_hidden_BTD.flatten(0, 1)[teacher, 1].tolist() == [p + 0.5 for p in teacher_positions[step]]


def test_first_drafted_slot_after_the_prompt_is_supervised_and_end_of_turn_is_the_last_token_taught() -> None:
    batch = line(feature_row("row", [9, 8, 7, 6, 2, 5], [2, 3, 4]), length=6)
    chosen = torch.tensor(slots(batch.supervised(0)))
    assert chosen[0] == 1  # the slot that takes the last prompt token's feature and the first reply token
    assert batch.input_ids_BT[0, chosen + 2].tolist() == [6, 2]


def test_cut_reply_has_no_end_of_turn_slot() -> None:
    whole = feature_row("whole", [9, 8, 7, 6, 2], [2, 3, 4])
    cut = feature_row("cut", [9, 8, 7, 6], [2, 3])
    batch = collate([[whole], [cut]], length=7, dtype=torch.float32)
    assert slots(batch.supervised(0), 0) == [1, 2]
    assert slots(batch.supervised(0), 1) == [1]
    assert 2 not in batch.input_ids_BT[1, [t + 2 for t in slots(batch.supervised(0), 1)]].tolist()


def test_packed_documents_do_not_teach_each_other() -> None:
    # The first document ends inside a reply and the second begins with one: the line's mask has no gap at all.
    first, second = feature_row("a", [1, 2, 3], [1, 2]), feature_row("b", [4, 5, 6, 7], [0, 1, 2, 3])
    batch = line(first, second, length=9)
    assert batch.generated_mask_BT.tolist() == [[False] + [True] * 6 + [False] * 2]
    assert slots(batch.supervised(0)) == [0, 3, 4]
    assert slots(batch.supervised(1)) == [3]
    assert slots(batch.supervised(2)) == []
    assert batch.document_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1, -1]]
    assert batch.position_ids(1).tolist() == [[1, 2, 3, 1, 2, 3, 4, 1, 1]]


@pytest.mark.parametrize("step", range(4))
def test_packed_lines_teach_exactly_what_padded_lines_teach(step: int) -> None:
    rows = [
        TWO_TURNS,
        feature_row("b", [70, 71, 72, 73, 74], [2, 3, 4]),
        feature_row("c", [80, 81, 82, 83, 84, 85, 86], [1, 2, 3, 4, 5]),
    ]
    padded = collate([[row] for row in rows], length=14, dtype=torch.float32)
    packed = line(*rows, length=30)

    def taught(batch: FeatureBatch) -> list[tuple[object, ...]]:
        chosen = batch.supervised(step).flatten().nonzero().squeeze(-1)
        teacher = batch.teacher_index(chosen, step)
        columns = [
            batch.aux_hidden_BTF.flatten(0, 1)[chosen],
            batch.token_ids(step).flatten()[chosen],
            batch.position_ids(step).flatten()[chosen],
            batch.final_hidden_BTD.flatten(0, 1)[teacher],
            batch.argmax_BT.flatten()[teacher],
        ]
        return list(zip(*[column.tolist() for column in columns], strict=True))

    assert taught(packed) == taught(padded)
    assert len(taught(packed)) == [5 + 2 + 4, 3 + 1 + 3, 1 + 0 + 2, 0 + 0 + 1][step]


def test_supervision_equals_its_definition_on_random_lines() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        rows = []
        for n in range(3):
            length = int(torch.randint(1, 9, (1,), generator=generator))
            generated = (torch.rand(length, generator=generator) < 0.75).nonzero().squeeze(-1).tolist()
            rows.append(feature_row(str(n), list(range(length)), generated))
        batch = line(*rows, length=26)
        mask, document = batch.generated_mask_BT[0].tolist(), batch.document_BT[0].tolist()
        for step in range(4):
            expected = [
                t
                for t in range(26)
                if t + 2 + step < 26
                and all(mask[i] and document[i] == document[t] for i in range(t + 1, t + 3 + step))
                and document[t] >= 0
            ]
            assert slots(batch.supervised(step)) == expected


def test_padding_is_never_supervised_and_may_not_be_marked() -> None:
    batch = line(feature_row("all", [1, 2, 3, 4], [0, 1, 2, 3]), length=9)
    assert [slots(batch.supervised(step)) for step in range(3)] == [[0, 1], [0], []]
    marked = batch.generated_mask_BT.clone()
    marked[0, 5] = True
    with pytest.raises(AssertionError, match="padding is marked"):
        FeatureBatch(**{**batch.__dict__, "generated_mask_BT": marked})


def test_collate_keeps_every_value_where_it_was_and_pads_with_neutral_ones() -> None:
    a, b = feature_row("a", [5, 6, 7], [1, 2]), feature_row("b", [8, 9], [1])
    batch = collate([[a, b], [b]], length=6, dtype=torch.bfloat16)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 0], [8, 9, 0, 0, 0, 0]]
    assert batch.argmax_BT.tolist() == [[1005, 1006, 1007, 1008, 1009, -1], [1008, 1009, -1, -1, -1, -1]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.document_BT.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1]]
    assert batch.aux_hidden_BTF.dtype == batch.final_hidden_BTD.dtype == torch.bfloat16
    assert batch.aux_hidden_BTF[0, 3].tolist() == [8, 0, -8, 0]
    assert batch.final_hidden_BTD[0, 5].tolist() == [0, 0]


def test_a_line_that_does_not_hold_its_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\['two', 'two'\] do not fit a line of 27"):
        line(TWO_TURNS, TWO_TURNS, length=27)
    assert len(slots(line(TWO_TURNS, TWO_TURNS, length=28).supervised(0))) == 10
