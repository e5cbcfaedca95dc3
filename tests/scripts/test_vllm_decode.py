"""The engine of a comparison is loaded as it would be served."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.scripts import vllm_decode

JOB = {
    "target": "target", "head": None, "method": "eagle3", "num_speculative_tokens": 3, "max_model_len": 64,
    "dtype": "float32", "batch": 2,
}  # fmt: skip


@pytest.mark.parametrize("gpu", [True, False])
def test_graphs_are_off_on_a_cpu_alone(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **settings: settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    loaded: dict[str, Any] = vllm_decode.load(JOB)
    assert loaded["enforce_eager"] is not gpu
    assert (loaded["model"], loaded["max_num_seqs"], loaded["speculative_config"]) == ("target", 2, None)
