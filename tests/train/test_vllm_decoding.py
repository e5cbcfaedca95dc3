"""vLLM as a method of a comparison, with a stand-in for the engine that answers as the test tells it to."""

import json
import sys
from pathlib import Path

import pytest

from eyas.inference.decode_bench import BenchPlan
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.train import vllm_decoding
from eyas.train.vllm_decoding import VllmMethod

PLAN = BenchPlan((2,), 5, frozenset({7, 3}), Sampling(0.8, top_p=0.9, seed=4))
ENGINE = """
import json, os, sys
job = json.load(open(sys.argv[1]))
print(json.dumps({"vllm_version": "0.0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    with open("asked.jsonl", "a") as log:
        log.write(json.dumps({"job": job, "asked": asked, "threads": os.environ["OMP_NUM_THREADS"]}) + "\\n")
    if asked["max_tokens"] == 99:
        sys.exit("out of memory")
    depth = job["num_speculative_tokens"] if job["head"] else 0
    print(json.dumps({
        "token_ids": [[1] * asked["max_tokens"] for _ in asked["prompts"]],
        "num_drafts": 4, "num_draft_tokens": 4 * depth, "accepted_per_pos": [3, 1, 0][:depth],
    }), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(vllm_decoding, "PROGRAM", tmp_path / "engine.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_groups_are_asked_of_one_engine_and_its_counters_are_acceptance(program: Path) -> None:
    plain = VllmMethod(Path(sys.executable), target="T", dtype="float32", batch=2, longest=40)
    head = VllmMethod.with_head(
        Path(sys.executable), target="T", head="H", method="eagle", depth=3, dtype="bfloat16", longest=40
    )
    for _ in range(2):
        replies = plain.run([(1, 2), (3,)], PLAN)
        assert (replies.token_ids, replies.stats) == ([[1] * 5] * 2, None)
    replies = head.run([(1, 2)], PLAN)
    assert replies.stats is not None
    assert (replies.stats.tau, replies.stats.survived, replies.stats.drafted) == (2.0, [3, 1, 0], 12)
    assert (plain.largest_batch, head.largest_batch) == (None, 1)
    processes = [method.process for method in (plain, head)]
    for method in (plain, head):
        method.close()
    assert [process is not None and process.returncode for process in processes] == [0, 0]
    first, _, last = (json.loads(line) for line in (program / "asked.jsonl").read_text().splitlines())
    assert first["asked"] == {
        "prompts": [[1, 2], [3]], "max_tokens": 5, "stop_ids": [3, 7], "temperature": 0.8, "top_p": 0.9, "seed": 4,
    }  # fmt: skip
    assert first["job"] == {
        "target": "T", "head": None, "method": "eagle3", "num_speculative_tokens": 1, "max_model_len": 40,
        "dtype": "float32", "batch": 2,
    }  # fmt: skip
    assert (last["job"]["head"], last["job"]["method"], last["job"]["max_model_len"]) == ("H", "eagle", 44)


def test_an_engine_that_ends_says_its_last_line(program: Path) -> None:
    method = VllmMethod(Path(sys.executable), target="T", dtype="float32", batch=1, longest=40)
    with pytest.raises(UserError, match="vLLM ended: out of memory"):
        method.run([(1,)], BenchPlan((1,), 99, frozenset(), Sampling()))
    with pytest.raises(UserError, match="cannot start 'no/such/python'"):
        VllmMethod(Path("no/such/python"), target="T", dtype="float32", batch=1, longest=4).run([(1,)], PLAN)
