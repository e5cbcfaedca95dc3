"""Running the stand-alone vLLM measurement from a test, and our own chain on the same prompts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.checkpoint import load_head
from eyas.models.target import Target

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "vllm_acceptance.py"


def vllm_python() -> Path:
    """Return the interpreter of the vLLM environment named by EYAS_VLLM_PYTHON; fails when it is not set."""
    named = os.environ.get("EYAS_VLLM_PYTHON")
    assert named, "set EYAS_VLLM_PYTHON to the python that scripts/vllm_cpu_env.sh built"
    return Path(named)


def run_vllm(
    folder: Path, *, target: str, head: Path, depth: int, prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """Return vLLM's tokens and counters for the prompts."""
    job = {
        "target": target,
        "head": str(head),
        "method": "eagle3",
        "num_speculative_tokens": depth,
        "max_model_len": max(len(prompt) for prompt in prompts) + tokens + depth + 1,
        "dtype": "float32",
        "prompts": prompts,
        "max_tokens": tokens,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "in.json").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(vllm_python()), "-I", str(PROGRAM), str(folder / "in.json"), str(folder / "out.json")]
    done = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((folder / "out.json").read_text()))


def run_ours(
    *, target: str, head: Path, depth: int, prompts: list[list[int]], tokens: int, stop_ids: frozenset[int]
) -> tuple[list[list[int]], AcceptanceStats]:
    """Return our chain's tokens and acceptance for the prompts, in fp32."""
    loaded = load_head(head, dtype=torch.float32)
    engine = Engine(
        Target.load(target, dtype=torch.float32, aux_layers=loaded.config.aux_layers), loaded, ChainTree(depth)
    )
    stats, texts = AcceptanceStats(depth), []
    for prompt in prompts:
        generation = engine.generate(GenerationRequest(tuple(prompt), tokens, stop_ids))
        texts.append(list(generation.token_ids))
        stats += generation.stats
    return texts, stats
