"""The targets that the bundled recipes name: what their public configs say, and tiny copies of the same architecture.

Of a config only what sizes and positions depend on is kept. Parameters are those of the text model by its publisher;
those of the heads were added up by hand: q, k, v over twice the hidden size, o, the MLP, three norms and the final one,
fc over three states, and the output rows.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eyas.data.sources import read_prompts
from eyas.models.target import Target
from eyas.tests.data.template_families import FAMILIES, HARMONY, HARMONY_SPECIALS
from eyas.tests.toys import byte_tokenizer

TINY_LAYERS, TINY_WIDTH = 8, 32
END_LOGIT = 2.0  # of the token that ends a turn, on average; the others' deviate by about 1 from 0
REASONING = "{{ '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}"
TEMPLATES = {name: (family.template, family.specials, family.end_of_turn) for name, family in FAMILIES.items()} | {
    "harmony with effort": (REASONING + HARMONY.replace("RETURN", "false"), HARMONY_SPECIALS, "<|end|>")
}


@dataclass(frozen=True)
class RecipeTarget:
    """One target: its public config, its size and that of its recipe's head, its template's style, and what a tiny
    copy has besides small sizes.
    """

    config: dict[str, Any]
    parameters: int
    head: int
    template: str
    tiny: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, Any]:
        """The part of the config that describes the text model."""
        return dict(self.config.get("text_config", self.config))

    @property
    def layers(self) -> int:
        return int(self.text["num_hidden_layers"])

    def tokenizer(self, *, words: bool) -> PreTrainedTokenizerFast:
        """Return a tokenizer with the template: of words learnt from the bundled prompts, or of bytes."""
        template, specials, _ = TEMPLATES[self.template]
        return word_tokenizer(template, specials) if words else byte_tokenizer(template, specials=specials)

    def save_config(self, folder: Path) -> Path:
        """Save the public config with a tokenizer, and no weights, as a model folder; return it."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        self.tokenizer(words=True).save_pretrained(folder)
        return folder

    def save_tiny(self, folder: Path) -> Path:
        """Save a tiny random chat model of the same architecture and return its folder."""
        torch.manual_seed(0)
        tokenizer = self.tokenizer(words=False)
        shape: dict[str, Any] = {
            "vocab_size": len(tokenizer), "hidden_size": TINY_WIDTH, "intermediate_size": 48, "head_dim": 16,
            "num_hidden_layers": TINY_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "initializer_range": 0.2, "dtype": "float32",
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None,
        }  # fmt: skip
        text = {name: value for name, value in self.text.items() if name not in ("layer_types", "dtype")}
        config = AutoConfig.for_model(text.pop("model_type"), **{**text, **shape, **self.tiny})
        model = AutoModelForCausalLM.from_config(config).float()
        _end_turns(model, tokenizer.convert_tokens_to_ids(TEMPLATES[self.template][2]))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


@torch.no_grad()
def _end_turns(model: Any, token: int) -> None:
    """Point one token's output row along the mean final state, so that a random model ends its turns now and then."""
    ids_BT = torch.randint(0, model.config.vocab_size, (8, 64))
    mean_D = Target(model).forward(ids_BT).final_hidden_BTD.mean((0, 1)).clone()
    model.get_output_embeddings().weight[token] = END_LOGIT * mean_D / mean_D.square().sum()


@cache
def _bundled_texts() -> tuple[str, ...]:
    prompts = [prompt for name in ("train", "eval") for prompt in read_prompts(f"bundled:{name}")]
    return tuple(text for prompt in prompts for text in prompt.user_texts())


def word_tokenizer(template: str, specials: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are about as long as those of a real one, the last special its EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_bundled_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[-1], pad_token=specials[-1])
    fast.chat_template = template
    return fast


def _dense(model_type: str, D: int, M: int, layers: int, heads: int, kv: int, V: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": D, "intermediate_size": M, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": V, "dtype": "bfloat16",
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


LLAMA_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
}  # fmt: skip
LLAMA = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA_ROPE}
QWEN2 = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
QWEN3 = {**QWEN2, "max_position_embeddings": 40960, "head_dim": 128}
SMOLLM2 = _dense(
    "llama", 576, 1536, 30, 9, 3, 49152, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
)  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA3 = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208,
        "max_position_embeddings": 131072, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_parameters": GEMMA3_ROPE, "dtype": "bfloat16",
    },
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SMOL = RecipeTarget(SMOLLM2, 134_515_008, 9_808_128, "chatml")
EAGLE1 = 2 * 576 * 576 + 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 576

TARGETS = {
    "smollm2-quickstart": SMOL,
    "smollm2-eagle1": RecipeTarget(SMOLLM2, 134_515_008, EAGLE1, "chatml"),
    "smollm2-eagle3.1": RecipeTarget(SMOLLM2, 134_515_008, 9_808_128 + 3 * 576, "chatml"),
    "smollm2-eagle3": SMOL,
    "smollm2-lk": SMOL,
    "smollm2-self": SMOL,
    "smollm2-domain": RecipeTarget(SMOLLM2, 134_515_008, 9_808_128 - 4096 * 576, "chatml"),
    "llama-3.1-8b": RecipeTarget(
        _dense("llama", 4096, 14336, 32, 32, 8, 128256, **LLAMA), 8_030_261_248, 424_689_664, "llama3",
        {"rope_parameters": {**LLAMA_ROPE, "original_max_position_embeddings": 64}},
    ),
    "llama-3.3-70b": RecipeTarget(
        _dense("llama", 8192, 28672, 80, 64, 8, 128256, **LLAMA), 70_553_706_496, 1_403_027_456, "llama3",
        {"rope_parameters": {**LLAMA_ROPE, "original_max_position_embeddings": 64}},
    ),
    "qwen2.5-7b": RecipeTarget(
        _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, **QWEN2), 7_615_616_512, 402_798_592, "chatml"
    ),
    "qwen2.5-72b": RecipeTarget(
        _dense("qwen2", 8192, 29568, 80, 64, 8, 152064, **QWEN2), 72_706_203_648, 1_425_047_552, "chatml"
    ),
    "qwen3-8b": RecipeTarget(
        _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, **QWEN3), 8_190_735_360, 399_523_840, "thinking, off"
    ),
    "qwen3-32b": RecipeTarget(
        _dense("qwen3", 5120, 25600, 64, 64, 8, 151936, **QWEN3), 32_762_123_264, 782_520_320, "thinking, off"
    ),
    "qwen3-30b-a3b": RecipeTarget(
        _dense(
            "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **QWEN3,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
        30_532_122_624, 145_235_968, "thinking, off", EXPERTS,
    ),
    "gpt-oss-20b": RecipeTarget(
        _dense(
            "gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
            num_local_experts=32, num_experts_per_tok=4, sliding_window=128, rope_parameters=YARN,
        ),
        20_914_757_184, 257_875_200, "harmony with effort",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
            "rope_parameters": {**YARN, "factor": 8.0, "original_max_position_embeddings": 64},
        },
    ),
    "gemma-3-12b": RecipeTarget(
        GEMMA3, 11_766_034_176, 422_722_560, "gemma", {"sliding_window": 24, "query_pre_attn_scalar": 16}
    ),
    "mistral-small": RecipeTarget(
        _dense(
            "mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-5,
            sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 1e8},
        ),
        23_572_403_200, 829_706_240, "mistral",
    ),
}  # fmt: skip
