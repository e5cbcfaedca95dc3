"""The quickstart's assertions on the real 135M model (`pytest -m real`), after the quickstart or instead of it.

EYAS_QUICKSTART_RUN names the run folder (default runs/smollm2-quickstart); a run that is not there is made, in about
twenty minutes on two cores.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eyas.data.corpus import load_corpus
from eyas.models.bundled import resolve_model
from eyas.tests.vllm_job import run_ours, run_vllm
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def run() -> Path:
    """The quickstart's run folder, finished or brought to its end."""
    folder = Path(os.environ.get("EYAS_QUICKSTART_RUN", "runs/smollm2-quickstart"))
    run_stages(load_recipe("smollm2-quickstart"), folder, reporter=Reporter())
    return folder


def overall(run: Path, method: str, temperature: float, prompt_set: str = "all") -> dict[str, Any]:
    """Return the report's entry over a set of prompts."""
    report = json.loads((run / "evaluation" / "report.json").read_text())
    wanted = (method, temperature, prompt_set)
    (entry,) = [e for e in report["results"] if (e["method"], e["temperature"], e["prompt_set"]) == wanted]
    return dict(entry)


def test_acceptance_on_self_written_prompts_reaches_the_bar(run: Path) -> None:
    assert overall(run, "chain", 0.0, "self-written")["tau"] >= 1.65
    assert overall(run, "tree", 0.0, "self-written")["tau"] >= 2.1


def test_acceptance_over_all_prompts_does_not_fall(run: Path) -> None:
    """The bundled prompts (translation above all) are harder for this head: 1.49 and 1.92 when first measured."""
    assert overall(run, "chain", 0.0)["tau"] >= 1.44
    assert overall(run, "tree", 0.0)["tau"] >= 1.86


def test_every_greedy_text_equals_plain_decoding(run: Path) -> None:
    for method in ("chain", "tree"):
        entry = overall(run, method, 0.0)
        assert entry["identical_to_plain"] == entry["prompts"] >= 96
        assert entry["differences"] == []


def test_sampling_is_measured_and_speculates(run: Path) -> None:
    for method in ("chain", "tree"):
        assert overall(run, method, 1.0)["tau"] > 1.1


def test_replayed_tau_is_what_decoding_sees(run: Path) -> None:
    """Decoding the validation prompts gives the tau that training reported by replay (bf16 states: within 5 %)."""
    training = json.loads((run / "stages" / "train.json").read_text())["result"]
    rows = [row for row in load_corpus(run / "corpus" / "corpus.jsonl") if row.split == "validation"]
    tokens = max(len(row.reply_ids) for row in rows)
    _, stats = run_ours(
        target="smollm2-135m-instruct", head=run / "training" / "best", depth=5, tokens=tokens,
        prompts=[list(row.prompt_ids) for row in rows], stop_ids=frozenset({2}),
    )  # fmt: skip
    assert stats.tau == pytest.approx(training["best_validation_tau"], rel=0.05)


@pytest.mark.skipif("EYAS_VLLM_PYTHON" not in os.environ, reason="EYAS_VLLM_PYTHON names no vLLM environment")
def test_vllm_serves_the_exported_head_as_we_do(run: Path) -> None:
    heldout = [row for row in load_corpus(run / "corpus" / "corpus.jsonl") if row.split == "heldout"]
    prompts = [list(row.prompt_ids) for row in heldout]
    target = resolve_model("smollm2-135m-instruct")
    texts, ours = run_ours(
        target=target, head=run / "head", depth=5, prompts=prompts, tokens=64, stop_ids=frozenset({2})
    )
    theirs = run_vllm(run / "vllm", target=target, head=run / "head", depth=5, prompts=prompts, tokens=64)
    same = sum(a == b for a, b in zip(texts, theirs["token_ids"], strict=True))
    print(f"vLLM {theirs['mean_acceptance_length']:.3f}, ours {ours.tau:.3f}, {same} of {len(texts)} texts equal")
    assert theirs["mean_acceptance_length"] == pytest.approx(ours.tau, rel=0.03)
