"""The exact supervised tokens of a two-turn conversation, for a template of every family.

A token is supervised iff the target itself generates it; never the generation prompt, never an empty think block of the
template; the trained tokens of a turn are what its rendering adds to the prompt that was served.
"""

import pytest

from eyas.data.encode import ChatTemplate, encode_conversation
from eyas.models.errors import UserError
from eyas.tests.data.template_families import FAMILIES, THINKING, Family
from eyas.tests.data.toys import marked_spans, text_ids
from eyas.tests.toys import CHATML, byte_tokenizer

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@EACH
def test_exactly_what_the_target_generates_is_marked(family: Family) -> None:
    template = family.chat_template()
    example, report = encode_conversation(template, family.messages())
    ids: list[int] = []
    mask: list[bool] = []
    for piece in family.pieces:
        new = text_ids(template.tokenizer, piece[0] if isinstance(piece, tuple) else piece)
        ids += new
        mask += [isinstance(piece, tuple)] * len(new)
    assert template.tokenizer.decode(example.input_ids_T) == template.tokenizer.decode(ids)
    assert example.input_ids_T.tolist() == ids
    assert example.generated_mask_T.tolist() == mask
    assert (report.marked_turns, report.rewritten_turns) == (2 - family.rewritten, family.rewritten)


@EACH
def test_every_marked_turn_is_what_rendering_adds_to_the_served_prompt(family: Family) -> None:
    template, messages = family.chat_template(), family.messages()
    example, _ = encode_conversation(template, messages)
    spans = marked_spans(template.tokenizer, example)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][family.rewritten :]
    for span, i in zip(spans, turns, strict=True):
        served = template.text(messages[:i], add_generation_prompt=True)
        through = template.text(messages[: i + 1], add_generation_prompt=False)
        assert through.startswith(served)
        added = through.removeprefix(served)
        end = template.tokenizer.decode([template.end_of_turn])
        if template.ends_by_next_turn:
            assert span.removesuffix(end) == added
        else:
            assert span == added[: added.rindex(end) + len(end)]


@EACH
def test_the_end_of_a_turn_and_the_start_of_a_users_are_known(family: Family) -> None:
    template = family.chat_template()
    assert template.tokenizer.convert_ids_to_tokens(template.end_of_turn) == family.end_of_turn
    assert template.user_prefix() == text_ids(template.tokenizer, family.prefix)


@EACH
def test_no_row_is_all_or_nothing_supervised(family: Family) -> None:
    example, _ = encode_conversation(family.chat_template(), family.messages())
    assert 0 < int(example.generated_mask_T.sum()) < len(example)


@EACH
def test_a_conversation_that_waits_for_its_answer_marks_earlier_turns_alone(family: Family) -> None:
    template = family.chat_template()
    example, _ = encode_conversation(template, family.messages()[:-1])
    before = [span for span in marked_spans(template.tokenizer, example) if "four" in span or "no" in span]
    assert before == []


def test_eight_families_and_an_end_that_is_not_eos_are_among_them() -> None:
    assert len(FAMILIES) >= 8
    for name in ("harmony", "gemma", "phi", "llama3", "glm"):
        template = FAMILIES[name].chat_template()
        assert template.end_of_turn != template.tokenizer.eos_token_id, name


REASONED = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "reasoning_content": "r1", "content": "a"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "reasoning_content": "r2", "content": "b"},
]


def thinking(**arguments: bool) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(THINKING), arguments)


def test_the_reasoning_of_the_last_turn_is_trained_and_a_stripped_history_is_not() -> None:
    template = thinking(enable_thinking=True)
    example, report = encode_conversation(template, REASONED)
    assert marked_spans(template.tokenizer, example) == ["<think>\nr2\n</think>\n\nb<|im_end|>"]
    assert (report.marked_turns, report.rewritten_turns) == (1, 1)
    # As a row of its own the first turn keeps its reasoning.
    alone, report = encode_conversation(template, REASONED[:2])
    assert marked_spans(template.tokenizer, alone) == ["<think>\nr1\n</think>\n\na<|im_end|>"]
    assert (report.marked_turns, report.rewritten_turns) == (1, 0)


def test_with_thinking_off_the_empty_block_is_prompt_and_without_the_argument_it_is_the_targets() -> None:
    messages = [REASONED[0], {"role": "assistant", "content": "b"}]
    off, served = thinking(enable_thinking=False), thinking()
    spans = [marked_spans(t.tokenizer, encode_conversation(t, messages)[0]) for t in (off, served)]
    assert spans == [["b<|im_end|>"], ["<think>\n\n</think>\n\nb<|im_end|>"]]


@pytest.mark.parametrize(
    ("name", "ending"),
    [("enable_thinkin", "Did you mean 'enable_thinking'?"), ("zzz", "or leave it out.")],
)
def test_an_argument_that_the_template_does_not_read_is_an_error(name: str, ending: str) -> None:
    with pytest.raises(UserError, match=f"does not read '{name}' of target.template_arguments") as caught:
        thinking(**{name: False})
    assert str(caught.value).endswith(ending)


def test_tool_schemas_of_the_first_message_reach_the_template_in_every_prefix() -> None:
    shown = "{% if tools %}{{ '<|im_start|>tools ' + tools[0]['name'] + '<|im_end|>\n' }}{% endif %}"
    template = ChatTemplate(byte_tokenizer(shown + CHATML))
    messages = [{"role": "user", "content": "q", "tools": [{"name": "add"}]}, {"role": "assistant", "content": "a"}]
    example, report = encode_conversation(template, messages)
    assert marked_spans(template.tokenizer, example) == ["a<|im_end|>"]
    assert report.rewritten_turns == 0
    assert template.text(messages, add_generation_prompt=False).startswith("<|im_start|>tools add<|im_end|>\n")
