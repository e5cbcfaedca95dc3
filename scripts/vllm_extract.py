"""Serve a target's hidden states from vLLM: rows of token ids in, one file of states per row out.

    ENV/bin/python -I vllm_extract.py '{"target": DIR, "layers": [2, 15, 27, 30], "dtype": "bfloat16", ...}'

Stand-alone on purpose, like `vllm_acceptance.py`: it runs under the interpreter of a vLLM environment where this
package is not installed. It talks in JSON lines, requests on stdin and answers on stdout (vLLM's own output goes to
stderr), and ends when stdin does.

The one argument, every key required: `target` (folder or Hub id), `layers` (decoder layers applied before each tap;
the last layer's state is the one before the final norm), `dtype`, `max_model_len` (longest row), `max_num_seqs`,
`tensor_parallel_size`, `quantization` (null: as the checkpoint says).
First answer: {"ready": vLLM's version}. Then for every request
    {"rows": [[ids], ...], "paths": [FILE, ...]}   -> {"rows": n}; each file holds `states` [T, layers, D], `token_ids`
    {"logprobs": [ids]}                            -> {"top": [[id, logprob], ...]} of the token after each position
A request that fails is answered with {"error": text}. Prefix caching is off, prompts are never cut into chunks, nothing
is speculated: the draft of `extract_hidden_states` is the sampled token itself.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
KEYS = {"target", "layers", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size", "quantization"}
SLACK = 8  # positions beyond the longest row: its one sampled token and the draft that follows
FLUSHES = 8


def load(job: dict[str, Any]) -> Any:
    """Return the engine of a job."""
    if set(job) != KEYS:
        raise ValueError(f"the job must have exactly the keys {sorted(KEYS)}; it has {sorted(job)}")
    sys.path.append(str(Path(__file__).resolve().parent))  # where vLLM finds the connector, here and in its workers
    import vllm

    length = job["max_model_len"] + SLACK
    return vllm.LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        quantization=job["quantization"],
        tensor_parallel_size=job["tensor_parallel_size"],
        max_model_len=length,
        max_num_seqs=job["max_num_seqs"],
        max_num_batched_tokens=max(length, 2048),
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStates",
            "kv_connector_module_path": "vllm_connector",
            "kv_role": "kv_producer",
        },
        seed=0,
    )


def extract(llm: Any, rows: list[list[int]], paths: list[str]) -> dict[str, Any]:
    """Write the states of every row to its path and return their number."""
    import vllm

    prompts = [vllm.TokensPrompt(prompt_token_ids=row) for row in rows]
    parameters = [
        vllm.SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {"eyas_path": path}}
        )
        for path in paths
    ]
    llm.generate(prompts, parameters, use_tqdm=False)
    # States are written in the engine step after a request's last: a request of no interest makes that step happen.
    nothing = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    for _ in range(FLUSHES):
        if all(Path(path).is_file() for path in paths):
            return {"rows": len(rows)}
        llm.generate([vllm.TokensPrompt(prompt_token_ids=rows[0][:1])], nothing, use_tqdm=False)
    missing = [path for path in paths if not Path(path).is_file()]
    raise RuntimeError(f"vLLM finished {len(rows)} rows but wrote no states for {len(missing)} of them")


def logprobs(llm: Any, row: list[int]) -> dict[str, Any]:
    """Return the most likely token after every position but the last, with its log probability."""
    import vllm

    asked = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=1)
    (result,) = llm.generate([vllm.TokensPrompt(prompt_token_ids=row)], asked, use_tqdm=False)
    best = [max(found.items(), key=lambda item: item[1].logprob) for found in result.prompt_logprobs[1:]]
    return {"top": [[token, entry.logprob] for token, entry in best]}


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one request."""
    if "logprobs" in request:
        return logprobs(llm, request["logprobs"])
    return extract(llm, request["rows"], request["paths"])


def main(argv: list[str]) -> int:
    """Serve until stdin ends; the exit code is 2 for a job that cannot be run as given."""
    if len(argv) != 1:
        print("usage: vllm_extract.py JOB", file=sys.stderr)
        return 2
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not stand among the answers
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        llm = load(json.loads(argv[0]))
    except (OSError, ValueError) as error:
        print(f"vllm_extract.py: {error}", file=sys.stderr)
        return 2
    import vllm

    print(json.dumps({"ready": vllm.__version__}), file=answers)
    for line in sys.stdin:
        try:
            found = answer(llm, json.loads(line))
        except Exception as error:  # the other side decides what to do about it
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
