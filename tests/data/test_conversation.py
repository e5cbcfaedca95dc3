"""Prompt files: what is read, and one sentence for everything that is wrong with them."""

import json
from pathlib import Path

import pytest

from eyas.data.conversation import Conversation, bundled_prompts, read_prompts
from eyas.models.errors import UserError

GOOD = '{"id": "a", "category": "maths", "messages": [{"role": "user", "content": "2+2?"}]}'
SYSTEM = '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}'


def write(tmp_path: Path, data: bytes | str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def test_rows_are_read_in_order_with_defaults_for_id_and_category(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, f"{GOOD}\n\n{SYSTEM}\n")) == [
        Conversation("a", "maths", "given", ({"role": "user", "content": "2+2?"},)),
        Conversation(
            "prompts-00003",
            "prompts",
            "given",
            ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
        ),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", ["", "\n"])
def test_line_ends_and_byte_order_marks_change_nothing(tmp_path: Path, newline: str, mark: bytes, last: str) -> None:
    text = newline.join([GOOD, SYSTEM]) + last.replace("\n", newline)
    assert read_prompts(write(tmp_path, mark + text.encode())) == read_prompts(write(tmp_path, f"{GOOD}\n{SYSTEM}\n"))


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_a_line_ends_only_at_a_newline(tmp_path: Path, character: str) -> None:
    content = f"before{character}after"
    row = json.dumps({"messages": [{"role": "user", "content": content}]}, ensure_ascii=False)
    (prompt,) = read_prompts(write(tmp_path, row + "\n"))
    assert prompt.messages[0]["content"] == content


@pytest.mark.parametrize("name", ["train", "eval"])
def test_bundled_sets_are_read_by_name(name: str) -> None:
    prompts = read_prompts(f"bundled:{name}")
    assert len(prompts) == bundled_prompts(name).read_text(encoding="utf-8").count("\n")
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)


@pytest.mark.parametrize("source", ["nowhere.jsonl", "bundled:nothing", "."])
def test_missing_file_is_named_with_what_is_allowed(source: str) -> None:
    with pytest.raises(UserError) as error:
        read_prompts(source)
    assert str(error.value) == (
        f"there is no prompt file {source!r}; give a JSONL file, or bundled:train or bundled:eval."
    )


@pytest.mark.parametrize("data", ["", "\n \n\r\n", b"\xef\xbb\xbf"])
def test_empty_file_is_refused(tmp_path: Path, data: bytes | str) -> None:
    source = write(tmp_path, data)
    with pytest.raises(UserError) as error:
        read_prompts(source)
    assert str(error.value) == f'prompt file {source!r} is empty; it needs at least one line with "messages".'


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ('{"messages": [', "prompts.jsonl line 3 is not JSON: Expecting value: line 1 column 15 (char 14)."),
        ("hello", "prompts.jsonl line 3 is not JSON: Expecting value: line 1 column 1 (char 0)."),
        ("[1, 2]", 'prompts.jsonl line 3 has no "messages"; write {"messages": [{"role": "user", "content": "..."}]}.'),
        ('{"prompt": "x"}', 'prompts.jsonl line 3 has no "messages"; write'),
        ('{"messages": []}', 'prompts.jsonl line 3 has no "messages"; write'),
        ('{"messages": "hi"}', 'prompts.jsonl line 3 has no "messages"; write'),
        ('{"messages": ["hi"]}', "line 3: every message needs a role and a text content, given 'hi'."),
        (
            '{"messages": [{"content": "hi"}]}',
            "line 3: every message needs a role and a text content, given {'content'",
        ),
        ('{"messages": [{"role": "user"}]}', "line 3: every message needs a role and a text content, given {'role'"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "every message needs a role and a text content, given {'",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}',
            "line 3: every message needs a role and a text content, given {'role': 'user', 'content': [{'type'",
        ),
        (
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
            "prompts.jsonl line 3: a prompt must end with a non-empty user message for the target to answer.",
        ),
        (
            '{"messages": [{"role": "user", "content": " \\n"}]}',
            "line 3: a prompt must end with a non-empty user message",
        ),
    ],
)
def test_bad_line_is_refused_with_its_number(tmp_path: Path, bad: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        read_prompts(write(tmp_path, f"{GOOD}\n\n{bad}\n{SYSTEM}\n"))
    assert sentence in str(error.value)


def test_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path, GOOD.encode() + b"\n" + GOOD.replace("2+2?", "caf\xe9").encode("latin-1"))
    with pytest.raises(UserError, match=r"is not UTF-8 text .*save it as UTF-8"):
        read_prompts(source)


def test_repeated_ids_are_refused_and_counted(tmp_path: Path) -> None:
    source = write(tmp_path, "\n".join([GOOD, SYSTEM, GOOD, GOOD]))
    with pytest.raises(UserError) as error:
        read_prompts(source)
    assert str(error.value) == f"prompt file {source!r} repeats 2 ids; ids must be unique (or left out)."
