"""Which prompts are asked: usable ones of the target's own, an even share of given ones, none in two splits."""

from collections import Counter

import pytest

from eyas.data.conversation import Conversation
from eyas.data.dedup import DedupPlan, TextRepeats
from eyas.data.encode import ChatTemplate
from eyas.data.questions import (
    Question,
    WrittenPrompt,
    given_questions,
    split_prompts,
    usable_prompts,
    without_leaks,
)
from eyas.models.errors import UserError
from eyas.tests.data.toys import text_ids
from eyas.tests.toys import CHATML, byte_tokenizer

TEMPLATE = ChatTemplate(byte_tokenizer())
OVERHEAD = len(text_ids(TEMPLATE.tokenizer, "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))


def written(*texts: tuple[str, str]) -> list[WrittenPrompt]:
    return [WrittenPrompt(f"self-{n:06d}", "de", text, reason == "stop") for n, (text, reason) in enumerate(texts)]


def question(name: str, split: str, *ids: int) -> Question:
    return Question(name, "given", "maths", split, ids, "text", ())


def conversation(name: str, *contents: str) -> Conversation:
    roles = ("user", "assistant")
    messages = tuple({"role": roles[n % 2], "content": content} for n, content in enumerate(contents))
    return Conversation(name, "maths", "given", messages)


def ask(conversations: list[Conversation], *, validation: int = 0, longest: int = 99) -> list[Question]:
    return given_questions(TEMPLATE, conversations, validation=validation, longest=longest, limits="the limits")[0]


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
    repeats = TextRepeats(DedupPlan(near=0, overlap_words=0), ()).repeats
    kept, dropped, duplicates = usable_prompts(TEMPLATE, rows, longest=OVERHEAD + 30, repeats=repeats)
    assert [row.text for row in kept] == ["What is an eyas?", "y" * 30, "Why do hawks moult?"]
    assert [row.id for row in kept] == ["self-000000", "self-000005", "self-000006"]
    assert (dropped, duplicates) == (3, 1)
    rendered = "<|im_start|>user\nWhat is an eyas?<|im_end|>\n<|im_start|>assistant\n"
    assert list(kept[0].prompt_ids) == text_ids(TEMPLATE.tokenizer, rendered)
    assert {(row.source, row.category, row.split, len(row.turns)) for row in kept} == {("self", "de", "train", 1)}
    # Of a second category, those the first one said are repeats.
    assert usable_prompts(TEMPLATE, rows, longest=OVERHEAD + 30, repeats=repeats) == ([], 3, 4)


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
    prompts = [conversation(str(n), f"question {n}") for n in range(count)]
    questions = ask(prompts, validation=validation)
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


def test_given_conversations_are_asked_without_their_own_answers() -> None:
    (asked,) = ask([conversation("c", "2+2?", "five", "3+3?", "seven")])
    assert [[message["content"] for message in turn] for turn in asked.turns] == [["2+2?"], ["3+3?"]]
    assert list(asked.prompt_ids) == text_ids(
        TEMPLATE.tokenizer, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (asked.text, asked.split) == ("2+2?", "train")


def test_conversations_that_cannot_be_asked_are_left_out_and_counted() -> None:
    fits = conversation("fits", "x" * 30)
    odd = [conversation("empty"), Conversation("answered", "c", "given", ({"role": "assistant", "content": "hi"},))]
    questions, dropped = given_questions(
        TEMPLATE, [*odd, conversation("long", "x" * 31), fits], validation=0, longest=OVERHEAD + 30, limits="limits"
    )
    assert [row.id for row in questions] == ["fits"]
    assert dropped == {"nothing to answer": 2, "first prompt too long": 1}


def test_template_that_refuses_a_conversation_is_counted() -> None:
    picky = ChatTemplate(byte_tokenizer("{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}" + CHATML))
    system = ({"role": "system", "content": "s"},) * 2
    odd = Conversation("odd", "c", "given", (*system, {"role": "user", "content": "hi"}))
    fine = conversation("fine", "hi")
    questions, dropped = given_questions(picky, [odd, fine], validation=0, longest=99, limits="limits")
    assert ([row.id for row in questions], dropped) == (["fine"], {"refused by the chat template": 1})


def test_no_usable_conversation_is_an_error_that_names_the_first() -> None:
    with pytest.raises(UserError, match=rf"none of the 2 given .*; prompt 'a' is {OVERHEAD + 20} tokens long"):
        ask([conversation("a", "x" * 20), conversation("b", "x" * 21)], longest=OVERHEAD + 19)
