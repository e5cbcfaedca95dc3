"""Answer groups of prompts with vLLM, one line in, one line out, for comparisons that take turns with other engines.

    ENV/bin/python -I vllm_decode.py JOB.json

Stand-alone on purpose, as `vllm_acceptance.py` beside it, whose environment and counters it shares. JOB.json:

    {"target": DIR, "head": DIR or null, "method": "eagle3" | "eagle", "num_speculative_tokens": K,
     "max_model_len": int, "dtype": "float32" | "bfloat16", "batch": int}

A null head decodes plainly. Once the engine is loaded it says {"vllm_version": ...}; then every line on its standard
input, {"prompts": [[ids], ...], "max_tokens": int, "stop_ids": [...], "temperature": t, "top_p": p, "seed": int}, is
answered by {"token_ids": [[ids], ...], "num_drafts": ..., "num_draft_tokens": ..., "accepted_per_pos": [...]}, counted
over these prompts alone. It ends with its input.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

SHARED = runpy.run_path(str(Path(__file__).with_name("vllm_acceptance.py")))


def load(job: dict[str, Any]) -> Any:
    """Return the engine of a job."""
    import torch
    import vllm

    speculation = {
        "method": job["method"],
        "model": job["head"],
        "num_speculative_tokens": job["num_speculative_tokens"],
    }
    return vllm.LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["batch"],
        # As it would be served: with CUDA graphs on a GPU. A CPU has none, and would compile for minutes.
        enforce_eager=not torch.cuda.is_available(),
        enable_prefix_caching=False,
        disable_log_stats=False,  # get_metrics() has no counters otherwise
        speculative_config=speculation if job["head"] is not None else None,
        seed=0,
    )


def answer(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a group of prompts and the speculation counters of this group."""
    import vllm

    settings = vllm.SamplingParams(
        temperature=asked["temperature"],
        top_p=asked["top_p"],
        seed=asked["seed"] if asked["temperature"] > 0 else None,
        max_tokens=asked["max_tokens"],
        stop_token_ids=asked["stop_ids"],
        detokenize=False,
    )
    before = SHARED["speculation_counts"](llm)
    prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in asked["prompts"]]
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    after = SHARED["speculation_counts"](llm)
    earlier = before["accepted_per_pos"] or [0] * len(after["accepted_per_pos"])
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafts": after["num_drafts"] - before["num_drafts"],
        "num_draft_tokens": after["num_draft_tokens"] - before["num_draft_tokens"],
        "accepted_per_pos": [b - a for a, b in zip(earlier, after["accepted_per_pos"], strict=True)],
    }


def main(argv: list[str]) -> int:
    """Answer until the input ends."""
    job = json.loads(Path(argv[0]).read_text())
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not stand between the replies
    for name, value in SHARED["ENVIRONMENT"].items():
        os.environ.setdefault(name, value)
    llm = load(job)
    import vllm

    print(json.dumps({"vllm_version": vllm.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
