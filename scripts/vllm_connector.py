"""The KV connector that hands a prompt's hidden states out of vLLM, on CPUs and GPUs.

vLLM's `extract_hidden_states` method keeps the states it was asked for in a KV cache of its own, one slot per token.
When a request has finished, its blocks are copied to the CPU in the order of its tokens and written as one safetensors
file under the path that the request carries (`kv_transfer_params={"eyas_path": ...}`; one without a path is left
alone), under a temporary name first. The copy waits for the device: simple, and right on every device.

Stand-alone on purpose, like `vllm_extract.py` beside it: vLLM imports it by name in its own environment. The class is
made when it is asked for, because importing this file elsewhere must not need vLLM.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PATH = "eyas_path"


def states_of_blocks(cache_BASD: Tensor, blocks_N: list[int], tokens: int) -> Tensor:
    """Return the first `tokens` states [tokens, A, D] of a request from the blocks it owns, in their order.

    The cache holds S slots per block, [blocks, A, S, D].
    """
    chosen = cache_BASD[torch.tensor(blocks_N, dtype=torch.long, device=cache_BASD.device)]
    states_TAD = chosen.transpose(1, 2).flatten(0, 1)[:tokens]
    if len(states_TAD) != tokens:
        raise RuntimeError(f"{len(states_TAD)} states for {tokens} tokens: blocks were freed too early")
    return states_TAD.to("cpu").contiguous()


def write_states(path: str, states_TAD: Tensor, token_ids: list[int]) -> None:
    """Write one request's states under their final name when they are whole."""
    unfinished = Path(path).with_suffix(".tmp")
    save_file({"states": states_TAD, "token_ids": torch.tensor(token_ids)}, unfinished)
    unfinished.replace(path)


@cache
def _connector_class() -> type:
    from dataclasses import dataclass, field

    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    @dataclass
    class Finished:
        """A request whose states are to be written."""

        request_id: str
        path: str
        token_ids: list[int]
        blocks: list[int]

    @dataclass
    class Metadata(KVConnectorMetadata):
        finished: list[Finished] = field(default_factory=list)

    class HiddenStates(KVConnectorBase_V1, SupportsHMA):
        """Writes the hidden states of finished requests; loads nothing."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
            groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
            of_states = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
            if len(groups) == 1:
                of_states = [0]  # all layers of one target share their blocks, the states' among them
            if len(of_states) != 1:
                raise ValueError(f"expected one cache group of hidden states, found {len(of_states)} of {len(groups)}")
            self.group = of_states[0]
            self.finished: list[Finished] = []
            self.written: set[str] = set()
            self.cache: Tensor | None = None

        # In the scheduler.

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            return 0, False

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            assert num_external_tokens == 0

        def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
            finished, self.finished = self.finished, []
            return Metadata(finished)

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
            path = (request.kv_transfer_params or {}).get(PATH)
            if path is None or not block_ids:
                return False, None
            self.finished.append(Finished(request.request_id, path, list(request.prompt_token_ids), list(block_ids)))
            return True, None

        def request_finished_all_groups(
            self, request: Any, block_ids: tuple[list[int], ...]
        ) -> tuple[bool, dict[str, Any] | None]:
            blocks = block_ids[self.group] if self.group < len(block_ids) else []
            return self.request_finished(request, blocks)

        # In the worker.

        def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
            layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
            (name,) = layers
            self.cache = kv_caches[name]

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            pass

        def wait_for_layer_load(self, layer_name: str) -> None:
            pass

        def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
            pass

        def wait_for_save(self) -> None:
            pass

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            if self.has_connector_metadata():
                metadata = self._get_connector_metadata()
                assert isinstance(metadata, Metadata)
                for request in metadata.finished:
                    self._write(request)
            written, self.written = self.written, set()
            return written or None, None

        def _write(self, request: Finished) -> None:
            assert self.cache is not None
            if get_tensor_model_parallel_rank() == 0:
                states = states_of_blocks(self.cache, request.blocks, len(request.token_ids))
                write_states(request.path, states, request.token_ids)
                self.written.add(request.request_id)

        def get_finished_count(self) -> int | None:
            """One rank alone writes, so one notice per request is all there will be."""
            return 1

        @classmethod
        def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
            """Ask for the layout in which the states of one token lie together, [blocks, A, S, D]."""
            return "LBNHC"

    return HiddenStates


def __getattr__(name: str) -> type:
    """Return the connector class, which vLLM looks up by its name."""
    if name == "HiddenStates":
        return _connector_class()
    raise AttributeError(name)
