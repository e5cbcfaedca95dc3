"""The prompt sets that eyas ships are complete, well formed and disjoint.

An acceptance length measured on prompts the draft head was trained on says nothing about other prompts, so the two
files are compared pair by pair: by exact text, by shared runs of eight words, and by the Jaccard similarity of their
word sets.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROMPTS = Path(__file__).resolve().parents[1] / "recipes" / "prompts"
CATEGORIES = ("code", "extraction", "translation", "mathematics", "summarising", "writing")
PER_CATEGORY = {"eval": 12, "train": 40}
WITH_SYSTEM = {"eval": 6, "train": 22}
NGRAM = 8
JACCARD_LIMIT = 0.7
MAX_USER_WORDS = 120


def read_rows(split: str) -> list[dict[str, Any]]:
    """Rows of one split in file order; a blank or malformed line raises `json.JSONDecodeError`."""
    text = (PROMPTS / f"{split}.jsonl").read_text(encoding="utf-8")
    # Not splitlines(): that also breaks at characters that JSON allows inside a string.
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def user_text(row: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in row["messages"] if message["role"] == "user")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


def jaccard(left: str, right: str) -> float:
    a, b = set(words(left)), set(words(right))
    return len(a & b) / len(a | b)


def near_copies(left: list[str], right: list[str]) -> list[tuple[str, str]]:
    """Pairs (left, right) that are the same words, share a run of `NGRAM` words or reach `JACCARD_LIMIT`."""
    right_ngrams = [(text, ngrams(text)) for text in right]
    return [
        (a, b)
        for a, a_ngrams in ((text, ngrams(text)) for text in left)
        for b, b_ngrams in right_ngrams
        if words(a) == words(b) or a_ngrams & b_ngrams or jaccard(a, b) >= JACCARD_LIMIT
    ]


@pytest.mark.parametrize("split", PER_CATEGORY)
def test_counts_per_category(split: str) -> None:
    assert Counter(row["category"] for row in read_rows(split)) == dict.fromkeys(CATEGORIES, PER_CATEGORY[split])


@pytest.mark.parametrize("split", PER_CATEGORY)
def test_ids_name_split_category_and_number(split: str) -> None:
    numbers = range(1, PER_CATEGORY[split] + 1)
    expected = [f"{split}-{category}-{number:02d}" for category in CATEGORIES for number in numbers]
    rows = read_rows(split)
    assert [row["id"] for row in rows] == expected
    assert all(row["id"].split("-")[1] == row["category"] for row in rows)


def test_ids_are_unique_over_both_files() -> None:
    ids = [row["id"] for split in PER_CATEGORY for row in read_rows(split)]
    assert len(set(ids)) == len(ids) == len(CATEGORIES) * sum(PER_CATEGORY.values())


@pytest.mark.parametrize("split", PER_CATEGORY)
def test_rows_are_one_user_turn_after_at_most_one_system_message(split: str) -> None:
    shapes: Counter[tuple[str, ...]] = Counter()
    for row in read_rows(split):
        assert set(row) == {"id", "category", "messages"}, row["id"]
        assert all(set(message) == {"role", "content"} for message in row["messages"]), row["id"]
        shapes[tuple(message["role"] for message in row["messages"])] += 1
    total = len(CATEGORIES) * PER_CATEGORY[split]
    assert shapes == {("user",): total - WITH_SYSTEM[split], ("system", "user"): WITH_SYSTEM[split]}


@pytest.mark.parametrize("split", PER_CATEGORY)
def test_contents_are_stripped_text_of_sensible_length(split: str) -> None:
    for row in read_rows(split):
        for message in row["messages"]:
            assert words(message["content"]), f"{row['id']}: empty {message['role']} content"
            assert message["content"] == message["content"].strip(), row["id"]
        assert len(user_text(row).split()) <= MAX_USER_WORDS, row["id"]


@pytest.mark.parametrize("split", PER_CATEGORY)
def test_only_translation_prompts_leave_ascii(split: str) -> None:
    not_ascii = {row["category"] for row in read_rows(split) if not json.dumps(row, ensure_ascii=False).isascii()}
    assert not_ascii == {"translation"}


def test_eval_and_train_are_disjoint() -> None:
    held_out = [user_text(row) for row in read_rows("eval")]
    trained_on = [user_text(row) for row in read_rows("train")]
    assert not set(held_out) & set(trained_on)
    assert near_copies(held_out, trained_on) == []


def test_system_messages_are_disjoint() -> None:
    system = {
        split: [m["content"] for row in read_rows(split) for m in row["messages"] if m["role"] == "system"]
        for split in PER_CATEGORY
    }
    assert near_copies(system["eval"], system["train"]) == []


@pytest.mark.parametrize("split", PER_CATEGORY)
def test_no_near_copies_inside_a_split(split: str) -> None:
    texts = [user_text(row) for row in read_rows(split)]
    assert near_copies(texts, texts) == [(text, text) for text in texts]


@pytest.mark.parametrize(
    ("left", "right", "is_copy"),
    [
        ("Poem: rain!", "poem, RAIN", True),  # the same words, too few for an 8-gram
        ("one two three four five six seven eight a b c d e", "w x y z one two three four five six seven eight", True),
        ("one two three four five six seven a b c d e", "v w x y z one two three four five six seven", False),
        ("a b c d e f g", "g f e d c b a x y z", True),  # Jaccard 7/10, no common run
        ("a b c d e f", "f e d c b a x y z", False),  # Jaccard 6/9
    ],
)
def test_near_copies_on_known_pairs(left: str, right: str, is_copy: bool) -> None:
    assert near_copies([left], [right]) == ([(left, right)] if is_copy else [])
