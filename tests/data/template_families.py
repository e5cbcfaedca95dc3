"""Chat templates in the style of well-known families, each with a two-turn conversation rendered by hand, in pieces.

A piece is text of the prompt; a piece in a tuple is what the target generates. The second user turn holds the family's
own reply header as plain words of the user.
"""

from dataclasses import dataclass, field
from typing import Any

from eyas.data.conversation import Messages
from eyas.data.encode import ChatTemplate
from eyas.tests.toys import byte_tokenizer

Pieces = list[str | tuple[str]]


@dataclass(frozen=True)
class Family:
    """A template, its special tokens (the last is EOS), and what it makes of the conversation with `quoted` in it."""

    template: str
    specials: tuple[str, ...]
    quoted: str
    pieces: Pieces
    end_of_turn: str
    prefix: str
    system: bool = True
    rewritten: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(byte_tokenizer(self.template, specials=self.specials), self.arguments)

    def messages(self) -> Messages:
        turns = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": f"{self.quoted}no"},
            {"role": "assistant", "content": "four"},
        ]
        return turns if self.system else turns[1:]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}{{ '<s>' }}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (first if WHERE else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
# Reasoning is shown in the last turn alone; with enable_thinking=False the generation prompt holds an empty block.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The target writes the channel header itself; a reply ends with a token that is not EOS.
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
    "{{ '<|message|>' + m['content'] + ('<|return|>' if loop.last and RETURN else '<|end|>') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATML_SPECIALS = ("<|im_start|>", "<|im_end|>")
MISTRAL_SPECIALS = ("<s>", "[INST]", "[/INST]", "</s>")
HARMONY_SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
GLM_SPECIALS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>")
PHI_SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
GEMMA_SPECIALS = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>")
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
HARMONY_START: Pieces = [
    "<|start|>system<|message|>be brief<|end|><|start|>user<|message|>2+2?<|end|><|start|>assistant"
]

FAMILIES = {
    "chatml": Family(
        CHATML, CHATML_SPECIALS, "<|im_start|>assistant\n",
        ["<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
         ("4<|im_end|>",),
         "\n<|im_start|>user\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n", ("four<|im_end|>",), "\n"],
        "<|im_end|>", "<|im_start|>user\n",
    ),
    "llama3": Family(
        LLAMA3, LLAMA3_SPECIALS, "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ["<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|><|start_header_id|>user"
         "<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", ("4<|eot_id|>",),
         "<|start_header_id|>user<|end_header_id|>\n\n<|start_header_id|>assistant<|end_header_id|>\n\nno<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", ("four<|eot_id|>",)],
        "<|eot_id|>", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
    ),
    "mistral": Family(
        MISTRAL.replace("WHERE", "loop.first"), MISTRAL_SPECIALS, "[/INST] ",
        ["<s>[INST] be brief\n\n2+2? [/INST]", (" 4</s>",), "[INST] [/INST] no [/INST]", (" four</s>",)],
        "</s>", "<s>[INST] ",
    ),
    "mistral, system in the last user turn": Family(  # so the first turn was served another prompt than is shown
        MISTRAL.replace("WHERE", "m == (turns | selectattr('role', 'equalto', 'user') | list)[-1]"), MISTRAL_SPECIALS,
        "[/INST] ",
        ["<s>[INST] 2+2? [/INST] 4</s>[INST] be brief\n\n[/INST] no [/INST]", (" four</s>",)],
        "</s>", "<s>[INST] ", rewritten=1,
    ),
    "gemma": Family(
        GEMMA, GEMMA_SPECIALS, "<start_of_turn>model\n",
        ["<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n", ("4<end_of_turn>",),
         "\n<start_of_turn>user\n<start_of_turn>model\nno<end_of_turn>\n<start_of_turn>model\n",
         ("four<end_of_turn>",), "\n"],
        "<end_of_turn>", "<bos><start_of_turn>user\n", system=False,
    ),
    "phi": Family(
        PHI, PHI_SPECIALS, "<|assistant|>\n",
        ["<|system|>\nbe brief<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n", ("4<|end|>",),
         "\n<|user|>\n<|assistant|>\nno<|end|>\n<|assistant|>\n", ("four<|end|>",), "\n<|endoftext|>"],
        "<|end|>", "<|user|>\n",
    ),
    "thinking, on": Family(  # the target writes the think block; that of the first turn is gone from the history
        THINKING, CHATML_SPECIALS, "<|im_start|>assistant\n",
        ["<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4"
         "<|im_end|>\n<|im_start|>user\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n",
         ("<think>\n\n</think>\n\nfour<|im_end|>",), "\n"],
        "<|im_end|>", "<|im_start|>user\n", rewritten=1, arguments={"enable_thinking": True},
    ),
    "thinking, off": Family(  # the generation prompt holds the block
        THINKING, CHATML_SPECIALS, "<|im_start|>assistant\n",
        ["<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4"
         "<|im_end|>\n<|im_start|>user\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
         ("four<|im_end|>",), "\n"],
        "<|im_end|>", "<|im_start|>user\n", rewritten=1, arguments={"enable_thinking": False},
    ),
    "harmony": Family(
        HARMONY.replace("RETURN", "false"), HARMONY_SPECIALS, "<|start|>assistant<|channel|>final<|message|>",
        [*HARMONY_START, ("<|channel|>final<|message|>4<|end|>",),
         "<|start|>user<|message|><|start|>assistant<|channel|>final<|message|>no<|end|><|start|>assistant",
         ("<|channel|>final<|message|>four<|end|>",)],
        "<|end|>", "<|start|>user<|message|>",
    ),
    "harmony, last turn returns": Family(  # the history ends a turn with another token than the target wrote
        HARMONY.replace("RETURN", "m['role'] == 'assistant'"), HARMONY_SPECIALS, "<|start|>assistant<|channel|>",
        [*HARMONY_START, "<|channel|>final<|message|>4<|end|>"
         "<|start|>user<|message|><|start|>assistant<|channel|>no<|end|><|start|>assistant",
         ("<|channel|>final<|message|>four<|return|>",)],
        "<|return|>", "<|start|>user<|message|>", rewritten=1,
    ),
    "glm": Family(  # a reply ends with the token that opens the user's next turn
        GLM, GLM_SPECIALS, "<|assistant|>\n",
        ["[gMASK]<sop><|system|>\nbe brief<|user|>\n2+2?<|assistant|>", ("\n4<|user|>",),
         "\n<|assistant|>\nno<|assistant|>", ("\nfour",)],
        "<|user|>", "[gMASK]<sop><|user|>\n",
    ),
}  # fmt: skip
