"""Exports: round trips byte for byte, logits as other programs read the folder, and refusals with a way out."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.models.checkpoint import head_from_files, load_head
from eyas.models.engines import ENGINES, judge
from eyas.models.errors import UserError
from eyas.models.export import EXPORTS, export_head, same_tensors
from eyas.models.head_files import read_head_files
from eyas.models.head_layout import FLAGS
from eyas.models.import_head import Answers, import_head
from eyas.models.target_facts import TargetFacts
from eyas.tests.engine_readers import READERS, draft_eagle1
from eyas.tests.models.native_heads import (
    LAYERS,
    SERVING,
    drafted,
    eagle1_files,
    save_native,
    target_and_head,
    write_native,
)  # fmt: skip
from eyas.tests.toys import save_tiny_model

EAGLE3 = [name for name, export in EXPORTS.items() if export.method == "eagle3"]
EAGLE1 = [name for name, export in EXPORTS.items() if export.method == "eagle1"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
IDS, GUESSES = [5, 17, 2, 61, 33, 96, 0, 8], [11, 40]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "layers"), [(61, 1), (97, 1), (61, 2)])
@pytest.mark.parametrize("name", EAGLE3)
def test_there_and_back_every_byte_and_every_logit_is_the_same(
    name: str, size: int, layers: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    if layers > 1 and name in ("sglang", "eagle"):
        return  # refused, see below
    target, head = target_and_head(draft_vocab_size=size, num_layers=layers)
    native = save_native(head, tmp_path / "native", dtype=dtype)
    export_head(native, name, tmp_path / "out", serving=SERVING)
    again = import_head(tmp_path / "out", target=None, answers=Answers()).files
    before = read_head_files(native)
    assert again.fields == before.fields
    assert again.card == before.card
    assert same_tensors(again.tensors, before.tensors)
    ours, theirs = load_head(native, dtype=dtype), head_from_files(again, dtype=dtype)
    for a, b in zip(drafted(target, ours, IDS, GUESSES), drafted(target, theirs, IDS, GUESSES), strict=True):
        assert torch.equal(a, b)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": 97},
    "other layers": {"aux_layers": (1, 3, 6)},
    "two layers read": {"aux_layers": (3, 7)},
    "embeddings and last": {"aux_layers": (0, 4, LAYERS)},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "llama3 rope": {"rope": LLAMA3},
    "linear rope": {"rope": LINEAR},
    "three layers": {"num_layers": 3},
}
REFUSED = {
    "sglang": {"embeddings and last", "norm_before_residual", "three layers"},
    "eagle": {*CASES} - {"plain", "whole vocabulary", "linear rope"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EAGLE3)
def test_each_program_drafts_what_we_draft_or_the_export_is_refused(name: str, case: str, tmp_path: Path) -> None:
    target, head = target_and_head(**CASES[case])
    native = save_native(head, tmp_path / "native")
    if case in REFUSED.get(name, ()):
        with pytest.raises(UserError, match=r"cannot serve .*; (train|export)"):
            export_head(native, name, tmp_path / "out", serving=SERVING)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["native"]
        return
    export_head(native, name, tmp_path / "out", serving=SERVING)
    reader = READERS[name](tmp_path / "out", target_layers=LAYERS)
    assert reader.layers == head.config.aux_layers
    embed = target.embedding(torch.tensor([*IDS[1:], *GUESSES]))
    aux = target.forward(torch.tensor([IDS])).aux_hidden_BTF[0, :-1]
    theirs = reader.draft(aux, embed[: len(IDS) - 1], embed[len(IDS) - 1 :])
    for a, b in zip(drafted(target, head, IDS, GUESSES), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_reader_notices_another_order_of_layers(tmp_path: Path) -> None:
    target, head = target_and_head(aux_layers=(1, 3, 6))
    export_head(save_native(head, tmp_path / "native"), "vllm", tmp_path / "out", serving=SERVING)
    reader = READERS["vllm"](tmp_path / "out", target_layers=LAYERS)
    embed = target.embedding(torch.tensor(IDS[1:]))
    aux = target.forward(torch.tensor([IDS])).aux_hidden_BTF[0, :-1]
    swapped = torch.cat(aux.chunk(3, dim=-1)[::-1], dim=-1)
    (theirs,) = reader.draft(swapped, embed, embed[:0])
    assert not torch.allclose(theirs, drafted(target, head, IDS, [])[0], atol=1e-2)


@pytest.mark.parametrize(
    ("name", "fields", "reason", "instead"),
    [
        ("sglang", {"norm_before_residual": True}, "does not implement norm_before_residual", "export for vLLM"),
        (
            "sglang",
            {"aux_layers": (0, 3, 6)},
            "the embeddings \\(layer 0\\) have no number",
            "aux layers of 1 and more",
        ),
        ("sglang", {"aux_layers": (2, 3, LAYERS)}, "the last layer's output is never handed over", "below the last"),
        ("sglang", {"aux_layers": (4,)}, "would skip fc", "more aux layers"),
        ("sglang", {"num_layers": 2}, "layers behind the first another norm", "export for vLLM"),
        ("eagle", {"num_layers": 2}, "exactly one EAGLE-3 layer", "head.num_layers 1"),
        ("eagle", {"aux_layers": (2, 4)}, "exactly 3 aux states", "train with 3 aux layers"),
        ("eagle", {"aux_layers": (1, 4, 5)}, r"reads layers \[2, 4, 5\].*trained on \[1, 4, 5\]", "from the config"),
        ("eagle", {"fc_norm": True}, "does not know fc_norm", "train with head.fc_norm false"),
        ("eagle", {"rope": LLAMA3}, "linear and dynamic RoPE scaling at rope_theta 10000 only", "vLLM or SGLang"),
        ("eagle1-vllm", {}, "is an eagle3 head and eagle1-vllm is a format of eagle1 heads", "use vllm, sglang, eagle"),
        ("vlm", {}, "unknown export format 'vlm'", "Did you mean 'vllm'"),
    ],
)
def test_a_refusal_says_why_and_what_else(
    name: str, fields: dict[str, Any], reason: str, instead: str, tmp_path: Path
) -> None:
    native = save_native(target_and_head(**fields)[1], tmp_path / "native")
    with pytest.raises(UserError, match=f"{reason}.*{instead}"):
        export_head(native, name, tmp_path / "out", serving=SERVING)
    assert not (tmp_path / "out").exists()


def test_every_engine_judges_every_case_as_the_readers_show(tmp_path: Path) -> None:
    served = {
        case: {
            name for name in ENGINES
            if judge(name, read_head_files(save_native(target_and_head(**fields)[1], tmp_path / case)).fields).serves
        }
        for case, fields in CASES.items()
    }  # fmt: skip
    assert served["plain"] == {"vllm", "sglang", "eagle", "llama.cpp"}
    assert served["norm_before_residual"] == {"vllm", "llama.cpp"}
    assert served["EAGLE-3.1"] == served["other layers"] == served["two layers read"] == {"vllm", "sglang"}
    assert served["embeddings and last"] == served["three layers"] == {"vllm"}


@pytest.mark.parametrize("name", EAGLE3)
def test_nothing_engines_trip_over_is_in_the_config(name: str, tmp_path: Path) -> None:
    native = save_native(target_and_head()[1], tmp_path / "native", target_quantisation={"quant_method": "fp8"})
    export_head(native, name, tmp_path / "out", serving=SERVING)
    text = (tmp_path / "out" / "config.json").read_text()
    assert "null" not in text
    assert "quantization_config" not in text
    assert json.loads(text)["tie_word_embeddings"] is False
    assert "target_hidden_size" not in text or name != "eagle"
    assert json.loads((tmp_path / "out" / "eyas.json").read_text())["target_quantisation"] == {"quant_method": "fp8"}


def test_the_speculators_config_says_everything_explicitly(tmp_path: Path) -> None:
    export_head(
        save_native(target_and_head()[1], tmp_path / "native"), "speculators", tmp_path / "out", serving=SERVING
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    assert {config[name] for name in FLAGS} == {False}
    assert not {*FLAGS, "architectures", "eagle_config"} & config["transformer_layer_config"].keys()
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("name", EXPORTS)
def test_the_launch_line_in_the_folder_has_the_numbers(name: str, tmp_path: Path) -> None:
    export = EXPORTS[name]
    native = tmp_path / "native"
    if export.method == "eagle1":
        write_native(eagle1_files(), native)
    else:
        save_native(target_and_head()[1], native)
    export_head(native, name, tmp_path / "out", serving=SERVING)
    block = (tmp_path / "out" / "README.md").read_text().split("```")[1]
    if export.engine == "vllm":
        speculative = json.loads(shlex.split(block)[-1])
        assert speculative == {
            "method": "eagle3" if export.method == "eagle3" else "eagle", "model": "owner/head",
            "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1,
        }  # fmt: skip
    elif export.engine == "sglang":
        words = shlex.split(block.replace("\\\n", " "))
        assert words[words.index("--speculative-algorithm") + 1] == ("EAGLE3" if export.method == "eagle3" else "EAGLE")
        assert words[words.index("--speculative-num-draft-tokens") + 1] == "10"
    else:
        assert "total_token=10, depth=3, top_k=3" in block


@pytest.mark.parametrize("name", EAGLE1)
def test_an_eagle1_head_goes_there_and_back(name: str, tmp_path: Path) -> None:
    files = eagle1_files(dtype=torch.bfloat16)
    native = write_native(files, tmp_path / "native")
    export_head(native, name, tmp_path / "out", serving=SERVING)
    again = import_head(tmp_path / "out", target=None, answers=Answers()).files
    assert again.fields == read_head_files(native).fields
    assert same_tensors(again.tensors, files.tensors)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert ("fc.bias" in found) == (name != "eagle1-eagle")
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight", "d2t"} & found.keys()


def test_vllm_and_sglang_draft_the_same_from_an_eagle1_head(tmp_path: Path) -> None:
    native = write_native(eagle1_files(), tmp_path / "native")
    features, embeds, output = torch.randn(6, 40), torch.randn(6, 40), torch.randn(97, 40)
    drafts = []
    for program in ("vllm", "sglang"):
        export_head(native, f"eagle1-{program}", tmp_path / program, serving=SERVING)
        drafts.append(draft_eagle1(tmp_path / program, program, features, embeds, output))
    torch.testing.assert_close(drafts[0], drafts[1], rtol=0, atol=1e-5)
    export_head(native, "eagle1-eagle", tmp_path / "without", serving=SERVING)
    random_bias = draft_eagle1(tmp_path / "without", "sglang", features, embeds, output)
    assert not torch.allclose(random_bias, drafts[0], atol=0.1)


@pytest.mark.parametrize("name", ["vllm", "speculators", "eagle1-vllm"])
def test_embeddings_go_with_a_head_and_stay_behind_when_it_comes_back(name: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=97, layers=LAYERS)
    native = tmp_path / "native"
    if name.startswith("eagle1"):
        write_native(eagle1_files(), native)
    else:
        save_native(target_and_head()[1], native, dtype=torch.bfloat16)
    export_head(native, name, tmp_path / "out", serving=SERVING, embeddings_of=str(model))
    found = load_file(tmp_path / "out" / "model.safetensors")
    stored = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found["embed_tokens.weight"], stored.to(found["fc.weight"].dtype))
    again = import_head(tmp_path / "out", target=TargetFacts.of(str(model)), answers=Answers()).files
    assert same_tensors(again.tensors, read_head_files(native).tensors)
    with pytest.raises(
        UserError,
        match=r"embed_tokens.weight is there.*eyas import --target|midlayer|no draft head that eyas loads.*bring a foreign head in with eyas import",
    ):
        load_head(tmp_path / "out", dtype=torch.float32)


def test_another_targets_embeddings_are_refused(tmp_path: Path) -> None:
    native = save_native(target_and_head()[1], tmp_path / "native")
    other = save_tiny_model(tmp_path / "model", layers=LAYERS)
    with pytest.raises(UserError, match=r"are \(258, 40\), .* reads \(97, 40\); name the target"):
        export_head(native, "vllm", tmp_path / "out", serving=SERVING, embeddings_of=str(other))
    assert not (tmp_path / "out").exists()
