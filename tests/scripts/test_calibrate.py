"""`eyas calibrate`, and what a calibrated head can do that another cannot: calibrated and cost-aware trees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.inference.calibration import Calibration, prompt_hash
from eyas.models.checkpoint import load_head, save_head
from eyas.models.target import Target, model_fingerprint
from eyas.scripts import cli
from eyas.tests.toys import save_tiny_model, tiny_head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture
def head(model: Path, tmp_path: Path) -> Path:
    target = Target.load(str(model), dtype=torch.float32, aux_layers=(1, 2, 4))
    save_head(
        tiny_head(target), tmp_path / "head", metadata={"target": str(model), "note": "kept"}, dtype=torch.float32
    )
    return tmp_path / "head"


@pytest.fixture
def eyas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[object, str, str]]:
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name, count in (("fit", 6), ("measure", 4)):
        lines = [
            {
                "id": f"{name}-{n}",
                "category": ("a", "b")[n % 2],
                "messages": [{"role": "user", "content": name * (1 + n)}],
            }
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def call(*arguments: object) -> tuple[object, str, str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["eyas", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


FIT = ("--prompts", "fit.jsonl", "--count", 3, "--max-new-tokens", 12)
Eyas = Callable[..., tuple[object, str, str]]


def test_a_head_is_calibrated_in_place_and_then_drafts_by_it(eyas: Eyas, model: Path, head: Path) -> None:
    weights = (head / "model.safetensors").read_bytes()
    code, out, err = eyas("calibrate", head, *FIT, "--json")
    assert (code, err) == (0, "")
    card = json.loads((head / "eyas.json").read_text())
    assert card["calibration"] == json.loads(out)
    assert (card["note"], (head / "model.safetensors").read_bytes()) == ("kept", weights)
    load_head(head, dtype=torch.float32)
    found = Calibration.from_card(card, where="here")
    assert found is not None
    assert (found.target, len(found.prompts)) == (model_fingerprint(str(model)), 3)
    assert [fit.temperature for fit in found.fits] == [0.0, 1.0]

    def text(*options: object) -> dict[str, Any]:
        code, out, err = eyas("generate", head, "--prompt", "hello", "--max-new-tokens", 12, "--json", *options)
        assert code == 0, err
        return dict(json.loads(out)["results"][0])

    plain = text("--tree", "chain:1")
    for tree in ("dynamic:3,4,8,calibrated", "auto", "auto:3,4,8"):
        assert text("--tree", tree)["token_ids"] == plain["token_ids"]
    assert len(list((Path("home") / "latency").iterdir())) == 2

    printed = eyas("calibrate", head, *FIT, "--temperature", 0, "--temperature", 0.7)
    assert "calibrated on 3 prompts" in printed[1]
    assert "T=0.7: " in printed[1]


def test_prompts_fitted_on_are_not_measured(eyas: Eyas, head: Path) -> None:
    assert eyas("calibrate", head, *FIT)[0] == 0
    bench = ("bench", "decode", head, "--max-new-tokens", 4, "--tree", "dynamic:3,4,8,calibrated", "--json")
    code, _, err = eyas(*bench, "--prompts", "fit.jsonl")
    assert code == 2
    assert "of these prompts are among those the head's calibration was fitted on" in err
    code, out, err = eyas(*bench, "--prompts", "measure.jsonl")
    assert code == 0, err
    assert {row["method"] for row in json.loads(out)["results"]} == {
        "plain", "lookup", "dynamic:3,4,8,calibrated", "transformers", "transformers lookup",
    }  # fmt: skip


def test_a_calibration_of_another_target_is_refused(eyas: Eyas, head: Path, tmp_path: Path) -> None:
    assert eyas("calibrate", head, *FIT)[0] == 0
    other = save_tiny_model(tmp_path / "other", initializer_range=0.2)
    code, _, err = eyas("generate", head, "--target", other, "--prompt", "x", "--tree", "auto")
    assert code == 2
    assert "was calibrated on a target with fingerprint" in err


def test_a_comparison_of_everything_on_a_calibrated_head(eyas: Eyas, head: Path) -> None:
    assert eyas("calibrate", head, *FIT)[0] == 0
    bench = ("bench", "decode", head, "--prompts", "measure.jsonl", "--max-new-tokens", 6)
    code, out, err = eyas(*bench, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["latency"]["by_rows"][0]["rows"] == 1
    found = {(row["method"], row["prompt_set"]): row for row in report["results"]}
    assert {name for name, _ in found} == {
        "plain", "lookup", "chain:5", "static", "dynamic:5,8,16", "chain:8", "dynamic:8,8,8",
        "dynamic:8,8,8,calibrated", "auto:head", "auto", "transformers", "transformers lookup",
    }  # fmt: skip
    assert all(row["same"] == row["prompts"] == 2 for row in report["results"])
    plain, tree = found["plain", "a"]["efficiency"], found["dynamic:8,8,8", "a"]
    assert (plain["speedup"], plain["verify_cost"], plain["draft_cost"]) == (1.0, 1.0, 0.0)
    assert plain["efficiency"] == pytest.approx(1.0)
    assert tree["drafted"] == 8.0
    assert tree["efficiency"]["verify_cost"] >= 1.0
    assert tree["efficiency"]["draft_cost"] > 0
    assert found["transformers", "a"]["efficiency"] is None
    code, out, _ = eyas(*bench, "--batch", 3, "--method", "transformers", "--temperature", 0.8)
    assert code == 0
    assert "mixed (3)" in out
    assert "chain" not in out
    code, _, err = eyas(*bench, "--batch", 5)
    assert code == 2
    assert "a batch of 5 needs as many prompts; there are 4" in " ".join(err.split())


def test_hashes_tell_prompts_apart() -> None:
    assert len({prompt_hash(ids) for ids in ((1, 2), (12,), (1, 2, 0), (2, 1))}) == 4
