"""The mask of what the target generates: four templates, rewritten history, think blocks, added special tokens."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from eyas.data.encode import ChatTemplate, EncodingReport, encode_conversation, encode_reply
from eyas.models.errors import UserError
from eyas.tests.data import toys
from eyas.tests.data.toys import marked_spans, text_ids
from eyas.tests.toys import CHATML, byte_tokenizer

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "<|im_start|>assistant\nno"},
    {"role": "assistant", "content": "four"},
]
# Every rendering in pieces; the target writes the pieces that stand in a tuple.
CHATML_PIECES = [
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    ("4<|im_end|>",),
    "\n<|im_start|>user\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n",
    ("four<|im_end|>",),
    "\n",
]
LLAMA3_PIECES = [
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ("4<|eot_id|>",),
    "<|start_header_id|>user<|end_header_id|>\n\n<|im_start|>assistant\nno<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ("four<|eot_id|>",),
]
HARMONY_PIECES = [
    "<|start|>system<|message|>be brief<|end|><|start|>user<|message|>2+2?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>",
    ("4<|end|>",),
    "<|start|>user<|message|><|im_start|>assistant\nno<|end|><|start|>assistant<|channel|>final<|message|>",
    ("four<|end|>",),
]
TEMPLATES = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), CHATML_PIECES, "<|im_end|>"),
    "chatml-generation-tags": (toys.CHATML_TAGGED, ("<|im_start|>", "<|im_end|>"), CHATML_PIECES, "<|im_end|>"),
    "llama3-headers": (toys.LLAMA3, toys.LLAMA3_SPECIALS, LLAMA3_PIECES, "<|eot_id|>"),
    "harmony-like": (toys.HARMONY, toys.HARMONY_SPECIALS, HARMONY_PIECES, "<|end|>"),
}


def template_of(name: str) -> ChatTemplate:
    text, specials, _, _ = TEMPLATES[name]
    return ChatTemplate(byte_tokenizer(text, specials=specials))


@pytest.mark.parametrize("name", TEMPLATES)
def test_mask_is_content_and_end_of_turn_and_nothing_else(name: str) -> None:
    template = template_of(name)
    example, report = encode_conversation(template, MESSAGES)
    ids, mask = [], []
    for piece in TEMPLATES[name][2]:
        generated = isinstance(piece, tuple)
        new = text_ids(template.tokenizer, piece[0] if generated else piece)
        ids += new
        mask += [generated] * len(new)
    assert example.input_ids_T.tolist() == ids
    assert example.generated_mask_T.tolist() == mask
    assert example.input_ids_T.dtype == torch.int64
    assert report == EncodingReport(marked_turns=2, rewritten_turns=0)


def test_mask_equals_the_one_transformers_makes_from_generation_tags() -> None:
    template = template_of("chatml-generation-tags")
    example, _ = encode_conversation(template, MESSAGES)
    theirs = template.tokenizer.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert example.input_ids_T.tolist() == theirs["input_ids"]
    assert example.generated_mask_T.int().tolist() == theirs["assistant_masks"]
    assert sum(theirs["assistant_masks"]) == len("4") + len("four") + 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_end_of_turn_is_the_templates_own_token(name: str) -> None:
    template = template_of(name)
    assert template.end_of_turn == template.tokenizer.convert_tokens_to_ids(TEMPLATES[name][3])
    assert (template.end_of_turn == template.tokenizer.eos_token_id) == name.startswith("chatml")


@pytest.mark.parametrize("name", TEMPLATES)
def test_row_without_assistant_turn_marks_nothing(name: str) -> None:
    example, report = encode_conversation(template_of(name), MESSAGES[:2])
    assert not example.generated_mask_T.any()
    assert len(example) > 10
    assert report == EncodingReport(marked_turns=0, rewritten_turns=0)


def test_template_without_any_end_of_turn_token_is_refused() -> None:
    with pytest.raises(UserError, match="no special token after an assistant message"):
        ChatTemplate(byte_tokenizer("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"))


def test_reply_that_quotes_the_end_of_turn_is_marked_whole() -> None:
    template = template_of("chatml")
    messages = [{"role": "user", "content": "how do turns end?"}, {"role": "assistant", "content": "by <|im_end|>, so"}]
    example, _ = encode_conversation(template, messages)
    assert marked_spans(template.tokenizer, example) == ["by <|im_end|>, so<|im_end|>"]
    assert not example.generated_mask_T[-1]


def test_turns_whose_earlier_reasoning_the_template_drops_are_unmarked_and_counted() -> None:
    template = ChatTemplate(byte_tokenizer(toys.THINKING))
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "reasoning_content": "r1", "content": "a"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "reasoning_content": "r2", "content": "b"},
    ]
    example, report = encode_conversation(template, messages)
    assert "r1" not in template.text(messages, add_generation_prompt=False)
    assert marked_spans(template.tokenizer, example) == ["<think>\nr2\n</think>\n\nb<|im_end|>"]
    assert report == EncodingReport(marked_turns=1, rewritten_turns=1)


def test_empty_think_block_of_the_generation_prompt_is_not_trained() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": None, "content": "b"},
    ]
    off = ChatTemplate(byte_tokenizer(toys.THINKING), {"enable_thinking": False})
    example, report = encode_conversation(off, messages)
    assert marked_spans(off.tokenizer, example) == ["b<|im_end|>"]
    assert report == EncodingReport(marked_turns=1, rewritten_turns=0)
    # Served without the argument the target writes the block itself, so there it is trained.
    served = ChatTemplate(byte_tokenizer(toys.THINKING))
    example, _ = encode_conversation(served, messages)
    assert marked_spans(served.tokenizer, example) == ["<think>\n\n</think>\n\nb<|im_end|>"]


def test_earlier_turn_that_lost_its_think_block_is_not_trained_after_a_bare_header() -> None:
    off = ChatTemplate(byte_tokenizer(toys.THINKING), {"enable_thinking": False})
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "reasoning_content": None, "content": "a"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "reasoning_content": None, "content": "b"},
    ]
    example, report = encode_conversation(off, messages)
    assert marked_spans(off.tokenizer, example) == ["b<|im_end|>"]
    assert report == EncodingReport(marked_turns=1, rewritten_turns=1)


def test_turn_that_history_shows_without_the_generation_prompts_block_is_not_trained() -> None:
    block = "<|im_start|>assistant\n' }}{% endif %}"
    template = ChatTemplate(byte_tokenizer(CHATML.replace(block, block.replace("' }}", "<think></think>' }}"))))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer of some length"}]
    assert template.text(messages[:1], add_generation_prompt=True).endswith("<think></think>")
    example, report = encode_conversation(template, messages)
    assert not example.generated_mask_T.any()
    assert report == EncodingReport(marked_turns=0, rewritten_turns=1)


@pytest.mark.parametrize(
    ("name", "system", "expected"),
    [
        ("chatml", None, "<|im_start|>user\n"),
        ("chatml", "be brief", "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"),
        ("llama3-headers", None, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"),
        ("harmony-like", None, "<|start|>user<|message|>"),
    ],
)
def test_user_prefix_ends_where_the_users_text_begins(name: str, system: str | None, expected: str) -> None:
    template = template_of(name)
    assert template.user_prefix(system) == text_ids(template.tokenizer, expected)


def test_user_prefix_keeps_the_templates_default_system_message() -> None:
    default = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nhelp<|im_end|>\n' }}{% endif %}" + CHATML
    template = ChatTemplate(byte_tokenizer(default))
    expected = "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\n"
    assert template.user_prefix() == text_ids(template.tokenizer, expected)


def test_begin_of_text_is_never_added_twice() -> None:
    template = template_of("llama3-headers")
    bos = template.tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    template.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    assert template.tokenizer("x").input_ids[0] == bos  # the tokenizer adds one when asked to
    rendered = [
        template.ids(MESSAGES, add_generation_prompt=True),
        template.user_prefix(),
        encode_conversation(template, MESSAGES)[0].input_ids_T.tolist(),
    ]
    assert [ids.count(bos) for ids in rendered] == [1, 1, 1]
    assert template.end_of_turn == template.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert encode_conversation(template, MESSAGES)[1].marked_turns == 2


@pytest.mark.parametrize(("prompt", "reply"), [([5, 6, 7], [8, 9]), ([5], [2]), ([5, 2], [])])
def test_encode_reply_marks_the_reply_and_adds_nothing(prompt: list[int], reply: list[int]) -> None:
    example = encode_reply(prompt, reply)
    assert example.input_ids_T.tolist() == prompt + reply
    assert example.generated_mask_T.tolist() == [False] * len(prompt) + [True] * len(reply)
    assert example.input_ids_T.dtype == torch.int64
    assert len(example) == len(prompt) + len(reply)
