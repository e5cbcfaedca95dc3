"""The comparison with a real engine, with a stand-in for the engine that says what the test tells it to."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.checkpoint import load_head, save_head
from eyas.models.errors import UserError
from eyas.models.head_files import read_head_files
from eyas.models.target import Target
from eyas.tests.toys import save_tiny_model, tiny_eagle1, tiny_head
from eyas.train.verify_engine import EngineParity, RecordedChain, record_parity, report_parity, verify_vllm

DEPTH, TOKENS, LAYERS = 3, 12, (2, 4, 5)
PROMPTS = [[5, 6, 7, 8], [100, 101]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = Target.load(str(model), dtype=torch.float32, aux_layers=LAYERS)
    folder = tmp_path_factory.mktemp("head") / "head"
    save_head(tiny_head(target, draft_vocab_size=200), folder, metadata={"note": "kept"}, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def truth(model: Path, head: Path) -> dict[str, Any]:
    return truth_of(model, head)


def truth_of(model: Path, folder: Path) -> dict[str, Any]:
    """Return what an engine that agrees with us in everything would report."""
    head, chain = load_head(folder, dtype=torch.float32), RecordedChain(DEPTH)
    target = Target.load(str(model), dtype=torch.float32, aux_layers=head.config.aux_layers)
    engine, stats, texts, drafted = Engine(target, head, chain), AcceptanceStats(DEPTH), [], []
    stop = frozenset({int(target.config.eos_token_id)})
    for prompt in PROMPTS:
        chain.drafts.clear()
        generation = engine.generate(GenerationRequest(tuple(prompt), TOKENS, stop))
        stats += generation.stats
        texts.append(list(generation.token_ids))
        drafted.append(list(chain.drafts))
    return {
        "vllm_version": "0.0", "token_ids": texts, "drafted": drafted, "num_drafts": stats.rounds,
        "accepted_per_pos": stats.survived, "mean_acceptance_length": stats.tau,
    }  # fmt: skip


def stand_in(
    folder: Path, report: dict[str, Any], *, plain: list[list[int]] | None = None, method: str = "eagle3"
) -> Path:
    """Write an executable that is called as `python -I PROGRAM IN OUT` and answers with a report."""
    answers = {"head": report, "plain": {**report, "token_ids": plain or report["token_ids"]}}
    (folder / "answers.json").write_text(json.dumps(answers))
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        "job = json.loads(pathlib.Path(sys.argv[3]).read_text())\n"
        f"answers = json.loads(pathlib.Path({str(folder / 'answers.json')!r}).read_text())\n"
        f"assert (job['method'], job['dtype']) == ({method!r}, 'float32'), job\n"
        "answer = answers['head' if job['head'] else 'plain']\n"
        "pathlib.Path(sys.argv[4]).write_text(json.dumps(answer))\n"
    )
    program.chmod(0o755)
    return program


def verify(head: Path, model: Path, python: Path) -> EngineParity:
    return verify_vllm(head, str(model), python, prompts=PROMPTS, depth=DEPTH, max_new_tokens=TOKENS)


def test_an_engine_that_agrees_passes_and_is_written_to_the_card(
    head: Path, model: Path, truth: dict[str, Any], tmp_path: Path
) -> None:
    parity = verify(head, model, stand_in(tmp_path, truth))
    assert parity.passed
    assert parity.rounds_equal == parity.rounds_compared == len(truth["drafted"][0])
    assert parity.survival == parity.our_survival
    record_parity(head, parity)
    card = read_head_files(head).card
    assert card["note"] == "kept"
    assert card["engines"]["vLLM"]["texts_equal"] == 2
    assert card["engines"]["vLLM"]["passed"] is True


def test_an_eagle1_head_is_served_by_the_engines_own_name_for_it(model: Path, tmp_path: Path) -> None:
    target = Target.load(str(model), dtype=torch.float32)
    save_head(tiny_eagle1(target), tmp_path / "head", metadata={}, dtype=torch.float32)
    parity = verify(tmp_path / "head", model, stand_in(tmp_path, truth_of(model, tmp_path / "head"), method="eagle"))
    assert parity.passed


def test_the_result_stands_in_the_report_of_the_run_that_made_the_head(
    head: Path, model: Path, truth: dict[str, Any], tmp_path: Path
) -> None:
    parity = verify(head, model, stand_in(tmp_path, truth))
    assert report_parity(head, parity) is None  # a head that stands in no run
    target = Target.load(str(model), dtype=torch.float32, aux_layers=LAYERS)
    made = tmp_path / "run" / "head"
    save_head(tiny_head(target), made, metadata={"target_fingerprint": "abc"}, dtype=torch.float32)
    report = tmp_path / "run" / "evaluation" / "report.json"
    report.parent.mkdir()
    report.write_text(json.dumps({"target_fingerprint": "abc", "results": [1]}))
    assert report_parity(made, parity) == report.resolve()
    found = json.loads(report.read_text())
    assert (found["results"], found["engines"]["vLLM"]["passed"]) == ([1], True)
    report.write_text(json.dumps({"target_fingerprint": "another"}))
    assert report_parity(made, parity) is None
    assert json.loads(report.read_text()) == {"target_fingerprint": "another"}


@pytest.mark.parametrize("change", ["draft", "text", "plain", "length"])
def test_an_engine_that_differs_in_one_thing_fails(
    change: str, head: Path, model: Path, truth: dict[str, Any], tmp_path: Path
) -> None:
    report = json.loads(json.dumps(truth))
    plain = [list(text) for text in report["token_ids"]]
    if change == "draft":
        report["drafted"][0][0][2] += 1
    elif change == "text":
        report["token_ids"][1][-1] += 1
    elif change == "plain":
        plain[0][0] += 1
    else:
        report["mean_acceptance_length"] *= 1.05
    parity = verify(head, model, stand_in(tmp_path, report, plain=plain))
    assert not parity.passed
    assert (parity.rounds_equal == parity.rounds_compared) == (change != "draft")
    assert parity.texts_equal == (1 if change in ("text", "plain") else 2)


def test_an_engine_that_does_not_start_is_one_sentence(head: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot start .*name a python that has vLLM with --python"):
        verify(head, model, tmp_path / "no-such-python")
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nraise SystemExit('ValueError: head_dim 16 is not served')\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match="vLLM did not serve this head: ValueError: head_dim 16 is not served"):
        verify(head, model, broken)
