"""Chat templates with known renderings, a target that writes short printable turns, and hand-made feature rows."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.data.encode import ChatTemplate, TokenizedExample, encode_reply
from eyas.data.feature_row import FeatureRow
from eyas.data.manifest import FeatureSpec
from eyas.models.target import Target
from eyas.tests.toys import byte_tokenizer, tiny_config

CHATML_TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|channel|>final<|message|>' }}{% endif %}"
)
HARMONY_SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
# Earlier turns lose their reasoning, the last turn always shows a think block, and with enable_thinking=False the
# generation prompt writes the empty block itself.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def text_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the ids of a text, nothing added; the byte tokenizer has no merges, so pieces concatenate."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def marked_spans(tokenizer: PreTrainedTokenizerFast, example: TokenizedExample) -> list[str]:
    """Return the text of every run of marked tokens."""
    spans: list[list[int]] = []
    previous = False
    for token, marked in zip(example.input_ids_T.tolist(), example.generated_mask_T.tolist(), strict=True):
        if marked:
            if not previous:
                spans.append([])
            spans[-1].append(token)
        previous = marked
    return [str(tokenizer.decode(span)) for span in spans]


def writing_target(*, last_letter: str = "r", seed: int = 4) -> tuple[Target, ChatTemplate]:
    """Return a random target that writes lower-case text and ends its turn after `last_letter`, with its template.

    Dimensions 0 and 1 of its residual stream are left alone by the layers: a constant, and "the token is last_letter".
    """
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(vocab_size=len(tokenizer), layers=2, eos_token_id=end, initializer_range=0.15))
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[:2] = 0.0
        layer.mlp.down_proj.weight.data[:2] = 0.0
    embedding[:, 0], embedding[:, 1] = 2.0, 0.0
    embedding[text_ids(tokenizer, last_letter), 1] = 4.0
    head[:, 0], head[:, 1] = -50.0, 0.0
    head[text_ids(tokenizer, "abcdefghijklmnopqrstuvwxyz "), 0] = 0.0
    head[end, 0], head[end, 1] = -2.0, 10.0
    return Target(model), ChatTemplate(tokenizer)


def feature_row(name: str, ids: list[int], generated: list[int]) -> FeatureRow:
    """Return a row whose states and argmax spell (token id, position), so that a shift by one shows."""
    ids_T = torch.tensor(ids)
    mask_T = torch.zeros(len(ids), dtype=torch.bool)
    mask_T[generated] = True
    place_T = torch.arange(len(ids), dtype=torch.float32)
    states_T2 = torch.stack([ids_T.float(), place_T], dim=1)
    return FeatureRow(name, ids_T, mask_T, torch.cat([states_T2, -states_T2], 1), states_T2 + 0.5, ids_T + 1000)


def slots(mask_BT: Tensor, line: int = 0) -> list[int]:
    """Return the true positions of one line."""
    return [int(t) for t in mask_BT[line].nonzero().squeeze(-1)]


def spec_of(target: Target | None = None, /, **fields: object) -> FeatureSpec:
    """Return the spec of a tiny store of a target, or of `feature_row` rows (two layers of two numbers)."""
    own: dict[str, object] = {
        "target": "t",
        "quantization": "none",
        "tokenizer": "k",
        "template": "c",
        "template_arguments": "{}",
        "aux_layers": target.aux_layers if target else (1, 2),
        "hidden_size": target.config.hidden_size if target else 2,
        "vocab_size": target.vocab_size if target else 97,
        "compute_dtype": "float32",
        "state_dtype": "float32",
        "data": "d",
    }
    return FeatureSpec(**{**own, **fields})  # type: ignore[arg-type]


def corpus_rows() -> list[tuple[str, TokenizedExample]]:
    """Return nine rows of 1 to 40 tokens; five share a prefix of 16 tokens, two of those are the same text."""
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(3, 97, (16,), generator=generator).tolist()
    tails = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (24, 3, 8, 8, 0)]
    tails[3] = tails[2]
    rows = [encode_reply(shared, tail) for tail in tails]
    for length in (1, 7, 33, 2):
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        rows.append(encode_reply(ids[: (length + 1) // 2], ids[(length + 1) // 2 :]))
    order = [5, 1, 0, 7, 3, 8, 2, 6, 4]
    return [(f"row-{n}", rows[n]) for n in order]
