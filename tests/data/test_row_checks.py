"""Row checks: every repair and every reason to drop a row, on rows with exactly that fault."""

import json
from typing import Any

import pytest

from eyas.data.row_checks import REASONS, BadRow, check_messages, mended

U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
T = {"role": "tool", "content": "4"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}


@pytest.mark.parametrize(
    "messages",
    [[U], [S, U], [U, A], [S, U, A, U, A], [U, {**A, "reasoning_content": "r"}], [U, {**T}, {**T}, A]],
)
def test_a_good_row_stays_as_it_is(messages: list[dict[str, Any]]) -> None:
    assert check_messages(messages) == (messages, [])


@pytest.mark.parametrize(
    ("given", "expected", "repairs"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         [{"role": "user", "content": "a\nb"}], ["text parts"]),
        ([{"role": "user", "content": ["a", "b"]}], [{"role": "user", "content": "a\nb"}], ["text parts"]),
        ([A, U, A], [U, A], ["assistant first"]),
        ([S, A, U], [S, U], ["assistant first"]),
        ([T, A, U], [U], ["assistant first"]),
        ([U, U], [{"role": "user", "content": "q\n\nq"}], ["same role twice"]),
        ([U, A, A, A, U], [U, {"role": "assistant", "content": "a\n\na\n\na"}, U], ["same role twice"]),
        ([S, S, U], [{"role": "system", "content": "s\n\ns"}, U], ["same role twice"]),
        ([U, CALL, T], [U, {**CALL, "content": ""}], ["ends with a tool turn"]),
        ([U, A, S], [U, A], ["ends with a tool turn"]),
        ([A, U, U, A], [{"role": "user", "content": "q\n\nq"}, A], ["assistant first", "same role twice"]),
    ],
)  # fmt: skip
def test_what_can_be_repaired_is_and_says_so(
    given: list[dict[str, Any]], expected: list[dict[str, Any]], repairs: list[str]
) -> None:
    assert check_messages(given) == (expected, repairs)
    assert all(REASONS[repair].outcome == "repaired" for repair in repairs)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty conversation"),
        ([A], "no user turn"),
        ([S], "no user turn"),
        ([A, A], "no user turn"),
        (["hi"], "broken turn"),
        ([{"content": "hi"}], "broken turn"),
        ([{"role": None, "content": "hi"}], "broken turn"),
        ([U, {"role": "critic", "content": "hi"}], "unknown role"),
        ([{"role": "user"}], "null content"),
        ([{"role": "user", "content": None}], "null content"),
        ([U, {"role": "assistant", "content": None}], "null content"),
        ([U, {"role": "tool", "content": None}], "null content"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "null content"),
        ([{"role": "user", "content": ""}], "empty content"),
        ([{"role": "user", "content": " \n"}], "empty content"),
        ([{"role": "user", "content": []}], "empty content"),
        ([U, {"role": "assistant", "content": ""}], "empty content"),
        ([{"role": "user", "content": 7}], "content is not text"),
        ([{"role": "user", "content": {"text": "q"}}], "content is not text"),
        ([{"role": "user", "content": [3]}], "content is not text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, "what?"]}], "image or audio"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "image or audio"),
    ],
)
def test_what_cannot_be_repaired_is_dropped_with_its_reason(messages: list[Any], reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        check_messages(messages)
    assert caught.value.reason == reason
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("given", "role"),
    [("human", "user"), ("gpt", "assistant"), ("GPT", "assistant"), ("model", "assistant"), ("developer", "system"),
     ("prompter", "user"), ("bot", "assistant"), (" user ", "user")],
)  # fmt: skip
def test_synonyms_of_roles_are_known(given: str, role: str) -> None:
    messages, repairs = check_messages([U, A, {"role": given, "content": "x"}, U])
    assert role in [message["role"] for message in messages]
    assert repairs == (["same role twice"] if role in ("user", "assistant") else [])


def test_keys_without_a_meaning_or_a_value_are_left_out() -> None:
    given = {**A, "reasoning_content": "r", "tool_calls": None, "name": "", "loss": 1, "train": True}
    assert check_messages([U, given])[0][1] == {**A, "reasoning_content": "r"}


def test_unwritten_assistant_turns_stay_between_user_turns() -> None:
    gap = {"role": "assistant", "content": None, "unwritten": True}
    assert check_messages([U, gap, U]) == ([U, {"role": "assistant", "content": ""}, U], [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'{"a": "x\ud83dy"}', {"a": "x\ufffdy"}),
        (r'{"a": [{"b": "\ude00"}]}', {"a": [{"b": "\ufffd"}]}),
        (r'{"\ud800": 1}', {"\ufffd": 1}),
    ],
)
def test_lone_surrogates_are_replaced_wherever_they_stand(text: str, expected: object) -> None:
    value, changed = mended(json.loads(text))
    assert (value, changed) == (expected, True)
    json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize("value", [{"a": "caf\xe9 \U0001f600", "b": [1, None, True]}, [], "", 3.5, None])
def test_whole_text_is_left_alone(value: object) -> None:
    assert mended(value) == (value, False)


def test_a_pair_of_escapes_is_one_character() -> None:
    assert mended(json.loads(r'"\ud83d\ude00"')) == ("\U0001f600", False)
