"""A whole run small enough for a test: prompt files and a recipe for a tiny saved model."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from eyas.scripts import cli

TRAIN_PROMPTS, EVAL_PROMPTS = 8, 4


def write_prompts(path: Path, name: str, count: int) -> Path:
    """Write a prompt file of two categories and return it."""
    lines = [
        {
            "id": f"{name}-{i}",
            "category": ("letters", "words")[i % 2],
            "messages": [{"role": "user", "content": f"{name} {i}: say {chr(97 + i) * 3}"}],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tiny_recipe(model: Path, folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that runs in seconds; its prompt files are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, dict[str, Any]] = {
        "target": {"model": str(model)},
        "synthesize": {
            "prompts": [str(write_prompts(folder / "train.jsonl", "train", TRAIN_PROMPTS))],
            "validation": 2,
            "answers": [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}],
            "max_prompt_tokens": 96,
            "max_reply_tokens": 24,
            "batch": 4,
            "rows_per_part": 2,
            "dtype": "float32",
        },
        "extract": {"tokens_per_batch": 256, "rows_per_shard": 4, "dtype": "float32", "state_dtype": "float32"},
        "head": {"draft_vocab_size": 128},
        "train": {
            "steps": 30,
            "line_length": 128,
            "learning_rate": 3.0e-3,
            "warmup_steps": 2,
            "validate_every": 10,
            "checkpoint_every": 2,
            "precision": "fp32",
        },
        "evaluate": {
            "prompts": [str(write_prompts(folder / "eval.jsonl", "eval", EVAL_PROMPTS))],
            "max_new_tokens": 16,
            "sampled_prompts": 1,
            "chain": {"depth": 3},
            "tree": {"depth": 3, "top_k": 4, "num_draft_tokens": 8},
        },
    }
    for section, values in changes.items():
        fields[section] = {**fields.get(section, {}), **values}
    return {"name": "tiny", **fields}


def write_recipe(model: Path, folder: Path, **changes: dict[str, Any]) -> Path:
    """Write that recipe as a file and return its path."""
    path = folder / "tiny.yaml"
    fields = tiny_recipe(model, folder, **changes)
    path.write_text(yaml.safe_dump(fields))
    return path


def be_eyas(arguments: list[str], said: Path) -> None:
    """Be the `eyas` command in this process, which is one of the test's own; what it says goes to a file."""
    sys.argv = ["eyas", *arguments]
    with said.open("w") as sys.stderr, said.with_suffix(".out").open("w") as sys.stdout:
        cli.main()
