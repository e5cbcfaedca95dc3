"""`eyas export HEAD`, `eyas import` and `eyas doctor` as a user types them."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from eyas.tests.models.native_heads import save_native, target_and_head
from eyas.tests.scripts.command import Eyas
from eyas.tests.toys import save_tiny_model


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_native(target_and_head()[1], tmp_path / "head")


def test_a_head_is_exported_by_format(eyas: Eyas, head: Path) -> None:
    done = eyas("export", head, "--format", "speculators", "--out", "out", "--target", "owner/other", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["format"] == "speculators"
    assert "vllm serve owner/other" in Path("out/README.md").read_text()


def test_the_targets_embeddings_are_exported_on_request(eyas: Eyas, head: Path, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=97, layers=8)
    done = eyas("export", head, "--format", "vllm", "--out", "out", "--target", model, "--with-embeddings")
    assert done.code == 0, done.err
    with safe_open("out/model.safetensors", framework="pt") as file:
        assert file.get_slice("embed_tokens.weight").get_shape() == [97, 40]
    checked = json.loads(eyas("doctor", "out", "--target", model, "--no-decode", "--json").out)
    assert "its embeddings equal the target's and were left out" in json.dumps(checked["checks"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["head"], "is a head; say in which --format"),
        (["head", "--format", "vllm"], "say where to with --out"),
        (["head", "--format", "vlm", "--out", "out"], "Did you mean 'vllm'?"),
        (["no/such/head", "--format", "vllm", "--out", "out"], "there is no head folder 'no/such/head'"),
        (["head", "--format", "vllm", "--out", "out", "--set", "a.b=1"], "--set belongs to recipes"),
        (["recipe.yaml", "--with-embeddings"], "--with-embeddings goes with --format"),
    ],
)
def test_a_wrong_export_is_one_sentence(eyas: Eyas, head: Path, arguments: list[str], sentence: str) -> None:
    done = eyas("export", *arguments)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert not Path("out").exists()


def test_an_export_is_imported_again_and_says_what_it_did(eyas: Eyas, head: Path, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", layers=8)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 97}))
    assert eyas("export", head, "--format", "eagle", "--out", "out").code == 0
    done = eyas("import", "out", "--target", model, "--out", "again")
    assert done.code == 0, done.err
    assert "read model.safetensors, an eagle3 head in the midlayer layout" in done.out
    assert Path("again/config.json").read_text() == (head / "config.json").read_text()


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (["--aux-layers", "2;4"], "--aux-layers takes numbers such as 2,16,29"),
        (["--flag", "fc_nrm=true"], "Did you mean 'fc_norm'?"),
        (["--flag", "fc_norm=yes"], "--flag takes NAME=true or NAME=false"),
        (["--map", "absolute"], "--map takes offsets or ids"),
    ],
)
def test_a_wrong_answer_is_one_sentence(
    eyas: Eyas, head: Path, answers: list[str], sentence: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model")
    done = eyas("import", head, "--target", model, "--out", "again", *answers)
    assert done.code == 2
    assert sentence in done.err


def test_doctor_ends_with_1_on_a_fault_and_prints_a_table_or_json(eyas: Eyas, head: Path, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    done = eyas("doctor", head, "--target", model, "--no-decode")
    assert done.code == 1
    assert "vocabulary size 97 of the head is 258 in the target" in " ".join(done.out.split())
    assert "serves it" in done.out
    as_json = eyas("doctor", head, "--target", model, "--no-decode", "--json")
    assert as_json.code == 1
    report = json.loads(as_json.out)
    assert report["failed"] is True
    assert [verdict["engine"] for verdict in report["verdicts"]][:2] == ["vLLM", "SGLang"]


def test_a_name_of_eyas_own_is_no_target_for_others(eyas: Eyas, tmp_path: Path) -> None:
    head = save_native(target_and_head()[1], tmp_path / "own", target="smollm2-135m-instruct")
    done = eyas("push", head, "--repo", "me/head", "--dry-run")
    assert done.code == 2
    assert "give its Hub id with --target" in done.err
    assert eyas("push", head, "--repo", "me/head", "--dry-run", "--target", "owner/model").code == 0
