"""Toys with known answers: a tiny random Llama, a byte tokenizer with a ChatML template, and an oracle head."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle1 import Eagle1Head
from eyas.models.eagle3 import Attend, Eagle3Head
from eyas.models.embedding_scale import with_embedding_scale
from eyas.models.head_config import HeadConfig, head_config_for
from eyas.models.target import Target
from eyas.models.warm_start import init_random, set_vocabulary

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AUX_LAYERS = (1, 2, 4)


def tiny_config(*, vocab_size: int = 97, layers: int = 5, **fields: object) -> LlamaConfig:
    """Return a Llama config whose head dim is not hidden / heads."""
    shape: dict[str, object] = {
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    return LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **{**shape, **fields})


def tiny_target(
    *, vocab_size: int = 97, aux_layers: tuple[int, ...] = AUX_LAYERS, seed: int = 0, **fields: object
) -> Target:
    """Return a tiny random target in fp32."""
    torch.manual_seed(seed)
    return Target(LlamaForCausalLM(tiny_config(vocab_size=vocab_size, **fields)), aux_layers=aux_layers)


def tiny_head(target: Target, *, draft_vocab_size: int = 61, seed: int = 1, **shape: Any) -> Eagle3Head:
    """Return a random head for a tiny target, of some shape, with a random draft vocabulary that holds token 2."""
    torch.manual_seed(seed)
    config = head_config_for(target.config, aux_layers=target.aux_layers, draft_vocab_size=draft_vocab_size, **shape)
    head = Eagle3Head(config)
    init_random(head, std=0.3)
    set_vocabulary(head, DraftVocabulary.from_counts(torch.rand(target.vocab_size), size=draft_vocab_size, forced={2}))
    head.use_embedding(target.embedding)
    return head.eval()


def tiny_eagle1(target: Target, *, num_layers: int = 1, seed: int = 1) -> Eagle1Head:
    """Return a random EAGLE-1 head for a tiny target."""
    torch.manual_seed(seed)
    config = head_config_for(target.config, kind="eagle1", num_layers=num_layers)
    head = Eagle1Head(with_embedding_scale(config, target.embedding))
    init_random(head, std=0.15)
    head.lend(target)
    return head.eval()


class ScriptedHead(Eagle3Head):
    """A head that passes features on as any other does, but whose draft logits are those that `draft` says."""

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Return draft logits_BTU at RoPE positions, from the features that a step takes and returns."""
        raise NotImplementedError

    def step(
        self,
        feature_BTD: Tensor,
        token_ids_BT: Tensor,
        position_ids_BT: Tensor,
        context: Attend,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        next_BTD = self.advance(feature_BTD, token_ids_BT, position_ids_BT, context)
        logits_BTU = self.draft(feature_BTD, next_BTD, position_ids_BT.expand_as(token_ids_BT))
        return next_BTD, logits_BTU if logits_at is None else logits_BTU.flatten(0, 1)[logits_at]


class OracleHead(ScriptedHead):
    """A head that knows the text: at RoPE position p it predicts text[p + 2], whatever it is fed."""

    def __init__(self, config: HeadConfig, text: list[int]) -> None:
        super().__init__(config)
        assert config.full_vocabulary
        self.text = text

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        return 20.0 * nn.functional.one_hot(known_tokens(self.text, positions_BT), self.config.vocab_size).float()


def known_tokens(text: list[int], positions_BT: Tensor) -> Tensor:
    """Return the token two past each position of a text, 0 behind its end."""
    known = [text[p + 2] if p + 2 < len(text) else 0 for p in positions_BT.flatten().tolist()]
    return torch.tensor(known).view(positions_BT.shape)


def oracle_head(target: Target, text: list[int]) -> OracleHead:
    """Return the oracle of a text (prompt and continuation)."""
    config = head_config_for(target.config, aux_layers=target.aux_layers, draft_vocab_size=target.vocab_size)
    return OracleHead(config, text).eval()


def byte_tokenizer(
    chat_template: str = CHATML, *, specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes and then the specials, the last of which is EOS. No merges: ids are known."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[-1], pad_token=specials[-1])
    fast.chat_template = chat_template
    return fast


def save_tiny_model(
    folder: Path, *, seed: int = 0, layers: int = 8, vocab_size: int | None = None, **fields: object
) -> Path:
    """Save a tiny chat model (weights, config, byte tokenizer) as a normal model folder and return it."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    vocab_size = vocab_size or len(tokenizer)
    config = tiny_config(vocab_size=vocab_size, layers=layers, eos_token_id=tokenizer.eos_token_id, **fields)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
