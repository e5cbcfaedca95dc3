"""Supervised tokens made visible, and the check that neither none nor all of them are."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from eyas.data.conversation import Conversation
from eyas.data.encode import ChatTemplate
from eyas.data.preview import write_preview
from eyas.data.supervision import EXAMPLE, STAND_IN, ShownRow, Span, check_supervision, show_conversation
from eyas.models.errors import CheckFailed, UserError
from eyas.tests.data.template_families import FAMILIES, THINKING, Family
from eyas.tests.data.test_encode import template_of
from eyas.tests.toys import CHATML, byte_tokenizer

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation("a", "b", "c", tuple({"role": role, "content": content} for role, content in turns))


def trained(row: ShownRow) -> list[str]:
    return [span.text for span in row.spans if span.supervised]


def test_a_row_is_shown_whole_with_its_supervised_spans() -> None:
    row = show_conversation(template_of("chatml"), EXAMPLE)
    assert row.marked_text == (
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n\u27e64.<|im_end|>\u27e7\n"
        "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n\u27e66.<|im_end|>\u27e7\n"
    )
    assert (row.supervised_tokens, row.rewritten_turns) == (6, 0)
    assert row.tokens == len(template_of("chatml").ids(list(EXAMPLE.messages), add_generation_prompt=False))


@EACH
def test_unanswered_turns_get_a_stand_in_reply(family: Family) -> None:
    waiting = conversation(("user", "q"), ("assistant", ""), ("user", "r"))
    spans = trained(show_conversation(family.chat_template(), waiting))
    assert 1 <= len(spans) <= 2
    assert all(STAND_IN in span for span in spans)


def test_a_reply_that_history_never_shows_as_served_is_shown_behind_its_prompt() -> None:
    """The generation prompt opens a think block, and the history shows none: synthesis trains what was served."""
    bare = "<|im_start|>assistant\n' }}{% endif %}"
    opening = CHATML.replace(bare, bare.replace("' }}", "<think>\n' }}"))
    row = show_conversation(ChatTemplate(byte_tokenizer(opening)), conversation(("user", "q"), ("assistant", "a")))
    assert row.marked_text.endswith("<|im_start|>assistant\n<think>\n\u27e6a<|im_end|>\u27e7")
    assert row.rewritten_turns == 1
    check_supervision([row])


def test_replies_left_out_are_counted() -> None:
    row = show_conversation(ChatTemplate(byte_tokenizer(THINKING), {"enable_thinking": False}), EXAMPLE)
    assert (trained(row), row.rewritten_turns) == (["6.<|im_end|>"], 1)


def test_none_or_all_supervised_stops_with_one_row_decoded() -> None:
    nothing = ShownRow("first", "s", "c", (Span("all of it", False, 3),))
    everything = ShownRow("second", "s", "c", (Span("all of it", True, 3),))
    with pytest.raises(CheckFailed) as caught:
        check_supervision([nothing, nothing])
    assert str(caught.value).startswith("not one token is supervised in the 2 rows looked at")
    assert "Row 'first', supervised spans in \u27e6 \u27e7:\nall of it\n" in str(caught.value)
    with pytest.raises(CheckFailed, match=r"every token is supervised in the 1 rows.*\n.all of it.\n"):
        check_supervision([everything])
    check_supervision([nothing, everything])
    check_supervision([])


def test_a_template_that_hides_the_users_turns_supervises_everything_and_is_stopped() -> None:
    replies = "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    row = show_conversation(ChatTemplate(byte_tokenizer(replies)), EXAMPLE)
    with pytest.raises(CheckFailed, match="every token is supervised"):
        check_supervision([row])


@pytest.mark.parametrize("hidden", ["assistant", "user"])
def test_a_template_that_leaves_out_a_role_is_refused(hidden: str) -> None:
    partial = CHATML.replace("{% for m in messages %}", f"{{% for m in messages if m['role'] != '{hidden}' %}}")
    with pytest.raises(UserError, match=f"does not show the content of {hidden} messages"):
        ChatTemplate(byte_tokenizer(partial)).user_prefix()


class Page(HTMLParser):
    """Collects the text inside and outside of marks, and the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.marked: list[str] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        assert not any(name in ("src", "href") for name, _ in attrs), "the page stands alone"

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.shown += data if "pre" in self.open else ""
        if "pre" in self.open and "mark" in self.open:
            self.marked.append(data)


def test_the_page_marks_what_is_trained_and_escapes_every_text(tmp_path: Path) -> None:
    hostile = conversation(("user", "<script>alert(1)</script> & <b>"), ("assistant", "<i>no</i>"))
    row = show_conversation(template_of("chatml"), hostile)
    write_preview(tmp_path / "p.html", [row], title="<t>", origin="o & o.", facts={"rows": "<1>"})
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.marked == ["<i>no</i><|im_end|>"]
    assert page.shown == "".join(span.text for span in row.spans)
    assert not {"script", "b", "i", "t"} & set(page.tags)
    assert page.tags.count("article") == 1
    assert "http" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]
