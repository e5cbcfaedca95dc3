"""Preformatted text: split by the served template or refused."""

import pytest

from eyas.data.encode import ChatTemplate
from eyas.data.row_checks import BadRow
from eyas.data.template_text import TemplateText
from eyas.tests.data.template_families import FAMILIES
from eyas.tests.data.test_encode import TEMPLATES, template_of

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4\nreally"},
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "because"},
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("first", "last"), [(0, 5), (1, 5), (1, 3), (1, 2), (0, 4)])
def test_what_the_template_rendered_is_split_into_the_same_turns(name: str, first: int, last: int) -> None:
    template = template_of(name)
    text = template.text(MESSAGES[first:last], add_generation_prompt=False)
    assert TemplateText(template).messages(text) == MESSAGES[first:last]
    assert TemplateText(template).messages(f"\n{text} ") == MESSAGES[first:last]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_that_waits_for_its_answer_is_split_too(name: str) -> None:
    template = template_of(name)
    text = template.text(MESSAGES[:4], add_generation_prompt=True)
    assert TemplateText(template).messages(text) == MESSAGES[:4]


@pytest.mark.parametrize(
    "text",
    ["", "hello", "<|im_start|>user\nhi", "<|im_start|>assistant\nhi<|im_end|>\n", "### Human: hi\n### Assistant: yes",
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n", "[INST] hi [/INST] yes</s>"],
)  # fmt: skip
def test_other_text_is_refused_never_guessed_at(text: str) -> None:
    with pytest.raises(BadRow) as caught:
        TemplateText(template_of("chatml")).messages(text)
    assert caught.value.reason == "not this template's text"


def test_a_template_without_system_messages_splits_texts_without_them() -> None:
    template = template_of("chatml")
    refusing = template.tokenizer.chat_template.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    )
    template.tokenizer.chat_template = refusing
    text = template.text(MESSAGES[1:], add_generation_prompt=False)
    assert TemplateText(ChatTemplate(template.tokenizer)).messages(text) == MESSAGES[1:]


@pytest.mark.parametrize("name", ["thinking, on", "thinking, off"])
def test_a_text_that_waits_behind_a_header_of_its_mode_is_split(name: str) -> None:
    template = FAMILIES[name].chat_template()
    text = template.text(MESSAGES[1:2], add_generation_prompt=True)
    assert TemplateText(template).messages(text) == MESSAGES[1:2]


def test_a_text_rendered_without_the_arguments_of_serving_is_refused_by_their_name() -> None:
    off = FAMILIES["thinking, off"].chat_template()
    text = ChatTemplate(off.tokenizer).text(MESSAGES[1:2], add_generation_prompt=True)
    with pytest.raises(BadRow, match=r"rendered without the template arguments of serving \(enable_thinking=False\)"):
        TemplateText(off).messages(text)
