"""Sources: dirty files end in a table that adds up, mixes follow their weights, the bundled set stays as it is."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eyas.data.conversation import Conversation, bundled_prompts
from eyas.data.dedup import DedupPlan
from eyas.data.encode import ChatTemplate
from eyas.data.prompt_source import PromptSource
from eyas.data.row_checks import REASONS
from eyas.data.sources import ReadPlan, RowsRefused, read_prompts, read_sources
from eyas.models.errors import CheckFailed, UserError
from eyas.tests.data.test_encode import TEMPLATES, template_of
from eyas.tests.toys import CHATML, byte_tokenizer

TOLERANT = ReadPlan(max_drop_share=1.0)


def write(path: Path, rows: Iterable[bytes | dict[str, Any]]) -> str:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def several(name: str, count: int) -> list[dict[str, Any]]:
    return [user(f"{name} asks for number {n} and no other", id=f"{name}{n}") for n in range(count)]


def ids(conversations: list[Conversation]) -> list[str]:
    return [conversation.id for conversation in conversations]


# Sixteen lines, each with what must become of it. The template knows no tool turns and takes prompts of 90 tokens.
DIRTY: list[tuple[bytes, str, str]] = [
    (b'\xef\xbb\xbf{"id": "a", "messages": [{"role": "user", "content": "first"}]}\r', "repaired",
     "byte order mark + Windows line end"),
    (b'{"messages": [{"role": "user", "content": "second"}]', "dropped", "broken JSON"),
    (b'{"messages": [{"role": "user", "content": "half \\ud83d pair"}]}', "repaired", "lone surrogate"),
    (b'{"messages": [{"role": "user", "content": null}]}', "dropped", "null content"),
    (b'{"messages": [{"role": "user", "content": ["in", {"type": "text", "text": "parts"}]}]}',
     "repaired", "text parts"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "dropped", "image or audio"),
    (b'{"messages": []}', "dropped", "empty conversation"),
    (b'{"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "who?"}]}', "repaired",
     "assistant first"),
    (b'{"messages": [{"role": "assistant", "content": "hello"}]}', "dropped", "no user turn"),
    (b'{"messages": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]}', "repaired",
     "same role twice"),
    (b'{"messages": [{"role": "user", "content": "x"}, {"role": "boss", "content": "y"}]}', "dropped", "unknown role"),
    (b'{"messages": [{"role": "user", "content": "sum?"}, {"role": "assistant", "content": "", "tool_calls": [{}]},'
     b' {"role": "tool", "content": "4"}, {"role": "user", "content": "and?"}]}', "dropped", "tool turns"),
    (b'{"id": "long", "messages": [{"role": "user", "content": "' + b"ab " * 40 + b'"}]}', "dropped", "too long"),
    (b'["no", "object"]', "dropped", "not an object"),
    (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "dropped", "not UTF-8"),
    (b'{"id": "a", "messages": [{"role": "user", "content": "last"}], "tools": null}', "repaired", "repeated id"),
]  # fmt: skip
NO_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")


def template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(NO_TOOLS))


def test_a_dirty_file_ends_in_a_table_and_every_good_row_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "dirty.jsonl", [line for line, _, _ in DIRTY])
    plan = ReadPlan(max_drop_share=1.0, template=template(), max_tokens=90)
    report = read_sources([PromptSource(path=path)], plan)
    (rows,) = report.table.sources
    assert rows.read == len(DIRTY) == 16
    assert rows.kept == 0
    for outcome, counts in (("repaired", rows.repaired), ("dropped", rows.dropped)):
        expected = [reason for _, became, reason in DIRTY if became == outcome]
        assert counts == dict.fromkeys(expected, 1)
    assert [conversation.prompt().messages[-1]["content"] for conversation in report.conversations] == [
        "first", "half \ufffd pair", "in\nparts", "who?", "one\n\ntwo", "last"
    ]  # fmt: skip
    assert ids(report.conversations) == ["a", "dirty-00003", "dirty-00005", "dirty-00008", "dirty-00010", f"{path}#16"]
    saved = report.table.to_json()
    assert saved["read"] == saved["kept"] + saved["repaired"] + saved["dropped"] + saved["unused"]
    assert (saved["used"], saved["dropped"]) == (6, 10)
    assert rows.drop_share == 10 / 16


def test_the_same_file_gives_the_same_rows_again(tmp_path: Path) -> None:
    path = write(tmp_path / "dirty.jsonl", [line for line, _, _ in DIRTY])
    assert read_sources([PromptSource(path=path)], TOLERANT) == read_sources([PromptSource(path=path)], TOLERANT)


@pytest.mark.parametrize("number", [n for n, (_, _, reason) in enumerate(DIRTY) if "byte order" not in reason])
def test_strict_stops_at_the_first_row_that_loses_something(tmp_path: Path, number: int) -> None:
    line, outcome, reason = DIRTY[number]
    rows = [user("good"), user("fine", id="a"), line, b"never reached"]
    path = write(tmp_path / "p.jsonl", rows)
    plan = ReadPlan(strict=True, template=template(), max_tokens=90)
    with pytest.raises(RowsRefused, match=r"^p\.jsonl line [34]: ") as caught:
        read_sources([PromptSource(path=path)], plan)
    harmless = outcome == "repaired" and not REASONS[reason].bad
    assert str(caught.value).startswith("p.jsonl line 4: broken JSON" if harmless else f"p.jsonl line 3: {reason}")
    assert isinstance(caught.value, CheckFailed)
    (counts,) = caught.value.table.sources
    assert (counts.read, counts.kept) == (4 if harmless else 3, 2)


def test_above_the_drop_share_the_run_stops_with_the_table(tmp_path: Path) -> None:
    rows = [*several("p", 27), b"{", b"{", user(""), b"", b" "]
    path = write(tmp_path / "p.jsonl", rows)
    assert len(read_sources([PromptSource(path=path)], ReadPlan(max_drop_share=0.1)).conversations) == 27
    with pytest.raises(RowsRefused) as caught:
        read_sources([PromptSource(path=path)], ReadPlan(max_drop_share=0.099))
    assert str(caught.value) == (
        f"10.0% of the rows of {path!r} are bad, more than the 9.9% allowed; most often: broken JSON (the line is not "
        "JSON). Mend them, state another schema, or raise synthesize.max_drop_share."
    )
    (counts,) = caught.value.table.sources
    assert (counts.read, counts.kept, counts.dropped) == (
        32,
        27,
        {"broken JSON": 2, "empty content": 1, "blank line": 2},
    )


def test_a_column_that_most_rows_lack_stops_the_run(tmp_path: Path) -> None:
    """The rows are not shortened to those that have it."""
    path = write(tmp_path / "p.jsonl", [*[user(str(n)) for n in range(5)], *[{"prompt": str(n)} for n in range(6)]])
    with pytest.raises(RowsRefused, match=r"45\.5% .* column missing"):
        read_sources([PromptSource(path=path)], ReadPlan())


def test_duplicates_and_evaluation_prompts_are_counted_and_are_no_faults(tmp_path: Path) -> None:
    text = "write a long letter to a friend who moved to another town last year and ask how it is there now"
    rows = [user(text), user(text), user(text + " please"), user("capital of france what is it"), user("new one")]
    plan = ReadPlan(evaluation=("So: capital of France, what is it?", "capital of France what is it"), max_drop_share=0)
    report = read_sources([PromptSource(path=write(tmp_path / "p.jsonl", rows))], plan)
    assert report.table.sources[0].dropped == {
        "exact duplicate": 1, "near duplicate": 1, "in an evaluation set": 1
    }  # fmt: skip
    assert ids(report.conversations) == ["p-00001", "p-00005"]
    off = ReadPlan(dedup=DedupPlan(exact=False, near=0, overlap_words=0), evaluation=plan.evaluation)
    assert len(read_sources([PromptSource(path=str(tmp_path / "p.jsonl"))], off).conversations) == 5


def test_weights_are_shares_of_what_is_drawn_and_nothing_repeats(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / f"{name}.jsonl", several(name, n)) for name, n in (("a", 60), ("b", 9), ("c", 50)))
    sources = [PromptSource(path=a, weight=2), PromptSource(path=b, weight=0.5), PromptSource(path=c, weight=1)]
    said: list[str] = []
    plan = ReadPlan(seed=3, dedup=DedupPlan(near=0))
    report = read_sources(sources, plan, say=said.append)
    drawn = ids(report.conversations)
    assert [sum(name.startswith(letter) for name in drawn) for letter in "abc"] == [36, 9, 18]
    assert len(set(drawn)) == len(drawn)
    assert drawn == sorted(drawn, key=lambda name: (name[0], int(name[1:])))  # each source in its own order
    assert [rows.unused for rows in report.table.sources] == [
        {"beyond its weight": 24}, {}, {"beyond its weight": 32}
    ]  # fmt: skip
    assert said[-1] == f"  mix by weight, as large as {b} allows: 36 of {a}, 9 of {b}, 18 of {c}"
    assert ids(read_sources(sources, plan).conversations) == drawn
    other = ids(read_sources(sources, ReadPlan(seed=4, dedup=DedupPlan(near=0))).conversations)
    assert len(set(other) & set(drawn)) < len(drawn)


def test_without_weights_everything_is_used_in_order(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", several("a", 3)), write(tmp_path / "b.jsonl", several("b", 2))
    plan = ReadPlan(dedup=DedupPlan(near=0))
    both = read_sources([PromptSource(path=b), PromptSource(path=a)], plan)
    assert ids(both.conversations) == ["b0", "b1", "a0", "a1", "a2"]
    limited = read_sources([PromptSource(path=a, limit=2, category="letters")], plan)
    assert ids(limited.conversations) == ["a0", "a1"]
    assert {conversation.category for conversation in limited.conversations} == {"letters"}
    assert limited.table.sources[0].read == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1.0, None), "prompt source '.*b.jsonl' has no weight and others have"),
     ((1.0, 1.0, 1.0), "prompt source '.*empty.jsonl' has a weight and no usable row")],
)  # fmt: skip
def test_weights_that_cannot_be_kept_are_errors(
    tmp_path: Path, weights: tuple[float | None, ...], message: str
) -> None:
    rows = {"a": several("a", 3), "b": several("b", 3), "empty": [b"{}", b'{"messages": []}']}
    paths = [write(tmp_path / f"{name}.jsonl", lines) for name, lines in rows.items()]
    sources = [PromptSource(path=path, weight=w, schema="messages") for path, w in zip(paths, weights, strict=False)]
    with pytest.raises(UserError, match=message):
        read_sources(sources, TOLERANT)


def test_ids_are_unique_over_all_sources_and_never_those_of_self_written_prompts(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [user("one", id=0), user("two", id=0), user("three", id="self-000001")])
    b = write(tmp_path / "b.jsonl", [user("four", id=0), user("five")])
    report = read_sources([PromptSource(path=a), PromptSource(path=b)], ReadPlan(dedup=DedupPlan(near=0)))
    assert ids(report.conversations) == ["0", f"{a}#2", f"{a}#3", f"{b}#1", "b-00002"]
    assert [rows.repaired for rows in report.table.sources] == [{"repeated id": 2}, {"repeated id": 1}]


def test_a_source_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [user("x")])
    with pytest.raises(UserError, match="is given twice; give each once, with a weight for its share"):
        read_sources([PromptSource(path=path), PromptSource(path=path)], ReadPlan())


@pytest.mark.parametrize("name", TEMPLATES)
def test_preformatted_text_becomes_turns_or_is_dropped(tmp_path: Path, name: str) -> None:
    served = template_of(name)
    turns = [("user", "2+2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "yes")]
    messages = [{"role": role, "content": content} for role, content in turns]
    good = {"text": served.text(messages, add_generation_prompt=False)}
    path = write(tmp_path / "t.jsonl", [good, {"text": "### Human: hi"}])
    plan = ReadPlan(max_drop_share=0.5, template=served)
    report = read_sources([PromptSource(path=path)], plan)
    assert [list(conversation.messages) for conversation in report.conversations] == [messages]
    assert report.table.sources[0].dropped == {"not this template's text": 1}
    plain = read_sources([PromptSource(path=path, schema="text-prompt")], ReadPlan(template=served))
    assert plain.conversations[1].messages == ({"role": "user", "content": "### Human: hi"},)
    with pytest.raises(UserError, match="only the target's template can split it"):
        read_sources([PromptSource(path=path)], ReadPlan())


def test_a_row_that_the_template_refuses_is_dropped_with_its_words(tmp_path: Path) -> None:
    refusing = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{% if m['role'] == 'system' %}"
                              "{{ raise_exception('System role not supported') }}{% endif %}")  # fmt: skip
    rows = [user("plain"), {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}]
    path = write(tmp_path / "p.jsonl", rows)
    served = ChatTemplate(byte_tokenizer(refusing))
    with pytest.raises(RowsRefused, match=r"line 2: refused by the template \(System role not supported\)"):
        read_sources([PromptSource(path=path)], ReadPlan(strict=True, template=served))


def test_tool_turns_and_schemas_of_some_rows_reach_the_template(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        user("plain"),
        {"messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
            {"role": "tool", "content": "4"},
            {"role": "user", "content": "so?"},
        ], "tools": [{"function": {"name": "add"}}]},
        {**user("also plain"), "tools": []},
    ]  # fmt: skip
    with_tools = "{% if tools %}{{ '<|im_start|>tools\n' + tools[0]['function']['name'] + '<|im_end|>\n' }}{% endif %}"
    served = ChatTemplate(byte_tokenizer(with_tools + CHATML))
    report = read_sources(
        [PromptSource(path=write(tmp_path / "p.jsonl", rows))], ReadPlan(template=served, strict=True)
    )
    assert report.table.sources[0].kept == 3
    texts = [served.text(list(c.prompt().messages), add_generation_prompt=True) for c in report.conversations]
    assert [text.startswith("<|im_start|>tools\nadd<|im_end|>\n") for text in texts] == [False, True, False]
    assert "<|im_start|>tool\n4<|im_end|>" in texts[1]


def test_the_bundled_prompts_come_out_as_they_stand_in_the_file() -> None:
    """The quickstart's published numbers depend on exactly these prompts in this order."""
    lines = bundled_prompts("train").read_text(encoding="utf-8").splitlines()
    evaluation = tuple(text for prompt in read_prompts("bundled:eval") for text in prompt.user_texts())
    report = read_sources([PromptSource(path="bundled:train")], ReadPlan(evaluation=evaluation, strict=True))
    rows = [json.loads(line) for line in lines]
    prompts = [conversation.prompt() for conversation in report.conversations]
    assert [(prompt.id, prompt.category, list(prompt.messages)) for prompt in prompts] == [
        (row["id"], row["category"], row["messages"]) for row in rows
    ]
    assert len(prompts) == report.table.sources[0].kept == 240


@pytest.mark.parametrize("name", ["train", "eval"])
def test_bundled_sets_are_read_by_name(name: str) -> None:
    prompts = read_prompts(f"bundled:{name}")
    assert len(prompts) == bundled_prompts(name).read_text(encoding="utf-8").count("\n")
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([b"", b" "], r"prompt file '.*p\.jsonl' is empty; it needs at least one line with \"messages\"\."),
        ([], r"prompt file '.*p\.jsonl' is empty"),
        ([user("a"), b"", b"{"], r"p\.jsonl line 3: broken JSON \(.*\)\. Every row has to be good here; mend it\."),
        ([user("a", id=1), user("b", id=1), user("c", id=1)], r"repeats 2 ids; ids must be unique \(or left out\)"),
        ([b"hello"], r"p\.jsonl line 1: broken JSON .*; none of the first 1 rows can be read"),
        ([b"[1]"], r"p\.jsonl line 1: not an object \(\[1\]\); none of the first 1 rows"),
        ([{"mesages": []}], r"none of the first 1 rows of .* Did you mean 'messages'\?"),
    ],
)
def test_an_evaluation_set_must_be_good_in_every_row(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(write(tmp_path / "p.jsonl", rows))


def test_evaluation_sets_may_have_any_form_and_keep_duplicates(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"question": "2+2?", "answer": "4"}, {"question": "2+2?"}])
    assert [prompt.messages for prompt in read_prompts(path)] == [({"role": "user", "content": "2+2?"},)] * 2


@pytest.mark.parametrize("source", ["nowhere.jsonl", "bundled:nothing", "."])
def test_missing_file_is_named_with_what_is_allowed(source: str) -> None:
    with pytest.raises(UserError) as error:
        read_prompts(source)
    assert str(error.value) == (
        f"there is no prompt file {source!r}; give a JSONL file, or bundled:train or bundled:eval."
    )


def test_a_folder_given_as_a_file_says_how_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give that folder as \{dataset: \.\.\.\}"):
        read_prompts(str(tmp_path))


def test_only_the_first_prompt_has_to_fit_as_a_dialogue_ends_where_a_later_one_has_no_room(tmp_path: Path) -> None:
    turns = [("user", "one"), ("assistant", "1"), ("user", "two " * 40), ("assistant", "2")]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in turns]},
        {"messages": [{"role": role, "content": text} for role, text in [turns[2], turns[3], turns[0]]]},
    ]
    plan = ReadPlan(template=ChatTemplate(byte_tokenizer(CHATML)), max_tokens=90, max_drop_share=1.0)
    report = read_sources([PromptSource(path=write(tmp_path / "c.jsonl", rows))], plan)
    assert [conversation.messages[0]["content"] for conversation in report.conversations] == ["one"]
    assert report.table.sources[0].dropped == {"too long": 1}
