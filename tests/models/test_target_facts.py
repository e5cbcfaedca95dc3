"""What is read off a target without loading it: sizes, quantisation, single tensors."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from eyas.models.errors import UserError
from eyas.models.target_facts import TargetFacts, quantisation_of
from eyas.tests.toys import tiny_config


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_and_single_tensors(tied: bool, tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    facts = TargetFacts.of(str(tmp_path))
    assert facts.shared == {"target_hidden_size": 40, "target_num_layers": 5, "vocab_size": 97}
    assert facts.quantisation is None
    assert torch.equal(facts.embedding(), model.model.embed_tokens.weight)
    assert torch.equal(facts.output_rows(), model.lm_head.weight)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored": 1},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, {"quant_method": "awq", "bits": 4}),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "version": "1"},
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
        ),
    ],
    ids=["fp8", "awq", "int8"],
)
def test_quantisation_is_told_by_method_and_bits(given: dict[str, object], expected: dict[str, object]) -> None:
    assert quantisation_of(tiny_config(quantization_config=given)) == expected


def test_a_target_without_safetensors_is_named(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no model.safetensors"):
        TargetFacts.of(str(tmp_path)).embedding()
