"""The exact commands that serve a head, for the README of its folder and its model card."""

import json
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Serving:
    """What launch lines are filled in with: names or paths, a chain of `depth`, a tree of `top_k` and its nodes."""

    target: str
    head: str
    depth: int
    top_k: int
    num_draft_tokens: int


VLLM_METHODS = {"eagle3": "eagle3", "eagle1": "eagle"}
SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "eagle1": "EAGLE"}


def vllm_command(method: str, serving: Serving) -> str:
    """Return the command that serves a chain in vLLM; its draft runs on one device, whatever the target runs on."""
    speculative = {
        "method": VLLM_METHODS[method],
        "model": serving.head,
        "num_speculative_tokens": serving.depth,
        "draft_tensor_parallel_size": 1,
    }
    return f"vllm serve {shlex.quote(serving.target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def sglang_command(method: str, serving: Serving) -> str:
    """Return the command that serves a tree in SGLang, which counts the root among the draft tokens."""
    return f"""python -m sglang.launch_server --model-path {shlex.quote(serving.target)} \\
  --speculative-algorithm {SGLANG_ALGORITHMS[method]} --speculative-draft-model-path {shlex.quote(serving.head)} \\
  --speculative-num-steps {serving.depth} --speculative-eagle-topk {serving.top_k} \\
  --speculative-num-draft-tokens {serving.num_draft_tokens + 1}"""


def original_command(_method: str, serving: Serving) -> str:
    """Return the two lines that load the head in the original code; its depth d means d + 1 levels."""
    return f"""from eagle.model.ea_model import EaModel
model = EaModel.from_pretrained(base_model_path={serving.target!r}, ea_model_path={serving.head!r},
    total_token={serving.num_draft_tokens + 1}, depth={serving.depth - 1}, top_k={serving.top_k})"""


_WARNING = """The algorithm and method names matter: with `EAGLE` instead of `EAGLE3`, or without `"method"`, the
engines answer with an acceptance length of 1.0 and no error."""
COMMANDS = {
    "vllm": ("vLLM (chain)", vllm_command),
    "sglang": ("SGLang (tree)", sglang_command),
    "eagle": ("the original EAGLE code (tree; the target must be saved in shards with an index)", original_command),
}


def serving_readme(engine: str, method: str, serving: Serving) -> str:
    """Return the README of a folder made for one engine."""
    title, command = COMMANDS[engine]
    return f"# Serving this draft head\n\n{title}:\n\n```\n{command(method, serving)}\n```\n\n{_WARNING}"


def launch_lines(serving: Serving, *, method: str, engines: tuple[str, ...]) -> str:
    """Return the README of a native folder: one command for each of the engines that serve it."""
    blocks = [f"{COMMANDS[name][0]}:\n\n```\n{COMMANDS[name][1](method, serving)}\n```" for name in engines]
    return "# Serving this draft head\n\n" + "\n\n".join(blocks) + f"\n\n{_WARNING}"
