"""Self-prompting: quotas that add up, categories mixed evenly, the tokens that end a user's turn, steered prefixes."""

from pathlib import Path

import pytest

from eyas.data.backends import Reply
from eyas.data.dedup import DedupPlan, TextRepeats
from eyas.data.encode import ChatTemplate
from eyas.data.questions import Question
from eyas.data.ranks import Ranks
from eyas.data.self_prompts import PromptCounts, Steering, mixed, quotas, user_ending, user_stop_ids, write_prompts
from eyas.data.styles import AnswerStyle
from eyas.models.errors import UserError
from eyas.tests.data.test_answering import Echo
from eyas.tests.data.toys import text_ids
from eyas.tests.toys import CHATML, byte_tokenizer

TEMPLATE = ChatTemplate(byte_tokenizer())
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST]' + m['content'] + '[/INST]' }}"
    "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (10, [1.0], [10]),
        (10, [0.5, 0.5], [5, 5]),
        (10, [1, 1, 1], [4, 3, 3]),
        (1, [0.2, 0.7, 0.1], [0, 1, 0]),
        (7, [3, 2, 1], [4, 2, 1]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_quotas_follow_the_shares_and_add_up(total: int, shares: list[float], expected: list[int]) -> None:
    assert quotas(total, shares) == expected


def test_categories_are_mixed_in_proportion() -> None:
    def some(name: str, count: int) -> list[Question]:
        return [Question(f"{name}{n}", "self", name, "train", (n,), "", ()) for n in range(count)]

    assert [q.id for q in mixed([some("a", 3)])] == ["a0", "a1", "a2"]
    order = "".join(q.category for q in mixed([some("a", 6), some("b", 2), some("c", 0)]))
    assert order.count("a") == 6
    assert {half.count("b") for half in (order[:4], order[4:])} == {1}


def test_user_turns_end_at_what_the_template_puts_behind_them() -> None:
    assert user_stop_ids(TEMPLATE) == {TEMPLATE.end_of_turn}
    inst = ChatTemplate(byte_tokenizer(INST, specials=("<s>", "[INST]", "[/INST]", "</s>")))
    assert user_stop_ids(inst) == {inst.tokenizer.convert_tokens_to_ids("[/INST]")} != {inst.end_of_turn}


PLAIN_INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]\\n' }}"
    "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
)


def test_a_template_without_a_token_behind_user_turns_ends_them_by_its_text(tmp_path: Path) -> None:
    plain = ChatTemplate(byte_tokenizer(PLAIN_INST, specials=("<s>", "</s>")))
    assert (user_stop_ids(plain), user_ending(plain)) == (frozenset(), "[/INST]")
    assert user_ending(TEMPLATE) == ""

    class GoesOn(Echo):
        def run(self, requests):  # type: ignore[no-untyped-def]
            for request in requests:
                text = f"who asked {request.id}? [/INST] nobody" if request.id[-1] in "02" else "how long is a piece"
                yield Reply(request, tuple(text_ids(plain.tokenizer, text)), "length")

    questions, counts = write_prompts(
        GoesOn(), plain, (Steering("self", None, 1.0),), AnswerStyle(1.0), wanted=3, max_tokens=60, longest=99,
        stop_ids=frozenset(), seed=1, folder=tmp_path, rows_per_part=4, ranks=Ranks(), progress=lambda *_: None,
        repeats=TextRepeats(DedupPlan(near=0), ()),
    )  # fmt: skip
    assert [q.text for q in questions] == ["who asked self-000000?", "who asked self-000002?"]
    assert counts == {"self": PromptCounts(3, 4, 2, 2, 0)}


class Scripted(Echo):
    """A backend that writes the same few texts in turn and remembers the requests."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts
        self.requests = []  # type: ignore[var-annotated]

    def run(self, requests):  # type: ignore[no-untyped-def]
        self.requests = sorted(requests, key=lambda request: request.id)
        for n, request in enumerate(self.requests):
            ids = text_ids(TEMPLATE.tokenizer, self.texts[n % len(self.texts)])
            yield Reply(request, (*ids, TEMPLATE.end_of_turn), "stop")


def test_steerings_ask_from_their_own_prefix_and_repeats_count_across_them(tmp_path: Path) -> None:
    backend = Scripted(
        ["how many eggs?", "How  many EGGS?", "what is a hen?", "no", "why do hens sit?", "who asked that?"]
    )
    questions, counts = write_prompts(
        backend, TEMPLATE, (Steering("farm", "You keep hens.", 1.0), Steering("self", None, 1.0)),
        AnswerStyle(0.9, 40, 0.95), wanted=6, max_tokens=30, longest=99, stop_ids=frozenset({5}), seed=1,
        folder=tmp_path, rows_per_part=4, ranks=Ranks(), progress=lambda *_: None, repeats=TextRepeats(DedupPlan(), ()),
    )  # fmt: skip
    assert [request.id for request in backend.requests] == [
        *(f"self-{n:06d}" for n in range(4)), *(f"self-farm-{n:06d}" for n in range(4))
    ]  # fmt: skip
    prefixes = {str(TEMPLATE.tokenizer.decode(list(request.prompt_ids))) for request in backend.requests}
    steered = "<|im_start|>system\nYou keep hens.<|im_end|>\n<|im_start|>user\n"
    assert prefixes == {"<|im_start|>user\n", steered}
    assert {(r.temperature, r.top_k, r.top_p, r.stop_ids) for r in backend.requests} == {
        (0.9, 40, 0.95, frozenset({5, TEMPLATE.end_of_turn}))
    }
    # The farm's replies, the last four of eight: "why do hens sit?", "who asked that?", and the first two again.
    assert counts == {"farm": PromptCounts(3, 4, 3, 0, 1), "self": PromptCounts(3, 4, 1, 1, 2)}
    assert {(q.category, q.text) for q in questions} == {
        ("farm", "why do hens sit?"),
        ("farm", "who asked that?"),
        ("farm", "how many eggs?"),
        ("self", "what is a hen?"),
    }
    assert all("keep hens" not in TEMPLATE.tokenizer.decode(list(q.prompt_ids)) for q in questions)


def test_template_without_a_system_role_refuses_to_be_steered_by_name(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    with pytest.raises(UserError, match=r"refuses the system prompt of steering 'farm' \(no system role\)"):
        write_prompts(
            Echo(), ChatTemplate(byte_tokenizer(strict)), (Steering("farm", "Hens.", 1.0),), AnswerStyle(1.0), wanted=3,
            max_tokens=9, longest=99, stop_ids=frozenset(), seed=0, folder=tmp_path, rows_per_part=1, ranks=Ranks(),
            progress=lambda *_: None, repeats=TextRepeats(DedupPlan(), ()),
        )  # fmt: skip
