"""Turn by turn on the target's own words: what is asked, what is marked, which turns share a row, what ends early."""

from typing import Any

import pytest

from eyas.data.backends import Reply
from eyas.data.corpus import CorpusRow
from eyas.data.dialogue import Dialogue
from eyas.data.encode import ChatTemplate
from eyas.data.questions import Question, turns_of
from eyas.data.styles import GREEDY, AnswerStyle
from eyas.tests.data.toys import LLAMA3, LLAMA3_SPECIALS, marked_spans, text_ids
from eyas.tests.toys import CHATML, byte_tokenizer

# Earlier turns lose their reasoning; with enable_thinking=False the generation prompt writes an empty block itself.
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
REFUSING = "{% if messages|length > 2 %}{{ raise_exception('roles must alternate') }}{% endif %}" + CHATML


def said(*turns: tuple[str, str]) -> tuple[dict[str, Any], ...]:
    return tuple({"role": role, "content": content} for role, content in turns)


TWO_TURNS = said(
    ("system", "Be brief."), ("user", "2+2?"), ("assistant", "The dataset's own answer."), ("user", "And 3+3?"),
    ("assistant", "Another."),
)  # fmt: skip


def start(template: ChatTemplate, messages: tuple[dict[str, Any], ...], style: AnswerStyle = GREEDY) -> Dialogue:
    turns = turns_of(messages)
    ids = tuple(template.ids(list(turns[0]), add_generation_prompt=True))
    question = Question("q", "given", "maths", "train", ids, turns[0][-1]["content"], turns)
    return Dialogue(template, question, style, "q/1")


def play(dialogue: Dialogue, replies: list[str | list[int]], *, cut: bool = False, longest: int = 10_000) -> list[str]:
    """Answer the dialogue's requests in turn and return the text of each; the last reply is cut where asked."""
    tokenizer, end = dialogue.template.tokenizer, dialogue.template.end_of_turn
    asked = []
    for number, reply in enumerate(replies):
        request = dialogue.request(max_new_tokens=50, stop_ids=frozenset({end}), seed=3)
        asked.append(str(tokenizer.decode(list(request.prompt_ids))))
        ids = text_ids(tokenizer, reply) if isinstance(reply, str) else reply
        last = cut and number == len(replies) - 1
        dialogue.accept(
            Reply(request, tuple(ids if last else [*ids, end]), "length" if last else "stop"), longest=longest
        )
    return asked


def marks(dialogue: Dialogue) -> list[list[str]]:
    return [marked_spans(dialogue.template.tokenizer, row.example()) for row in dialogue.rows()]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", ["u"]),
        ("ua", ["u"]),
        ("sua", ["su"]),
        ("suaua", ["su", "u"]),
        ("uau", ["u", "u"]),
        ("auau", ["u", "u"]),
        ("saua", ["su"]),
        ("uaata", ["u", "t"]),
        ("uatau", ["u", "t", "u"]),
        ("uuau", ["uu", "u"]),
        ("uas", ["u"]),
        ("a", []),
        ("s", []),
        ("", []),
    ],
)
def test_turns_are_what_stands_before_each_assistant_turn(roles: str, expected: list[str]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    turns = turns_of(said(*((names[role], f"{role}{n}") for n, role in enumerate(roles))))
    assert ["".join(message["content"][0] for message in turn) for turn in turns] == expected
    kept = [message["content"] for turn in turns for message in turn]
    assert kept == sorted(kept, key=lambda text: int(text[1:]))


@pytest.mark.parametrize(
    ("template", "specials"), [(CHATML, ("<|im_start|>", "<|im_end|>")), (LLAMA3, LLAMA3_SPECIALS)]
)
def test_turns_that_continue_one_another_share_a_row(template: str, specials: tuple[str, ...]) -> None:
    served = ChatTemplate(byte_tokenizer(template, specials=specials))
    dialogue = start(served, TWO_TURNS)
    asked = play(dialogue, ["four", "six"])
    own = said(("system", "Be brief."), ("user", "2+2?"), ("assistant", "four"), ("user", "And 3+3?"))
    assert asked == [
        served.text(list(own[:2]), add_generation_prompt=True),
        served.text(list(own), add_generation_prompt=True),
    ]
    (row,) = dialogue.rows()
    whole = served.ids([*own, {"role": "assistant", "content": "six"}], add_generation_prompt=False)
    assert list(row.input_ids) == whole[: len(row.input_ids)]
    end = str(served.tokenizer.decode([served.end_of_turn]))
    assert marks(dialogue) == [[f"four{end}", f"six{end}"]]
    assert (row.id, row.prompt_text, row.reply_texts, row.finish_reason) == ("q/1", "2+2?", ("four", "six"), "stop")
    assert (dialogue.open, dialogue.ended, dialogue.rewritten_turns) == (False, "", 0)
    assert row.prompt_ids == dialogue.question.prompt_ids
    assert list(row.reply_ids) == text_ids(served.tokenizer, f"four{end}six{end}")


def test_a_template_that_drops_reasoning_gives_every_turn_its_own_row() -> None:
    served = ChatTemplate(byte_tokenizer(STRIPPING))
    dialogue = start(served, TWO_TURNS)
    asked = play(dialogue, ["<think>2 and 2</think>four", "<think>3 and 3</think>six"])
    assert "2 and 2" not in asked[1]
    assert "<|im_start|>assistant\nfour<|im_end|>" in asked[1]
    first, second = dialogue.rows()
    assert marks(dialogue) == [["<think>2 and 2</think>four<|im_end|>"], ["<think>3 and 3</think>six<|im_end|>"]]
    assert [row.id for row in (first, second)] == ["q/1", "q/1@1"]
    assert served.tokenizer.decode(list(second.prompt_ids)) == asked[1]
    assert (second.prompt_text, second.reply_texts) == ("And 3+3?", ("<think>3 and 3</think>six",))
    assert dialogue.rewritten_turns == 1


def test_an_empty_think_block_of_the_generation_prompt_is_never_marked() -> None:
    served = ChatTemplate(byte_tokenizer(STRIPPING), {"enable_thinking": False})
    dialogue = start(served, TWO_TURNS)
    asked = play(dialogue, ["four", "six"])
    assert all(text.endswith("<|im_start|>assistant\n<think></think>") for text in asked)
    assert "assistant\nfour<|im_end|>" in asked[1]  # the block is not part of the history, so the turns are apart
    assert marks(dialogue) == [["four<|im_end|>"], ["six<|im_end|>"]]


def test_a_reply_whose_text_encodes_to_other_ids_keeps_its_ids_and_ends_the_row() -> None:
    served = ChatTemplate(byte_tokenizer())
    dialogue = start(served, TWO_TURNS)
    spelled = [token for char in "<|im_end|>" for token in text_ids(served.tokenizer, char)]
    assert spelled != text_ids(served.tokenizer, "<|im_end|>")
    play(dialogue, [spelled, "six"])
    first = dialogue.rows()[0]
    assert list(first.reply_ids) == [*spelled, served.end_of_turn]
    assert marks(dialogue)[1] == ["six<|im_end|>"]
    assert dialogue.rewritten_turns == 1


def test_three_turns_of_which_the_second_rewrites_give_two_rows() -> None:
    served = ChatTemplate(byte_tokenizer(STRIPPING))
    dialogue = start(served, said(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", ""), ("user", "c")))
    play(dialogue, ["<think>x</think>one", "two", "three"])
    assert marks(dialogue) == [["<think>x</think>one<|im_end|>"], ["two<|im_end|>", "three<|im_end|>"]]
    assert [row.id for row in dialogue.rows()] == ["q/1", "q/1@1"]


def test_a_cut_reply_ends_the_conversation_without_an_end_of_turn() -> None:
    dialogue = start(ChatTemplate(byte_tokenizer()), TWO_TURNS)
    play(dialogue, ["fou"], cut=True)
    (row,) = dialogue.rows()
    assert (row.finish_reason, dialogue.ended, dialogue.open) == ("length", "reply cut by the limit", False)
    assert marks(dialogue) == [["fou"]]
    assert row.input_ids[-1] != dialogue.template.end_of_turn


def test_a_cut_last_reply_is_no_early_end() -> None:
    dialogue = start(ChatTemplate(byte_tokenizer()), TWO_TURNS)
    play(dialogue, ["four", "si"], cut=True)
    assert (dialogue.ended, marks(dialogue)) == ("", [["four<|im_end|>", "si"]])


def test_a_conversation_that_grows_too_long_keeps_what_was_written() -> None:
    served = ChatTemplate(byte_tokenizer())
    dialogue = start(served, TWO_TURNS)
    play(dialogue, ["four"], longest=len(dialogue.prompt_ids) + 5)
    assert (dialogue.ended, marks(dialogue)) == ("too long", [["four<|im_end|>"]])


def test_a_template_that_refuses_a_later_turn_ends_the_conversation() -> None:
    dialogue = start(ChatTemplate(byte_tokenizer(REFUSING)), said(("user", "a"), ("assistant", ""), ("user", "b")))
    play(dialogue, ["one"])
    assert (dialogue.ended, marks(dialogue)) == ("refused by the chat template", [["one<|im_end|>"]])


@pytest.mark.parametrize("first", [True, False])
def test_a_dropped_reply_ends_the_conversation_and_leaves_no_row_of_its_own(first: bool) -> None:
    dialogue = start(ChatTemplate(byte_tokenizer()), TWO_TURNS)
    if not first:
        play(dialogue, ["four"])
    request = dialogue.request(max_new_tokens=5, stop_ids=frozenset(), seed=0)
    dialogue.accept(Reply(request, (), "dropped", fault="no ids"), longest=999)
    assert (dialogue.ended, dialogue.open) == ("no ids", False)
    assert marks(dialogue) == ([] if first else [["four<|im_end|>"]])


def test_tool_messages_stay_and_turns_are_sampled_each_with_a_seed_of_its_own() -> None:
    served = ChatTemplate(byte_tokenizer())
    messages = said(("user", "weather?"), ("assistant", "call"), ("tool", "rain"), ("assistant", "It rains."))
    dialogue = start(served, messages, AnswerStyle(0.7, 20, 0.9))
    requests = [dialogue.request(max_new_tokens=9, stop_ids=frozenset({1}), seed=3)]
    asked = play(dialogue, ["I ask"])
    requests.append(dialogue.request(max_new_tokens=9, stop_ids=frozenset({1}), seed=3))
    asked += play(dialogue, ["Rain."])
    assert asked[1].endswith("assistant\nI ask<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")
    assert [request.id for request in requests] == ["q/1", "q/1/turn-1"]
    assert requests[0].seed != requests[1].seed
    assert {(r.temperature, r.top_k, r.top_p, r.max_new_tokens) for r in requests} == {(0.7, 20, 0.9, 9)}


def test_rows_carry_where_they_come_from() -> None:
    dialogue = start(ChatTemplate(byte_tokenizer()), TWO_TURNS, AnswerStyle(0.7))
    play(dialogue, ["four", "six"])
    (row,) = dialogue.rows()
    assert isinstance(row, CorpusRow)
    assert (row.source, row.category, row.split, row.temperature) == ("given", "maths", "train", 0.7)
