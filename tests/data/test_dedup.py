"""Duplicates and leaks on prompts whose likeness is known."""

import pytest

from eyas.data.conversation import Conversation
from eyas.data.dedup import DedupPlan, OverlapFinder, RepeatFinder, TextRepeats, words

LONG = (
    "please write a short story about an old lighthouse keeper who finds a bottle on the beach one cold morning in may"
)


def asked(text: str, *, system: str = "", reply: str = "") -> Conversation:
    turns = [("system", system), ("user", text), ("assistant", reply)]
    return Conversation("", "", "", tuple({"role": role, "content": content} for role, content in turns if content))


def outcomes(conversations: list[Conversation], plan: DedupPlan | None = None) -> list[str | None]:
    finder = RepeatFinder(plan or DedupPlan())
    return [finder.repeats(conversation) for conversation in conversations]


def test_the_first_of_equal_prompts_stays_whatever_was_replied() -> None:
    assert outcomes([asked("2+2?", reply="4"), asked(" 2+2?\n", reply="four"), asked("3+3?")]) == [
        None, "exact duplicate", None
    ]  # fmt: skip


def test_another_system_message_makes_another_prompt() -> None:
    plan = DedupPlan(near=0)
    assert outcomes([asked("q", system="a"), asked("q", system="b"), asked("q")], plan) == [None] * 3


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (LONG.upper() + "!", "near duplicate"),  # the same words
        (LONG + " please", "near duplicate"),  # 20 of 21 runs of three words
        (LONG.replace("lighthouse keeper", "woman"), None),  # 17 of 23: 0.74
        (" ".join(reversed(LONG.split())), None),
    ],
)
def test_near_means_four_fifths_of_the_runs_of_three_words(text: str, outcome: str | None) -> None:
    assert outcomes([asked(LONG), asked(text)]) == [None, outcome]


@pytest.mark.parametrize(
    "texts",
    [("What is 2+2?", "What is 2-2?"), ("train 0: say aaa", "train 1: say bbb"), ("???", "!!!"),
     ("\U0001f600", "\U0001f680"),
     ("\u5199\u4e00\u9996\u5173\u4e8e\u96e8\u7684\u8bd7", "\u5199\u4e00\u7bc7\u5173\u4e8e\u96ea\u7684\u5c0f\u8bf4")],
)  # fmt: skip
def test_short_prompts_that_differ_are_no_duplicates(texts: tuple[str, ...]) -> None:
    assert outcomes([asked(text) for text in texts]) == [None] * len(texts)


def test_each_check_can_be_turned_off() -> None:
    pair = [asked(LONG), asked(LONG)]
    assert outcomes(pair, DedupPlan(exact=False)) == [None, "near duplicate"]
    assert outcomes(pair, DedupPlan(near=0)) == [None, "exact duplicate"]
    assert outcomes(pair, DedupPlan(exact=False, near=0)) == [None, None]


def test_words_have_no_case_and_no_punctuation_and_unspaced_scripts_one_per_character() -> None:
    assert words("Hello, WORLD_2! caf\xe9") == ["hello", "world", "2", "caf\xe9"]
    assert words("GPT\u5199\u8bd7 now") == ["gpt", "\u5199", "\u8bd7", "now"]


RUN = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu"


@pytest.mark.parametrize(
    ("evaluation", "prompt", "overlaps"),
    [
        (f"one {RUN} two", f"x y {RUN.upper()}, z", True),  # exactly 13 words in common
        (f"one {RUN} two", f"x y {RUN.removesuffix(' nu')} z", False),  # 12
        ("What is the capital of France?", "Tell me: what is the capital of France please", True),  # all of a short one
        ("What is the capital of France?", "What is the capital of Spain?", False),
        ("Write a poem now", "Write a poem now, about rain", False),  # four words say nothing
        ("Write a poem now", "write, a poem NOW", True),  # unless they are all
        ("???", "!!!", False),  # no words at all
    ],
)
def test_overlap_is_a_run_of_thirteen_words_or_a_whole_shorter_prompt(
    evaluation: str, prompt: str, overlaps: bool
) -> None:
    assert OverlapFinder(["other text entirely", evaluation], run=13).overlaps(prompt) == overlaps


def test_a_shorter_run_finds_more() -> None:
    assert OverlapFinder([f"one {RUN} two"], run=6).overlaps("beta gamma delta epsilon zeta eta")
    assert not OverlapFinder([], run=6).overlaps("beta gamma delta epsilon zeta eta")


def test_written_texts_repeat_exactly_nearly_or_an_evaluation_prompt() -> None:
    found = TextRepeats(DedupPlan(), [RUN])
    texts = ["Who?", " who? ", LONG, LONG + " please", f"tell me: {RUN}", "what else"]
    assert [found.repeats(text) for text in texts] == [False, True, False, True, True, False]
    off = TextRepeats(DedupPlan(near=0, overlap_words=0), [RUN])
    assert [off.repeats(text) for text in texts] == [False, True, False, False, False, False]
