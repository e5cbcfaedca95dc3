"""`eyas verify-engine`: the head in a real engine, compared with our own chain: drafts, acceptance and text.

The engine runs in the user's own installation, as a process of its own; greedy, one prompt at a time, both sides in the
same dtype. Rounding may end an agreement of drafts late in a text; the text itself must equal plain decoding.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.data.corpus import write_atomically
from eyas.data.encode import ChatTemplate
from eyas.data.synthesize import stop_token_ids
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, HeadState
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.tree import DraftTree
from eyas.models.bundled import resolve_model
from eyas.models.checkpoint import head_from_files
from eyas.models.errors import UserError
from eyas.models.head_files import read_head_files, update_card
from eyas.models.launch import VLLM_METHODS
from eyas.models.target import Target, load_tokenizer
from eyas.train.run_folder import RunFolder

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "vllm_acceptance.py"
ROUNDS = 20  # of the first prompt, whose drafts must be equal token by token
TOLERANCE = 0.02  # of the mean acceptance length


@dataclass(frozen=True)
class EngineParity:
    """What an engine did with a head, beside what we do. `passed` holds all that was asked for."""

    engine: str
    version: str
    prompts: int
    depth: int
    rounds_compared: int
    rounds_equal: int
    tau: float
    our_tau: float
    survival: list[float]
    our_survival: list[float]
    texts_equal: int

    @property
    def passed(self) -> bool:
        return (
            self.rounds_equal == self.rounds_compared > 0
            and abs(self.tau - self.our_tau) <= TOLERANCE * self.our_tau
            and self.texts_equal == self.prompts
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class RecordedChain(ChainTree):
    """A chain that remembers what it drafted."""

    drafts: list[list[int]] = field(default_factory=list)

    @property
    def fixed(self) -> bool:
        """A round that is recorded is read by the host."""
        return False

    def make(self, state: HeadState, roots: list[int]) -> list[DraftTree]:
        trees = super().make(state, roots)
        self.drafts.extend(tree.tokens_N[1:].tolist() for tree in trees)
        return trees


def verify_vllm(
    folder: Path,
    target: str,
    python: Path,
    *,
    prompts: list[list[int]],
    depth: int,
    max_new_tokens: int,
    served: Path | None = None,
) -> EngineParity:
    """Return how vLLM serves a native head compared with our chain; raises UserError when it does not start.

    `served` is the folder vLLM is given, where that is an export of the head and not its native folder.
    """
    files = read_head_files(folder)
    head = head_from_files(files, dtype=torch.float32)
    loaded = Target.load(target, dtype=torch.float32, aux_layers=head.config.aux_layers)
    chain = RecordedChain(depth)
    engine = Engine(loaded, head, chain)
    stop = stop_token_ids(ChatTemplate(load_tokenizer(target), files.card.get("template_arguments", {})), loaded)
    stats, texts = AcceptanceStats(depth), []
    first: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        chain.drafts.clear()
        generation = engine.generate(GenerationRequest(tuple(prompt), max_new_tokens, stop))
        stats += generation.stats
        texts.append(list(generation.token_ids))
        first = list(chain.drafts) if number == 0 else first
    job = {
        "target": resolve_model(target), "head": str(served or folder), "method": VLLM_METHODS[files.method],
        "num_speculative_tokens": depth, "max_model_len": max(map(len, prompts)) + max_new_tokens + depth + 1,
        "dtype": "float32", "prompts": prompts, "max_tokens": max_new_tokens,
    }  # fmt: skip
    theirs, plain = _run(python, job), _run(python, {**job, "head": None})
    pairs = list(zip(first, theirs["drafted"][0], strict=False))[:ROUNDS]
    rounds = theirs["num_drafts"]
    return EngineParity(
        engine="vLLM",
        version=theirs["vllm_version"],
        prompts=len(prompts),
        depth=depth,
        rounds_compared=len(pairs),
        rounds_equal=sum(ours == other for ours, other in pairs),
        tau=theirs["mean_acceptance_length"],
        our_tau=stats.tau,
        survival=[count / rounds for count in theirs["accepted_per_pos"]],
        our_survival=stats.survival,
        texts_equal=sum(
            ours == other == alone
            for ours, other, alone in zip(texts, theirs["token_ids"], plain["token_ids"], strict=True)
        ),
    )


def record_parity(folder: Path, parity: EngineParity) -> None:
    """Write an engine's result into the head's eyas.json, where the model card finds it."""
    engines = read_head_files(folder).card.get("engines", {})
    update_card(folder, {"engines": {**engines, parity.engine: parity.as_dict()}})


def report_parity(folder: Path, parity: EngineParity) -> Path | None:
    """Write an engine's result into report.json of the run that the head's folder stands in, and return its path.

    None where it stands in no run, or in one that has evaluated for another target since.
    """
    run = RunFolder(folder.resolve().parent)
    path = run.of("evaluate") / "report.json"
    if run.of("export") != folder.resolve() or not path.is_file():
        return None
    report = json.loads(path.read_text(encoding="utf-8"))
    if report.get("target_fingerprint") != read_head_files(folder).card.get("target_fingerprint"):
        return None
    report["engines"] = {**report.get("engines", {}), parity.engine: parity.as_dict()}
    write_atomically(path, json.dumps(report, indent=2))
    return path


def _run(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's report on a job, from an interpreter that has vLLM and nothing of ours."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as scratch:
        source, destination = Path(scratch) / "in.json", Path(scratch) / "out.json"
        source.write_text(json.dumps(job), encoding="utf-8")
        command = [str(python), "-I", str(PROGRAM), str(source), str(destination)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UserError(
                f"cannot start {str(python)!r}: {error}; name a python that has vLLM with --python."
            ) from None
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"vLLM did not serve this head: {last[0]}")
        return dict(json.loads(destination.read_text(encoding="utf-8")))
