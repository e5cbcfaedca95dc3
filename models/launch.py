"""The exact commands that serve an exported head."""

import json
import shlex


def launch_lines(target: str, head: str, *, depth: int, top_k: int, num_draft_tokens: int) -> str:
    """Return a README for the export folder: how vLLM (a chain of `depth`) and SGLang (a tree) serve the head."""
    speculative = {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": depth,
        "draft_tensor_parallel_size": 1,
    }
    return f"""# Serving this draft head

vLLM (chain):

```
vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}
```

SGLang (tree):

```
python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path {shlex.quote(head)} --speculative-num-steps {depth} \\
  --speculative-eagle-topk {top_k} --speculative-num-draft-tokens {num_draft_tokens + 1}
```

The algorithm and method names matter: with `EAGLE` instead of `EAGLE3`, or without `"method"`, the engines answer with
an acceptance length of 1.0 and no error."""
