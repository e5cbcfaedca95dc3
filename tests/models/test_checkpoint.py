"""The head's checkpoint: byte-equal through a folder, the contract's config.json, strict, never half-written."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models import checkpoint, head_files
from eyas.models.checkpoint import check_map, load_head, save_head
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.head_config import head_config_for
from eyas.models.head_json import head_config_json
from eyas.models.head_layout import FLAGS
from eyas.models.target import Target
from eyas.models.ttt_attention import TTTContext
from eyas.models.warm_start import set_vocabulary
from eyas.tests.models.families import family_model
from eyas.tests.toys import tiny_config, tiny_head, tiny_target

COMBINATIONS = [values for values in product((False, True), repeat=4) if not (values[1] and values[2])]


def save(head: Eagle3Head, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    save_head(head, folder, metadata={"note": "tiny"}, dtype=dtype)
    return folder


def logits(head: Eagle3Head, target: Target) -> Tensor:
    """Return the logits of two steps over fixed inputs."""
    torch.manual_seed(5)
    T = 6
    head.use_embedding(target.embedding)
    context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
    with torch.no_grad():
        feature = head.fuse(torch.randn(1, T, head.config.aux_width))
        for step in range(2):
            tokens = torch.randint(97, (1, T))
            feature, drafted = head.step(feature, tokens, torch.arange(T)[None] + step, context)
    return drafted


def contains_none(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(contains_none(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
@pytest.mark.parametrize("size", [61, 97])
def test_tensors_and_logits_survive_for_every_flag(values: tuple[bool, ...], size: int, tmp_path: Path) -> None:
    flags = dict(zip(FLAGS, values, strict=True))
    target = tiny_target()
    head = tiny_head(target, draft_vocab_size=size, **flags)
    loaded = load_head(save(head, tmp_path / "head"), dtype=torch.float32)
    assert loaded.config == head.config
    before, after = head.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() == load_file(tmp_path / "head" / "model.safetensors").keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(head, target), logits(loaded, target))
    assert not loaded.training
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    for name, value in flags.items():
        assert fields[name] is value
        assert fields["eagle_config"][name] is value


def test_config_json_is_the_contracts() -> None:
    target = tiny_config(
        layers=30, hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, bos_token_id=1,
        eos_token_id=[2, 7], pad_token_id=0, rms_norm_eps=1e-5,
    )  # fmt: skip
    head = head_config_for(target, aux_layers=(2, 15, 27), draft_vocab_size=32, norm_output=True)
    flags = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": True}
    assert head_config_json(head, dtype=torch.bfloat16) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 512,
        "vocab_size": 97,
        "draft_vocab_size": 32,
        "tie_word_embeddings": False,
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "target_hidden_size": 64,
        "target_num_hidden_layers": 30,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26], **flags,
        },
        **flags,
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "bias": True, "tie_word_embeddings": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": None}},
    ],
    ids=["plain", "biased and tied", "quantised", "yarn"],
)
def test_nothing_of_the_target_leaks_that_engines_would_misread(fields: dict[str, Any]) -> None:
    head = head_config_for(tiny_config(**fields), aux_layers=(1, 2, 4), draft_vocab_size=32)
    written = head_config_json(head, dtype=torch.float32)
    assert "quantization_config" not in written
    assert (written["bias"], written["attention_bias"], written["tie_word_embeddings"]) == (False, False, False)
    assert not contains_none(written)


def test_the_file_holds_exactly_the_tensors_the_engines_read(tmp_path: Path) -> None:
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
    layer += ["mlp.up_proj", "mlp.down_proj", "hidden_norm", "input_layernorm", "post_attention_layernorm"]
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    target = tiny_target()
    reduced = load_file(save(tiny_head(target), tmp_path / "reduced", dtype=torch.bfloat16) / "model.safetensors")
    assert reduced.keys() == names | {"d2t", "t2d"}
    assert (reduced["d2t"].dtype, reduced["t2d"].dtype) == (torch.int64, torch.bool)
    assert (reduced["d2t"].shape, reduced["t2d"].shape) == ((61,), (97,))
    assert {t.dtype for name, t in reduced.items() if name in names} == {torch.bfloat16}
    ids = torch.arange(61) + reduced["d2t"]
    assert torch.equal(ids, reduced["t2d"].nonzero().squeeze(-1))
    full = load_file(save(tiny_head(target, draft_vocab_size=97), tmp_path / "full") / "model.safetensors")
    assert full.keys() == names
    assert full["lm_head.weight"].shape == (97, 40)
    flagged = load_file(save(tiny_head(target, fc_norm=True), tmp_path / "fc") / "model.safetensors")
    assert flagged.keys() - names - {"d2t", "t2d"} == {f"fc_norm.{a}.weight" for a in range(3)}


def test_a_head_of_an_odd_target_loads_strictly_and_steps(tmp_path: Path) -> None:
    target = Target(family_model("qwen3", hidden_size=42, num_attention_heads=4, head_dim=16), aux_layers=(0, 1, 3))
    head = tiny_head(target)
    loaded = load_head(save(head, tmp_path / "head"), dtype=torch.float32)
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert [fields[k] for k in ("head_dim", "target_hidden_size", "num_aux_hidden_states")] == [16, 42, 3]
    assert torch.equal(logits(loaded, target), logits(head, target))


def test_extra_files_and_metadata_are_written(tmp_path: Path) -> None:
    head = tiny_head(tiny_target())
    save_head(head, tmp_path / "head", metadata={"tau": 2.5}, dtype=torch.float32, files={"README.md": "# Serving"})
    described = json.loads((tmp_path / "head" / "eyas.json").read_text())
    assert (described["tau"], described["schema"], described["head"]["aux_layers"]) == (2.5, 2, [1, 2, 4])
    assert (tmp_path / "head" / "README.md").read_text() == "# Serving\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), r"tensors missing \['d2t'\], unknown \[\], of wrong shape \[\]"),
        (lambda t: t.pop("lm_head.weight"), r"tensors missing \['lm_head\.weight'\]"),
        (lambda t: t.update({"fc.bias": torch.zeros(40)}), r"missing \[\], unknown \['fc\.bias'\]"),
        (
            lambda t: t.update({"norm.weight": torch.zeros(41)}),
            r"of wrong shape \['norm\.weight \(41,\) instead of \(40,\)'\]",
        ),
        (lambda t: t["d2t"].zero_(), "d2t is all zeros"),
        (lambda t: t["d2t"].sub_(1), r"outside the target's|d2t and t2d name different tokens"),
        (lambda t: t["t2d"].logical_not_(), "d2t and t2d name different tokens"),
        (lambda t: t["d2t"].__setitem__(4, -4), "must ascend without repeats"),
    ],
    ids=["no d2t", "no lm_head", "extra", "shape", "zeros", "shifted", "t2d", "unsorted"],
)
def test_a_changed_tensor_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = save(tiny_head(tiny_target()), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_head(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_missing_or_torn_file_is_refused(name: str, content: str | None, tmp_path: Path) -> None:
    folder = save(tiny_head(tiny_target()), tmp_path / "head")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=r"^cannot read a head from '.*head': .*; name a folder written by eyas export"):
        load_head(folder, dtype=torch.float32)


@pytest.mark.parametrize("key", ["head_dim", "draft_vocab_size", "rope_theta", "eagle_aux_hidden_state_layer_ids"])
def test_a_config_without_a_needed_key_is_refused(key: str, tmp_path: Path) -> None:
    folder = save(tiny_head(tiny_target()), tmp_path / "head")
    fields = json.loads((folder / "config.json").read_text())
    del fields[key]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=rf"config\.json has no '{key}'"):
        load_head(folder, dtype=torch.float32)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_disagree_between_their_two_places_are_refused(flag: str, tmp_path: Path) -> None:
    folder = save(tiny_head(tiny_target()), tmp_path / "head")
    fields = json.loads((folder / "config.json").read_text())
    fields["eagle_config"][flag] = True
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=rf"{flag} is False at the top level and True in eagle_config"):
        load_head(folder, dtype=torch.float32)


def test_a_head_whose_map_was_never_filled_is_not_saved(tmp_path: Path) -> None:
    head = Eagle3Head(head_config_for(tiny_config(), aux_layers=(1, 2), draft_vocab_size=61))
    with pytest.raises(UserError, match="d2t is all zeros"):
        save(head, tmp_path / "head")
    assert not (tmp_path / "head").exists()
    check_map(tiny_head(tiny_target(), draft_vocab_size=97))


def test_the_first_ids_are_a_vocabulary_though_their_offsets_are_zero(tmp_path: Path) -> None:
    head = tiny_head(tiny_target())
    vocabulary = DraftVocabulary.from_counts(torch.arange(97).flip(0), size=61, forced=set())
    assert not bool(vocabulary.d2t_U.any())
    set_vocabulary(head, vocabulary)
    assert torch.equal(load_head(save(head, tmp_path / "head"), dtype=torch.float32).t2d, vocabulary.t2d_V)
    head.t2d[3], head.t2d[90] = False, True
    with pytest.raises(UserError, match="d2t is all zeros"):
        check_map(head)


@pytest.mark.parametrize("where", ["save_file", "head_config_json", "load_head"])
def test_a_crash_while_writing_leaves_the_old_head_whole(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    old = tiny_head(target, seed=1)
    folder = save(old, tmp_path / "head")

    def killed(*_args: object, **_fields: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(head_files if where == "save_file" else checkpoint, where, killed)
    for name in ("head", "new"):
        with pytest.raises(KeyboardInterrupt):
            save(tiny_head(target, seed=2), tmp_path / name)
    monkeypatch.undo()
    assert not (tmp_path / "new").exists()
    assert torch.equal(load_head(folder, dtype=torch.float32).fc.weight, old.fc.weight)
    save(tiny_head(target, seed=2), folder)
    assert not torch.equal(load_head(folder, dtype=torch.float32).fc.weight, old.fc.weight)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "eyas.json", "model.safetensors"]


def test_a_crash_while_the_old_head_is_deleted_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    folder = save(tiny_head(target, seed=1), tmp_path / "head")
    new = tiny_head(target, seed=2)
    remove = shutil.rmtree

    def killed_half_way(path: Path, **fields: Any) -> None:
        if (path / "config.json").exists():
            (path / "config.json").unlink()
            raise KeyboardInterrupt
        remove(path, **fields)

    monkeypatch.setattr(head_files.shutil, "rmtree", killed_half_way)
    with pytest.raises(KeyboardInterrupt):
        save(new, folder)
    assert torch.equal(load_head(folder, dtype=torch.float32).fc.weight, new.fc.weight)
