"""The methods of `eyas bench decode`: their names are known, and wrong ones refused, before anything is loaded."""

from pathlib import Path

import pytest
import torch

from eyas.models.checkpoint import save_head
from eyas.models.target import Target
from eyas.scripts.bench_methods import method_names
from eyas.tests.scripts.command import Eyas, refused
from eyas.tests.toys import tiny_head


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "head"
    target = Target.load(str(model), dtype=torch.float32, aux_layers=(1, 2, 4))
    save_head(tiny_head(target), folder, metadata={"target": str(model)}, dtype=torch.float32)
    return folder


@pytest.mark.parametrize(
    ("given", "arguments", "sentence"),
    [
        (
            "{head}",
            ("--method", "lookup", "--method", "dynamic:5,8,17"),
            "--method 'dynamic:5,8,17' is none of plain, lookup, chain:5, static, dynamic:5,8,16, transformers, "
            "transformers lookup. Did you mean 'dynamic:5,8,16'?",
        ),
        ("{head}", ("--tree", "chain:2", "--method", "chian:2"), "Did you mean 'chain:2'?"),
        (
            "none",
            ("--target", "{model}", "--draft-model", "{model}", "--method", "chain:5"),
            "--method 'chain:5' is none of plain, lookup, draft model, transformers, transformers lookup.",
        ),
    ],
)
def test_an_unknown_method_is_refused_before_anything_is_loaded_or_timed(
    eyas: Eyas,
    model: Path,
    head: Path,
    given: str,
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(Target, "load", lambda *_, **__: done.append("loaded"))
    monkeypatch.setattr("eyas.models.checkpoint.load_head", lambda *_, **__: done.append("loaded"))
    monkeypatch.setattr("eyas.train.latency_cache.measured_latency", lambda *_, **__: done.append("timed"))
    words = (given, *arguments)
    outcome = eyas("bench", "decode", *(word.format(head=head, model=model) for word in words))
    assert sentence in refused(outcome)
    assert done == []


def test_the_methods_of_an_engine_come_last_and_its_chain_needs_a_head() -> None:
    names = method_names(trees=["static", "chain:2", "static"], draft_model=False, vllm=True, vllm_head=True)
    assert names == [
        "plain", "lookup", "static", "chain:2", "transformers", "transformers lookup", "vllm", "vllm chain:5",
    ]  # fmt: skip
    assert method_names(trees=[], draft_model=True, vllm=True, vllm_head=False)[-2:] == ["transformers lookup", "vllm"]
