"""Parts of a target read from its files alone are those of the loaded model, and start a head alike."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.head_config import head_config_for, is_mixture
from eyas.models.rope import build_rope, check_same_rope
from eyas.models.target import Target
from eyas.models.target_parts import borrowed_parts, input_embeddings
from eyas.models.warm_start import init_from_target
from eyas.tests.models.families import SERVED, family_model
from eyas.tests.models.test_target_loading import gemma3, mistral3
from eyas.tests.toys import save_tiny_model

IDS = torch.arange(3, 20)[None]


def started(target: Target) -> Eagle3Head:
    """Return a head that starts from a target."""
    torch.manual_seed(0)
    head = Eagle3Head(head_config_for(target.config, aux_layers=(0, 1, 2), draft_vocab_size=61))
    init_from_target(head, target, DraftVocabulary.from_counts(torch.rand(97), size=61, forced={2}))
    return head


@pytest.mark.parametrize("name", SERVED)
def test_what_a_head_borrows_of_every_family_is_the_whole_models(name: str, tmp_path: Path) -> None:
    model = family_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # several files and an index
    mixture = is_mixture(model.config)
    whole, parts = Target(model), borrowed_parts(str(tmp_path), dtype=torch.float32, last_layer=not mixture)
    assert torch.equal(parts.embedding(IDS), whole.embedding(IDS))
    states = torch.randn(5, 40)
    assert torch.equal(parts.head.logits(states), whole.head.logits(states))
    assert torch.equal(parts.decoder.norm(states), whole.decoder.norm(states))
    config = head_config_for(whole.config, aux_layers=(0, 1, 2), draft_vocab_size=61)
    check_same_rope(build_rope(config), parts.decoder, config)
    assert parts.layers[0].self_attn.o_proj.weight.is_meta
    try:
        theirs = started(whole).state_dict()
    except UserError as error:  # a last block that is not Llama-like, from which no head starts
        with pytest.raises(UserError, match=re.escape(str(error).split("(")[0])):
            started(parts)
        return
    for key, tensor in started(parts).state_dict().items():
        assert torch.equal(tensor, theirs[key]), key


@pytest.mark.parametrize("config", [gemma3(), mistral3()], ids=lambda config: config.model_type)
def test_the_text_part_of_a_model_with_pictures_is_found(config: object, tmp_path: Path) -> None:
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(tmp_path)
    whole, parts = Target.load(str(tmp_path), dtype=torch.float32), borrowed_parts(str(tmp_path), dtype=torch.float32)
    assert torch.equal(parts.embedding(IDS), whole.embedding(IDS))
    for key, tensor in parts.layers[-1].state_dict().items():
        assert torch.equal(tensor, whole.layers[-1].state_dict()[key]), key


def test_a_tied_matrix_is_held_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tie_word_embeddings=True)
    parts = borrowed_parts(str(tmp_path), dtype=torch.float32)
    assert parts.head.weight_VD.data_ptr() == parts.embedding.weight.data_ptr()


def test_embeddings_are_given_as_the_layers_get_them(tmp_path: Path) -> None:
    family_model("gemma3_text").save_pretrained(tmp_path)
    scaled, stored = input_embeddings(str(tmp_path), dtype=torch.float32), load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(scaled, stored["model.embed_tokens.weight"] * 40**0.5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(scaled, model.get_input_embeddings()(torch.arange(97)))


@pytest.mark.parametrize("change", ["missing", "packed"])
def test_what_cannot_be_read_plainly_is_named(change: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.7.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :10].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"hold none of|stored quantised or packed"):
        borrowed_parts(str(folder), dtype=torch.float32)
    assert borrowed_parts(str(folder), dtype=torch.float32, last_layer=False).vocab_size == 258
