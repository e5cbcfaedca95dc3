"""Schemas: what rows of every known form say, and which form is probed."""

from typing import Any, get_args

import pytest

from eyas.data.row_checks import BadRow, check_messages
from eyas.data.schema import SCHEMAS, probe_schema, row_tools
from eyas.models.errors import UserError
from eyas.train.recipe import PromptSourceSection

U, A, S = "user", "assistant", "system"
EXAMPLES: dict[str, list[tuple[dict[str, Any], list[tuple[str, str]]]]] = {
    "messages": [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [(U, "q"), (A, "a")]),
        # As Parquet readers give it: columns of a list, and keys that only other rows fill.
        ({"messages": {"role": ["system", "user"], "content": ["s", "q"]}}, [(S, "s"), (U, "q")]),
        ({"messages": [{"role": "user", "content": "q", "tool_calls": None, "name": None}]}, [(U, "q")]),
    ],
    "conversations": [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [(U, "q"), (A, "a")]),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"}]}, [(S, "s"), (U, "q")]),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, [(S, "s"), (U, "q")]),
        ({"conversation": [{"role": "user", "content": "q"}]}, [(U, "q")]),
        ({"conversations": [{"role": "user", "content": "q"}]}, [(U, "q")]),
    ],
    "turns": [
        ({"turns": ["q", "r"]}, [(U, "q"), (A, ""), (U, "r")]),
        ({"turns": ["q"], "system": "s"}, [(S, "s"), (U, "q")]),
        ({"turns": [{"role": "user", "content": "q"}]}, [(U, "q")]),
    ],
    "instruction": [
        ({"instruction": "do", "input": "this", "output": "done"}, [(U, "do\n\nthis"), (A, "done")]),
        ({"instruction": "do", "input": "", "output": None}, [(U, "do")]),
        ({"instruction": "do", "input": None, "system": "s"}, [(S, "s"), (U, "do")]),
        ({"instruction": "do"}, [(U, "do")]),
    ],
    "prompt": [
        ({"prompt": "q"}, [(U, "q")]),
        ({"prompt": "q", "completion": "a"}, [(U, "q"), (A, "a")]),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "a"}, [(U, "q"), (A, "a")]),
    ],
    "question": [
        ({"question": "q", "answer": "a"}, [(U, "q"), (A, "a")]),
        ({"question": "q", "system_prompt": "s", "response": "a"}, [(S, "s"), (U, "q"), (A, "a")]),
        ({"question": "q", "system_prompt": "", "answer": 42}, [(U, "q")]),
    ],
    "text": [({"text": "plain"}, [(U, "plain")])],
    "text-prompt": [({"text": "plain"}, [(U, "plain")])],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_reads_its_rows(name: str) -> None:
    for row, expected in EXAMPLES[name]:
        messages, repairs = check_messages(SCHEMAS[name].messages(row))
        assert [(message["role"], message["content"]) for message in messages] == expected
        assert repairs == []


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "text-prompt"])
def test_every_schema_is_probed_from_its_rows(name: str) -> None:
    rows = [row for row, _ in EXAMPLES[name]]
    assert probe_schema([*rows, {}, {"other": 1}], source="x") == (name, len(rows))


def test_the_schema_that_fits_most_rows_wins_and_the_richer_one_a_tie() -> None:
    chat = {"messages": [{"role": "user", "content": "q"}], "prompt": "q", "text": "q"}
    assert probe_schema([chat, chat], source="x") == ("messages", 2)
    assert probe_schema([{"messages": None, "prompt": "q"}, chat], source="x") == ("prompt", 2)


def test_rows_of_no_known_form_are_refused_with_the_columns_found() -> None:
    with pytest.raises(UserError) as caught:
        probe_schema([{"mesages": [], "n": 1}, {"text": None}], source="file.jsonl")
    assert str(caught.value) == (
        "none of the first 2 rows of 'file.jsonl' holds a conversation in a column that is known; its columns are "
        "mesages, n, text, known ones messages, conversations, conversation, turns, instruction, prompt, question, "
        "text. Did you mean 'messages'?"
    )


@pytest.mark.parametrize(
    ("name", "row", "detail"),
    [
        ("messages", {"prompt": "q"}, "columns: prompt"),
        ("messages", {"messages": "hi"}, "'messages' holds str"),
        ("messages", {"messages": {"role": ["user"], "content": []}}, "'messages' holds dict"),
        ("prompt", {"prompt": None}, "'prompt' holds null"),
        ("question", {}, "columns: none"),
    ],
)
def test_a_row_of_another_form_is_dropped_not_lost(name: str, row: dict[str, Any], detail: str) -> None:
    with pytest.raises(BadRow) as caught:
        SCHEMAS[name].messages(row)
    assert str(caught.value) == f"column missing ({detail})"


@pytest.mark.parametrize(
    ("row", "tools"),
    [({}, []), ({"tools": None}, []), ({"tools": "[]"}, []), ({"tools": '[{"name": "f"}]'}, [{"name": "f"}]),
     ({"tools": [{"name": "f"}]}, [{"name": "f"}])],
)  # fmt: skip
def test_tools_are_there_on_some_rows_only(row: dict[str, Any], tools: list[Any]) -> None:
    assert row_tools(row) == tools


def test_tools_that_are_no_json_drop_the_row() -> None:
    with pytest.raises(BadRow, match="tool turns"):
        row_tools({"tools": "f(x)"})


def test_the_recipe_knows_the_same_schemas() -> None:
    literal, _ = get_args(PromptSourceSection.model_fields["schema_name"].annotation)
    assert set(get_args(literal)) == set(SCHEMAS)
