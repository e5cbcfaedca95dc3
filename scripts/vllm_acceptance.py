"""Measure vLLM's own mean acceptance length for an exported draft head, and record what it drafts.

    ENV/bin/python -I vllm_acceptance.py IN.json OUT.json

Stand-alone on purpose: it runs under the interpreter that `vllm_cpu_env.sh` builds in ENV, where this package is not
installed; `-I` keeps PYTHONPATH and the files beside this one from being imported there. IN.json, every key required:

    {"target": DIR, "head": DIR or null, "method": "eagle3" | "eagle", "num_speculative_tokens": K,
     "max_model_len": int, "dtype": "float32" | "bfloat16", "prompts": [[token ids], ...], "max_tokens": int}

A null head decodes plainly: the tokens to compare with. Decoding is greedy, one request at a time and without prefix
caching, so that the numbers compare to a runtime of batch 1. Both folders are on disk; neither needs a tokenizer.

OUT.json holds `vllm_version`, `token_ids` (the new tokens of each prompt, a stop token included), `finish_reasons`
("stop" or "length"), `drafted` (per prompt and round the K tokens that were proposed), the engine's counters
`num_drafts` (rounds with a draft), `num_draft_tokens`, `num_accepted_tokens` and `accepted_per_pos` (rounds that
accepted at least d + 1 drafts), `mean_acceptance_length` = 1 + accepted / drafts (null without drafts), `load_seconds`
and `generate_seconds`. vLLM counts a round's accepted drafts before it cuts the reply at max_tokens or a stop token, so
the last round of a reply may count drafts that were not returned.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Set before vLLM is imported, and only where the caller has not set them.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # a missing tokenizer otherwise prints a traceback as a warning
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: two more would each import vLLM again, 12 s
    "OMP_NUM_THREADS": "1",  # waiting threads spin: with both of 2 cores shared, 2 threads took 9 times as long
}
KINDS: dict[str, tuple[type, ...]] = {
    "target": (str,),
    "head": (str, type(None)),
    "method": (str,),
    "num_speculative_tokens": (int,),
    "max_model_len": (int,),
    "dtype": (str,),
    "prompts": (list,),
    "max_tokens": (int,),
}
DTYPES = ("float32", "bfloat16")
METHODS = ("eagle3", "eagle")


def read_job(path: Path) -> dict[str, Any]:
    """Return the job in `path`; ValueError when a key is missing, unknown, or holds a value that cannot be run."""
    job = json.loads(path.read_text())
    if not isinstance(job, dict) or set(job) != set(KINDS):
        given = sorted(job) if isinstance(job, dict) else type(job).__name__
        raise ValueError(f"{path} must be an object with exactly the keys {sorted(KINDS)}; it has {given}")
    for key, kinds in KINDS.items():
        if not isinstance(job[key], kinds) or isinstance(job[key], bool):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{key} is {job[key]!r}; it must be {allowed}")
    for key in ("num_speculative_tokens", "max_model_len", "max_tokens"):
        if job[key] < 1:
            raise ValueError(f"{key} is {job[key]}; it must be at least 1")
    if job["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {job['dtype']!r}; it must be one of {', '.join(DTYPES)}")
    if job["method"] not in METHODS:
        raise ValueError(f"method is {job['method']!r}; it must be one of {', '.join(METHODS)}")
    for folder in (job["target"], job["head"]):
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; give the folder of a saved model")
    if not job["prompts"]:
        raise ValueError("prompts is empty; give at least one list of token ids")
    for i, prompt in enumerate(job["prompts"]):
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise ValueError(f"prompts[{i}] must be a non-empty list of token ids")
        if len(prompt) + job["max_tokens"] > job["max_model_len"]:
            raise ValueError(
                f"prompts[{i}] has {len(prompt)} tokens, which with max_tokens {job['max_tokens']} exceeds "
                f"max_model_len {job['max_model_len']}; the engine would cut the reply short"
            )
    return job


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the content of OUT.json: the engine's greedy tokens for every prompt and its speculation counters."""
    import vllm  # after `main` has set the environment, which vLLM reads on import

    speculation = None
    if job["head"] is not None:
        speculation = {
            "method": job["method"],
            "model": job["head"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    drafts = record_drafts()
    start = time.monotonic()
    llm = vllm.LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # get_metrics() has no counters otherwise
        speculative_config=speculation,
        seed=0,
    )
    loaded = time.monotonic()
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False)
    prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in job["prompts"]]
    completions, drafted = [], []
    for prompt in prompts:
        drafts.clear()
        completions.append(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0])
        drafted.append(list(drafts))
    done = time.monotonic()
    counts = speculation_counts(llm)
    rounds, accepted = counts["num_drafts"], counts["num_accepted_tokens"]
    return {
        "vllm_version": vllm.__version__,
        "token_ids": [list(completion.token_ids) for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "drafted": drafted,
        **counts,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "load_seconds": round(loaded - start, 2),
        "generate_seconds": round(done - loaded, 2),
    }


def record_drafts() -> list[list[int]]:
    """Return a list to which the drafter's proposals are appended from now on, one list of K target ids a round."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    drafts: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def recorded(*args: Any, **fields: Any) -> Any:
        proposed = propose(*args, **fields)
        drafts.extend(proposed.tolist())
        return proposed

    SpecDecodeBaseProposer.propose = recorded
    return drafts


def speculation_counts(llm: Any) -> dict[str, Any]:
    """Return vLLM's speculation counters; without a draft head they do not exist there and are zero here."""
    prefix = "vllm:spec_decode_"
    values = {
        metric.name.removeprefix(prefix): getattr(metric, "values", None) or metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix)
    }
    return {
        "num_drafts": values.get("num_drafts", 0),
        "num_draft_tokens": values.get("num_draft_tokens", 0),
        "num_accepted_tokens": values.get("num_accepted_tokens", 0),
        "accepted_per_pos": values.get("num_accepted_tokens_per_pos", []),
    }


def main(argv: list[str]) -> int:
    """Return the exit code: 0 when OUT.json was written, 2 when the job cannot be run as given."""
    if len(argv) != 2:
        print("usage: vllm_acceptance.py IN.json OUT.json", file=sys.stderr)
        return 2
    source, destination = Path(argv[0]), Path(argv[1])
    try:
        job = read_job(source)
    except (OSError, ValueError) as error:
        print(f"vllm_acceptance.py: {error}", file=sys.stderr)
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    report = json.dumps(measure(job), indent=1)
    unfinished = destination.with_name(destination.name + ".tmp")
    unfinished.write_text(report)
    unfinished.replace(destination)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
