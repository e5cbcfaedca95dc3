"""`eyas push` against a server that speaks the Hub's API, in processes of their own, as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from eyas.models.checkpoint import load_head, save_head
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import head_config_for
from eyas.models.target import Target
from eyas.models.warm_start import init_from_target
from eyas.tests.hub_server import TOKEN, HubServer, hub
from eyas.tests.toys import save_tiny_model

REPO = "someone/a-head"
ASK = ("--prompt", "hello", "--max-new-tokens", 12, "--json")
ENTRY = {
    "method": "chain", "temperature": 0.0, "prompt_set": "all", "prompts": 96, "tau": 1.4921, "survival": [0.32, 0.11],
    "tokens_per_second": 22.4, "speedup": 1.17,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that says "a" whatever it reads, so that a head that says the same is always accepted."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[97, 0] = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that starts as the target's last block run again on its last state."""
    target = Target.load(str(model), dtype=torch.float32, aux_layers=(2, 4, 8))
    head = Eagle3Head(head_config_for(target.config, aux_layers=(2, 4, 8), draft_vocab_size=target.vocab_size))
    init_from_target(head, target, DraftVocabulary.full(target.vocab_size))
    folder = tmp_path_factory.mktemp("head") / "head"
    card = {"target": "owner/target", "acceptance": [ENTRY], "trained_length": 266, "template_arguments": {}}
    save_head(head, folder, metadata=card, dtype=torch.float32)
    return folder


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub() as running:
        yield running


def eyas(server: HubServer, home: Path, *arguments: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-m", "eyas.scripts.cli", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_head_goes_up_and_comes_down_by_its_name_and_drafts_the_same(
    server: HubServer, head: Path, model: Path, tmp_path: Path
) -> None:
    pushed = eyas(server, tmp_path / "home", "push", head, "--repo", REPO, "--licence", "apache-2.0", "--json")
    assert pushed.returncode == 0, pushed.stderr
    said = json.loads(pushed.stdout)
    assert said["private"] is True
    assert server.private[REPO] is True
    uploaded = server.repos[REPO]
    assert uploaded.keys() == {"config.json", "eyas.json", "model.safetensors", "README.md"}
    assert uploaded["model.safetensors"] == (head / "model.safetensors").read_bytes()
    metadata = yaml.safe_load(uploaded["README.md"].decode().split("---")[1])
    assert (metadata["base_model"], metadata["library_name"]) == ("owner/target", "eyas")
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == 1.492

    folder = tmp_path / "copy"
    there = eyas(server, tmp_path / "home", "export", REPO, "--format", "vllm", "--out", folder)
    assert there.returncode == 0, there.stderr
    assert torch.equal(load_head(folder, dtype=torch.float32).fc.weight, load_head(head, dtype=torch.float32).fc.weight)
    reports = [eyas(server, tmp_path / "home", "doctor", name, "--target", model, "--json") for name in (REPO, head)]
    taus = [json.loads(report.stdout)["acceptance"]["tau"] for report in reports]
    assert taus[0] == taus[1] > 5  # a chain of 5 and the bonus token, but for the last round
    written = [eyas(server, tmp_path / "home", "generate", n, "--target", model, *ASK) for n in (REPO, head)]
    assert (
        json.loads(written[0].stdout)["results"][0]["rounds"] == json.loads(written[1].stdout)["results"][0]["rounds"]
    )
    for text in (pushed, there, *reports, *written):
        assert TOKEN not in text.stdout + text.stderr
    assert not any(TOKEN.encode() in content for content in uploaded.values())


def test_a_dry_run_asks_nobody_and_shows_the_card(server: HubServer, head: Path, tmp_path: Path) -> None:
    done = eyas(server, tmp_path, "push", head, "--repo", REPO, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would upload" in done.stdout
    assert "tau: mean tokens per target forward" in done.stdout
    assert server.requests == []


def test_a_wrong_token_is_one_sentence_without_the_token(server: HubServer, head: Path, tmp_path: Path) -> None:
    done = eyas(server, tmp_path, "push", head, "--repo", REPO, token="hf_wrong_token_of_the_test")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the Hub refused the upload to 'someone/a-head'")
    assert "Check the token" in line
    assert "hf_wrong" not in done.stdout + done.stderr
    assert server.repos == {}


def test_a_connection_dropped_at_the_end_is_taken_up_again(server: HubServer, head: Path, tmp_path: Path) -> None:
    server.drop = ["/objects/", "/commit/"]  # the weights once in the middle, then the commit
    broken = eyas(server, tmp_path, "push", head, "--repo", REPO)
    assert broken.returncode == 2, broken.stdout
    assert "broke off" in broken.stderr
    assert "run the same command again" in broken.stderr
    assert server.repos[REPO] == {}
    sent = sum(request.startswith("PUT") for request in server.requests)
    again = eyas(server, tmp_path, "push", head, "--repo", REPO, "--public")
    assert again.returncode == 0, again.stderr
    assert server.repos[REPO]["model.safetensors"] == (head / "model.safetensors").read_bytes()
    assert sum(request.startswith("PUT") for request in server.requests) == sent  # what had arrived was not sent again


def test_a_broken_head_is_not_uploaded(server: HubServer, head: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in head.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "bias": True}))
    done = eyas(server, tmp_path, "push", broken, "--repo", REPO)
    assert done.returncode == 2
    assert "bias is true" in done.stderr
    assert server.requests == []
