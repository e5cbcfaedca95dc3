"""The end of a target read from its files alone gives the whole model's final states and logits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.models.target_tail import TargetTail
from eyas.tests.models.families import SERVED, family_model
from eyas.tests.toys import save_tiny_model

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("name", SERVED)
def test_every_familys_tail_ends_as_the_model_does(name: str, tmp_path: Path) -> None:
    model = family_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # several files and an index
    target, tail = Target(model, aux_layers=(1, 3)), TargetTail(str(tmp_path), dtype=torch.float32)
    out = target.forward(IDS)
    last = out.aux_hidden_BTF.chunk(2, dim=-1)[1]
    torch.testing.assert_close(tail.final_state(last), out.final_hidden_BTD)
    torch.testing.assert_close(tail.head.logits(out.final_hidden_BTD), model(IDS).logits)


def test_only_the_tail_is_loaded(tmp_path: Path) -> None:
    tail = TargetTail(str(save_tiny_model(tmp_path)), dtype=torch.bfloat16)
    assert tail.head.weight_VD.dtype == torch.bfloat16
    assert tail.config.num_hidden_layers == 8


def test_names_behind_a_longer_prefix_are_found(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{key}": value for key, value in tensors.items()}, folder / "model.safetensors")
    tail = TargetTail(str(folder), dtype=torch.float32)
    assert torch.equal(tail.head.weight_VD, tensors["lm_head.weight"])


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, missing: str) -> None:
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"hold none of {missing}"):
        TargetTail(str(folder), dtype=torch.float32)


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"stored quantised or packed \(torch.int8"):
        TargetTail(str(folder), dtype=torch.float32)
