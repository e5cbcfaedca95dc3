"""A target whose features vLLM computes, in an environment of its own: for targets that need an engine.

The engine runs as a subprocess of that environment's interpreter (scripts/vllm_extract.py) and hands out states in
files. It knows nothing of batches with padding: every row of a batch is a request of its own, padding and all, which
causal attention does not mind. The last layer's state comes before the final norm, which is applied here.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.head_config import check_aux_layers
from eyas.models.kv_cache import KVCache
from eyas.models.target import CHECKED_TOKENS, Target, TargetOutput
from eyas.models.target_tail import TargetTail
from eyas.models.tree_attention import TreeLayout

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "vllm_extract.py"
MOST_SEQUENCES = 64


class VllmTarget(Target):
    """A target for extraction alone: `forward` of whole rows, `self_check`, `head`; it cannot decode."""

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        aux_layers: tuple[int, ...],
        python: str,
        max_length: int,
        tensor_parallel: int = 1,
        quantization: str | None = None,
    ) -> None:
        """Start the engine; raises UserError when it does not come up."""
        self.tail = TargetTail(name, dtype=dtype)
        self.config = self.tail.config
        check_aux_layers(aux_layers, num_layers=self.config.num_hidden_layers)
        self.aux_layers = aux_layers
        self.head = self.tail.head
        self.folder = Path(tempfile.mkdtemp(prefix="eyas-vllm-"))
        job: dict[str, Any] = {
            "target": resolve_model(name),
            "layers": sorted({*aux_layers, self.config.num_hidden_layers}),
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_length,
            "max_num_seqs": MOST_SEQUENCES,
            "tensor_parallel_size": tensor_parallel,
            "quantization": quantization,
        }
        self.layers_asked: list[int] = job["layers"]
        self.log = (self.folder / "vllm.log").open("w+", encoding="utf-8")
        try:
            self.process = subprocess.Popen(
                [python, "-I", str(PROGRAM), json.dumps(job)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            )  # fmt: skip
        except OSError as error:
            self._remove()
            raise UserError(
                f"cannot start vLLM with extract.vllm_python {python!r}: {error}; name the interpreter of an "
                "environment with vLLM."
            ) from error
        self.version = str(self._answer()["ready"])

    def close(self) -> None:
        """Stop the engine and delete what it wrote."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._remove()

    def _remove(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight_VD.dtype

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        position_ids_BT: Tensor | None = None,
        mask_B1TL: Tensor | None = None,
        key_positions_BL: Tensor | None = None,
        tree: TreeLayout | None = None,
        cache: KVCache | None = None,
    ) -> TargetOutput:
        """Return aux and final states of whole rows, each from its first token on."""
        assert position_ids_BT is None
        assert mask_B1TL is None
        assert key_positions_BL is None
        assert tree is None
        assert cache is None
        rows = input_ids_BT.tolist()
        paths = [self.folder / f"row-{b}.safetensors" for b in range(len(rows))]
        self._ask({"rows": rows, "paths": [str(path) for path in paths]})
        states_BTAD = torch.stack([self._read(path, row) for path, row in zip(paths, rows, strict=True)])
        by_layer = dict(zip(self.layers_asked, states_BTAD.unbind(2), strict=True))
        final_BTD = self.tail.final_state(by_layer[self.config.num_hidden_layers])
        return TargetOutput(torch.cat([by_layer[k] for k in self.aux_layers], dim=-1), final_BTD)

    def _read(self, path: Path, row: list[int]) -> Tensor:
        """Return one row's states [T, layers, D]; raises UserError when they belong to other tokens."""
        found = load_file(path)
        path.unlink()
        states, ids = found["states"], found["token_ids"].tolist()
        expected = (len(row), len(self.layers_asked), self.config.hidden_size)
        if ids != row or tuple(states.shape) != expected:
            raise UserError(
                f"vLLM {self.version} handed out states of shape {tuple(states.shape)} for a row of {len(row)} tokens "
                f"(expected {expected}), or those of another row; its features cannot be trusted."
            )
        return states.to(self.dtype)

    def self_check(self, input_ids_T: Tensor, *, tolerance: float | None = None) -> float:
        """Return the largest difference between the engine's own log probabilities and those rebuilt from its states.

        Raises UserError when it exceeds `tolerance` (default 1e-3 in fp32, 0.2 in half precision, in nats).
        """
        ids_T = input_ids_T[:CHECKED_TOKENS]
        final_TD = self.forward(ids_T[None]).final_hidden_BTD[0]
        rebuilt_TV = self.head.logits(final_TD).float().log_softmax(-1)
        top = self._ask({"logprobs": ids_T.tolist()})["top"]
        difference = max(
            (abs(float(rebuilt_TV[position, token]) - logprob) for position, (token, logprob) in enumerate(top)),
            default=0.0,
        )
        limit = tolerance or (1e-3 if self.dtype == torch.float32 else 0.2)
        if not difference <= limit:
            raise UserError(
                f"log probabilities rebuilt from vLLM's states differ from its own by {difference:.2e} nats (allowed "
                f"{limit:.0e}): final norm or head of this {self.config.model_type} target are not applied right."
            )
        return difference

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return the engine's next answer; raises UserError with the end of its log when it has none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer = dict(json.loads(line))
            if "error" not in answer:
                return answer
            raise UserError(f"vLLM {getattr(self, 'version', '')} failed: {answer['error']}")
        self.process.wait()
        self.log.seek(0)
        said = self.log.read().strip().splitlines()[-5:]
        self._remove()
        raise UserError(f"vLLM ended with exit code {self.process.returncode}: {' | '.join(said) or 'it said nothing'}")
