"""Which prompts are asked: usable ones of the target's own, an even share of given ones, none in two splits."""

from collections import Counter

import pytest

from eyas.data.conversation import Prompt
from eyas.data.corpus import CorpusRow
from eyas.data.encode import ChatTemplate
from eyas.data.questions import Question, given_questions, split_prompts, usable_prompts, without_leaks
from eyas.tests.data.toys import text_ids
from eyas.tests.toys import byte_tokenizer

TEMPLATE = ChatTemplate(byte_tokenizer())
OVERHEAD = len(text_ids(TEMPLATE.tokenizer, "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))


def written(*texts: tuple[str, str]) -> list[CorpusRow]:
    return [
        CorpusRow(f"self-{n:06d}", "self", "self", "prompt", 1.0, (), (), reason, "", text)
        for n, (text, reason) in enumerate(texts)
    ]


def question(name: str, split: str, *ids: int) -> Question:
    return Question(name, "given", "maths", split, ids, "text")


def test_unfinished_short_overlong_and_repeated_prompts_are_left_out_and_counted() -> None:
    rows = written(
        ("What is an eyas?", "stop"),
        ("What is a hawk?", "length"),
        ("Hi  you", "stop"),
        (" what  IS an\neyas? ", "stop"),
        ("x" * 31, "stop"),
        ("y" * 30, "stop"),
        ("Why do hawks moult?", "stop"),
    )
    kept, dropped, duplicates = usable_prompts(TEMPLATE, rows, wanted=9, longest=OVERHEAD + 30)
    assert [row.text for row in kept] == ["What is an eyas?", "y" * 30, "Why do hawks moult?"]
    assert [row.id for row in kept] == ["self-000000", "self-000005", "self-000006"]
    assert (dropped, duplicates) == (3, 1)
    rendered = "<|im_start|>user\nWhat is an eyas?<|im_end|>\n<|im_start|>assistant\n"
    assert list(kept[0].prompt_ids) == text_ids(TEMPLATE.tokenizer, rendered)
    assert usable_prompts(TEMPLATE, rows, wanted=2, longest=OVERHEAD + 30)[0] == kept[:2]


def test_own_prompts_are_held_out_first_then_kept_for_validation_then_trained() -> None:
    kept = [question(str(n), "train", n) for n in range(6)]
    assert [row.split for row in split_prompts(kept, 1, 3)] == ["heldout", "validation", "validation"] + ["train"] * 3
    assert [row.split for row in split_prompts(kept, 0, 0)] == ["train"] * 6
    assert [row.id for row in split_prompts(kept, 1, 3)] == [row.id for row in kept]


@pytest.mark.parametrize(
    ("count", "validation", "expected"),
    [(6, 0, []), (6, 1, [0]), (6, 2, [0, 3]), (7, 3, [0, 2, 4]), (240, 5, [0, 48, 96, 144, 192]), (3, 2, [0, 1])],
)
def test_validation_is_taken_evenly_from_the_given_prompts(count: int, validation: int, expected: list[int]) -> None:
    prompts = [Prompt(str(n), "maths", ({"role": "user", "content": f"question {n}"},)) for n in range(count)]
    questions = given_questions(TEMPLATE, prompts, validation=validation)
    assert [n for n, row in enumerate(questions) if row.split == "validation"] == expected
    assert Counter(row.split for row in questions)["train"] == count - validation
    assert [(row.id, row.category, row.source) for row in questions] == [(p.id, "maths", "given") for p in prompts]


def test_training_prompts_that_read_as_a_held_back_one_are_left_out() -> None:
    rows = [
        question("a", "heldout", 1, 2),
        question("b", "validation", 3),
        question("c", "train", 1, 2),
        question("d", "train", 1),
        question("e", "train", 3),
        question("f", "train", 1),
    ]
    kept, count = without_leaks(rows)
    assert [row.id for row in kept] == ["a", "b", "d", "f"]
    assert count == 2
