"""Conversations: what of them is a prompt."""

import json

import pytest

from eyas.data.conversation import Conversation, bundled_prompts


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation("a", "b", "c", tuple({"role": role, "content": content} for role, content in turns))


@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([("user", "q")], 1),
        ([("system", "s"), ("user", "q"), ("assistant", "a")], 2),
        ([("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")], 3),
        ([("user", "q"), ("assistant", ""), ("user", "r")], 1),  # the second question waits for the first answer
        ([("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", ""), ("user", "s")], 3),
    ],
)
def test_a_prompt_ends_with_the_last_user_turn_that_can_be_answered(turns: list[tuple[str, str]], prompt: int) -> None:
    whole = conversation(*turns)
    assert whole.prompt().messages == whole.messages[:prompt]
    assert (whole.prompt().id, whole.prompt().category) == ("a", "b")


def test_a_tool_call_is_a_written_turn() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    messages = ({"role": "user", "content": "q"}, call, {"role": "tool", "content": "4"})
    asked = Conversation("a", "b", "c", (*messages, {"role": "user", "content": "r"}))
    assert asked.prompt().messages == asked.messages


def test_user_texts_are_those_of_the_users_turns() -> None:
    whole = conversation(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"))
    assert whole.user_texts() == whole.prompt().user_texts() == ["q", "r"]


@pytest.mark.parametrize("name", ["train", "eval"])
def test_bundled_sets_have_a_path(name: str) -> None:
    first = bundled_prompts(name).read_text(encoding="utf-8").split("\n")[0]
    assert json.loads(first)["messages"][-1]["role"] == "user"
