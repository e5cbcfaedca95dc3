"""Scaled embeddings: what a head was trained on is what every engine feeds it, though engines lend the bare table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.models.checkpoint import load_head, save_head
from eyas.models.eagle1 import Eagle1Head
from eyas.models.embedding_scale import embedding_scale, norm_deviation
from eyas.models.errors import UserError
from eyas.models.export import EXPORTS, export_head
from eyas.models.head_config import head_config_for
from eyas.models.head_files import read_head_files
from eyas.models.import_head import Answers, import_head
from eyas.models.target import Target
from eyas.models.target_checks import check_loaded_target
from eyas.models.target_facts import TargetFacts
from eyas.models.ttt_attention import TTTContext
from eyas.models.warm_start import init_random
from eyas.tests.engine_readers import draft_eagle1
from eyas.tests.models.families import family_model
from eyas.tests.models.native_heads import SERVING
from eyas.tests.toys import tiny_eagle1, tiny_head

T, D = 7, 40
SCALE = 40**0.5
MINICPM = {
    "vocab_size": 97, "hidden_size": D, "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "scale_emb": 12, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    folder = tmp_path_factory.mktemp("gemma")
    family_model("gemma2").save_pretrained(folder)
    return Target.load(str(folder), dtype=torch.float32), folder


def gemma_head(target: Target) -> Eagle1Head:
    """Return a random EAGLE-1 head on a Gemma; its activation is the one that the engines' readers have."""
    config = replace(tiny_eagle1(target).config, hidden_act="silu")
    head = Eagle1Head(config)
    init_random(head, std=0.15)
    head.lend(target)
    return head.eval()


def advance(head: Eagle1Head, features_TD: Tensor, tokens_T: Tensor) -> Tensor:
    with torch.no_grad():
        context = TTTContext(torch.zeros(1, T, dtype=torch.int64))
        return head.advance(features_TD[None], tokens_T[None], torch.arange(T)[None], context)[0]


@pytest.mark.parametrize(
    ("name", "scale"), [("llama", 1.0), ("granite", 1.0), ("gemma", SCALE), ("gemma2", SCALE), ("gemma3_text", SCALE)]
)
def test_the_scale_is_what_the_module_multiplies_its_table_by(name: str, scale: float) -> None:
    found = embedding_scale(family_model(name).get_input_embeddings())
    assert found == float(f"{scale:.6g}")
    assert embedding_scale(family_model(name).bfloat16().get_input_embeddings()) == pytest.approx(scale, rel=5e-3)


def test_minicpms_scale_is_found_without_knowing_its_name() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("minicpm3", **MINICPM))
    assert embedding_scale(model.get_input_embeddings()) == 12.0


def test_a_module_that_does_more_than_scale_is_refused() -> None:
    class Normed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.normalize(super().forward(ids), dim=-1)

    with pytest.raises(UserError, match=r"does more to its table than multiply it.*train an EAGLE-3 head"):
        embedding_scale(Normed(97, D))


@pytest.mark.parametrize("name", ["native", *(name for name, export in EXPORTS.items() if export.method == "eagle1")])
def test_every_engine_drafts_from_the_bare_table_what_we_draft(
    name: str, gemma: tuple[Target, Path], tmp_path: Path
) -> None:
    target, _ = gemma
    head = gemma_head(target)
    native = tmp_path / "native"
    save_head(head, native, metadata={}, dtype=torch.float32)
    if name != "native":
        export_head(native, name, tmp_path / name, serving=SERVING)
    features, tokens, table = torch.randn(T, D), torch.randint(97, (T,)), target.embedding.weight
    ours = advance(head, features, tokens)
    program = "sglang" if name == "eagle1-sglang" else "vllm"
    theirs = draft_eagle1(tmp_path / name, program, features, table[tokens], torch.eye(D))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    wrong = draft_eagle1(tmp_path / name, program, features, target.embedding(tokens), torch.eye(D))
    assert not torch.allclose(wrong, ours, atol=0.1)


def test_a_saved_head_comes_back_as_it_was(gemma: tuple[Target, Path], tmp_path: Path) -> None:
    target, _ = gemma
    head = gemma_head(target)
    save_head(head, tmp_path / "head", metadata={}, dtype=torch.float32)
    again = load_head(tmp_path / "head", dtype=torch.float32)
    assert again.config == head.config
    assert head.config.embedding_scale == float(f"{SCALE:.6g}")
    torch.testing.assert_close(again.state_dict(), head.state_dict(), rtol=1e-6, atol=0)


def test_a_head_of_another_scale_is_lent_no_embeddings(gemma: tuple[Target, Path]) -> None:
    scaled, plain = gemma[0], Target(family_model("llama"), aux_layers=())
    with pytest.raises(
        UserError, match=r"trained on embeddings of 6\.32456 times .* this target's module gives 1 times"
    ):
        Eagle1Head(replace(tiny_eagle1(plain).config, embedding_scale=6.32456)).lend(plain)
    with pytest.raises(UserError, match=r"trained on embeddings of 1 times .* gives 6\.32456 times"):
        Eagle1Head(head_config_for(scaled.config, kind="eagle1")).lend(scaled)


@pytest.mark.parametrize("name", ["eagle1-vllm", "eagle1-sglang"])
def test_embeddings_that_go_with_a_head_are_the_bare_table(
    name: str, gemma: tuple[Target, Path], tmp_path: Path
) -> None:
    target, folder = gemma
    save_head(gemma_head(target), tmp_path / "native", metadata={}, dtype=torch.float32)
    export_head(tmp_path / "native", name, tmp_path / "out", serving=SERVING, embeddings_of=str(folder))
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"], target.embedding.weight
    )


def test_a_foreign_head_with_scaled_embeddings_of_its_own_is_made_to_read_the_table(
    gemma: tuple[Target, Path], tmp_path: Path
) -> None:
    target, folder = gemma
    head, features, tokens = gemma_head(target), torch.randn(T, D), torch.randint(97, (T,))
    save_head(head, tmp_path / "native", metadata={}, dtype=torch.float32)
    files = read_head_files(tmp_path / "native")
    del files.fields["target_embedding_scale"]
    foreign = {
        "bare": files.tensors | {"embed_tokens.weight": target.embedding.weight.detach()},
        "none": files.tensors,
        "scaled": files.tensors
        | {"fc.weight": head.fc.weight.detach(), "embed_tokens.weight": target.embedding(torch.arange(97)).detach()},
    }
    for name, tensors in foreign.items():
        (tmp_path / name).mkdir()
        for path in (tmp_path / "native").iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        _write(tmp_path / name, files.fields, tensors)
        imported = import_head(tmp_path / name, target=TargetFacts.of(str(folder)), answers=Answers())
        assert imported.files.fields["target_embedding_scale"] == head.config.embedding_scale, name
        assert ("multiplied into fc" in " ".join(imported.notes)) == (name == "scaled")
        (tmp_path / f"{name} again").mkdir()
        _write(tmp_path / f"{name} again", imported.files.fields, imported.files.tensors)
        theirs = draft_eagle1(
            tmp_path / f"{name} again", "vllm", features, target.embedding.weight[tokens], torch.eye(D)
        )
        torch.testing.assert_close(theirs, advance(head, features, tokens), rtol=1e-4, atol=1e-4)


def _write(folder: Path, fields: dict[str, object], tensors: dict[str, Tensor]) -> None:
    (folder / "eyas.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_the_doctor_says_what_the_scale_is_and_notices_a_lost_one(gemma: tuple[Target, Path], tmp_path: Path) -> None:
    target, _ = gemma
    save_head(gemma_head(target), tmp_path / "head", metadata={}, dtype=torch.float32)
    files = read_head_files(tmp_path / "head")
    found = {check.name: check for check in check_loaded_target(files, target)}["embeddings"]
    assert (found.status, found.detail) == (
        "ok", "the target's scale of 6.32456 is multiplied into fc; engines lend the bare table",
    )  # fmt: skip
    del files.fields["target_embedding_scale"]
    lost = {check.name: check for check in check_loaded_target(files, target)}["embeddings"]
    assert lost.status == "failed"
    assert "eyas import --target" in lost.detail


def test_eagle3_norms_the_scale_away_unless_eps_shows(tmp_path: Path) -> None:
    target = Target(family_model("gemma2", rms_norm_eps=1e-6), aux_layers=(0, 1, 3))
    save_head(tiny_head(target), tmp_path / "head", metadata={}, dtype=torch.float32)
    files = read_head_files(tmp_path / "head")
    checks = [{check.name: check for check in check_loaded_target(files, target)}["embeddings"]]
    with torch.no_grad():  # mean squares equal to eps: half of what is normed is eps, of the scaled rows 1 in 41
        target.embedding.weight.copy_(1e-3 * target.embedding.weight.sign())
    assert norm_deviation(target.embedding, eps=1e-6) == pytest.approx(1 - ((1 + 1 / 40) / 2) ** 0.5, rel=1e-4)
    checks.append({check.name: check for check in check_loaded_target(files, target)}["embeddings"])
    assert [check.status for check in checks] == ["ok", "warning"]
    assert "differs by 0.00%" in checks[0].detail
    assert "differs by 28.41%; eyas export --format vllm --with-embeddings writes its own" in checks[1].detail
