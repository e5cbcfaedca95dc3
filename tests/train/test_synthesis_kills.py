"""Synthesis killed at random moments, on one and two processes, and resumed: the corpus is the undisturbed one's."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from eyas.data.corpus import load_corpus
from eyas.tests.data.toys import writing_target
from eyas.tests.train.killed_run import finish, kill_at, parts, start
from eyas.tests.train.tiny_run import write_recipe


class Undisturbed(NamedTuple):
    recipe: Path
    corpus: bytes
    parts: int


def talks(path: Path, count: int) -> Path:
    """Write a file of conversations of one to three turns and return it."""
    lines = []
    for n in range(count):
        turns = [[{"role": "user", "content": f"{n}: say {chr(97 + n + k) * 3}"}, {"role": "assistant", "content": "I"}]
                 for k in range(1 + n % 3)]  # fmt: skip
        messages = [message for turn in turns for message in turn][:-1]
        lines.append(json.dumps({"id": f"talk-{n}", "category": "talks", "messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    target, template = writing_target()  # it ends its turns, so there are second ones
    target.model.save_pretrained(folder / "model")
    template.tokenizer.save_pretrained(folder / "model")
    recipe = write_recipe(
        folder / "model", folder,
        synthesize={
            "prompts": [str(talks(folder / "talks.jsonl", 18))], "self_prompts": 6, "self_heldout": 2, "validation": 4,
            "self_prompt_tokens": 50, "max_prompt_tokens": 400, "max_reply_tokens": 30, "rows_per_part": 2,
            "answers": [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}],
        },
        head={"aux_layers": [0, 1, 2]}, train={"line_length": 430},
    )  # fmt: skip
    run = folder / "run"
    finish(start(recipe, run, processes=1), run)
    rows = load_corpus(run / "corpus" / "corpus.jsonl")
    assert Counter(len(row.generated) for row in rows)[3] > 2
    assert not list(run.rglob("*.tmp"))
    return Undisturbed(recipe, (run / "corpus" / "corpus.jsonl").read_bytes(), parts(run))


@pytest.mark.parametrize("processes", [(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 1), (1, 2, 1, 2)])
def test_killed_three_times_at_random_and_resumed_the_corpus_is_the_same(
    undisturbed: Undisturbed, tmp_path: Path, processes: tuple[int, ...]
) -> None:
    chance = random.Random(str(processes))
    run = tmp_path / "run"
    moments = sorted(chance.sample(range(1, undisturbed.parts * 3 // 4), 3))
    for count, part in zip(processes, moments, strict=False):
        kill_at(start(undisturbed.recipe, run, processes=count), run, part=part, delay=chance.uniform(0, 0.02))
        assert not (run / "corpus" / "corpus.jsonl").exists()
    finish(start(undisturbed.recipe, run, processes=processes[-1]), run)
    assert (run / "corpus" / "corpus.jsonl").read_bytes() == undisturbed.corpus
    assert json.loads((run / "stages" / "synthesize.json").read_text())["finished"]
    lines = [json.loads(line)["id"] for part in run.rglob("part-*.jsonl") for line in part.read_text().splitlines()]
    assert len(lines) == len(set(lines))
    assert not list(run.rglob("*.tmp"))


def test_two_launched_processes_write_the_corpus_of_one(undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command += ["eyas.train", str(undisturbed.recipe), "--stage", "synthesize", "--out", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (run / "corpus" / "corpus.jsonl").read_bytes() == undisturbed.corpus
    writers = Counter(path.name.split("-")[1] for path in run.rglob("part-*.jsonl"))
    assert set(writers) == {"000", "001"}
    assert done.stderr.count("[1/5] synthesize") == 1
