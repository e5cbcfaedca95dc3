"""vLLM as a method of `eyas bench decode`: an engine in its own interpreter that answers group by group."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.decode_bench import BenchPlan, Replies
from eyas.models.errors import UserError

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "vllm_decode.py"


class VllmMethod:
    """A vLLM that decodes plainly, or with a head in chains of `depth`; it idles while others have their turn."""

    largest_batch: int | None = None

    def __init__(self, python: Path, *, target: str, dtype: str, batch: int, longest: int) -> None:
        """Start it; `longest` is the most tokens of prompt and reply. Raises UserError where it does not start."""
        self.python = python
        self.depth = 0
        self.job: dict[str, Any] = {
            "target": target,
            "head": None,
            "method": "eagle3",
            "num_speculative_tokens": 1,
            "max_model_len": longest,
            "dtype": dtype,
            "batch": batch,
        }
        self.process: subprocess.Popen[str] | None = None

    @classmethod
    def with_head(
        cls, python: Path, *, target: str, head: str, method: str, depth: int, dtype: str, longest: int
    ) -> "VllmMethod":
        """Return one that drafts with a head; greedily and one prompt at a time, as its CPU build can."""
        made = cls(python, target=target, dtype=dtype, batch=1, longest=longest + depth + 1)
        made.job |= {"head": head, "method": method, "num_speculative_tokens": depth}
        made.depth, made.largest_batch = depth, 1
        return made

    def run(self, prompts: list[tuple[int, ...]], plan: BenchPlan) -> Replies:
        sampling = plan.sampling
        asked = {
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": plan.max_new_tokens,
            "stop_ids": sorted(plan.stop_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        reply = self._ask(asked)
        stats = None
        if self.depth:
            survived = reply["accepted_per_pos"] or [0] * self.depth
            stats = AcceptanceStats(self.depth, reply["num_drafts"], reply["num_draft_tokens"], survived)
        return Replies(reply["token_ids"], stats)

    def close(self) -> None:
        """End the engine."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's answer to a group; the first one starts it."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        folder = tempfile.mkdtemp(prefix="eyas-vllm-")
        job, self.log = Path(folder) / "job.json", Path(folder) / "log.txt"
        job.write_text(json.dumps(self.job), encoding="utf-8")
        command = [str(self.python), "-I", str(PROGRAM), str(job)]
        try:
            with self.log.open("w") as log:
                self.process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
        except OSError as error:
            raise UserError(f"cannot start {str(self.python)!r}: {error}; name a python that has vLLM.") from None
        self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            last = self.log.read_text().strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"vLLM ended: {last[0]} (all of it in {self.log})")
        return dict(json.loads(line))
