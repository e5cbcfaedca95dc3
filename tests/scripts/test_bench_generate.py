"""`eyas bench generate` as a user runs it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.scripts.cli import app
from eyas.tests.toys import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), layers=2)


def test_table_shows_both_speeds_and_their_ratio(model: Path) -> None:
    arguments = ["bench", "generate", "--target", str(model), "--batch", "3", "--tokens", "4", "--turns", "1"]
    done = CliRunner().invoke(app, [*arguments, "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    title, greedy, sampled = done.stdout.splitlines()
    assert title.startswith(f"{model}, float32, batch 3, 4 new tokens, ")
    assert greedy.startswith("  greedy: ")
    assert greedy.endswith("3 of 3 replies the same")
    assert sampled.startswith("  T = 0.8, top-p 0.95: ")
    assert "tokens/s, transformers.generate" in sampled


def test_json_is_alone_on_stdout(model: Path) -> None:
    arguments = ["bench", "generate", "--target", str(model), "--batch", "2", "--tokens", "3", "--turns", "2", "--json"]
    done = CliRunner().invoke(app, arguments)
    found = json.loads(done.stdout)
    assert (found["batch"], found["tokens"], found["dtype"]) == (2, 3, "bfloat16")
    assert [(one["temperature"], one["top_p"]) for one in found["results"]] == [(0.0, 1.0), (0.8, 0.95)]
    for one in found["results"]:
        ratios = sorted(a / b for a, b in zip(one["eyas"], one["transformers"], strict=True))
        assert one["ratio"] == pytest.approx(sum(ratios) / 2)
