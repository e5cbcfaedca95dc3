"""The frozen target: any Hugging Face causal LM, its decoder layers found by structure (models/target_loading.py).

States are tapped with forward hooks, in the neutral index k = decoder layers already applied. Aux states are pre-norm
residual streams; the final state is the decoder's own output, post-norm, ready for the output head.
"""

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.head_config import check_aux_layers
from eyas.models.kv_cache import KVCache
from eyas.models.packed_linear import pack_linears
from eyas.models.target_head import TargetHead
from eyas.models.target_loading import DeviceMap, find_decoder, load_model


@dataclass(frozen=True)
class TargetOutput:
    """Aux states aux_hidden_BTF (pre-norm, concatenated in ascending layer order) and final_hidden_BTD (post-norm)."""

    aux_hidden_BTF: Tensor
    final_hidden_BTD: Tensor


class Target:
    """A frozen causal LM with aux taps. `aux_layers` may be empty for plain decoding."""

    def __init__(self, model: PreTrainedModel, *, aux_layers: tuple[int, ...] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        if aux_layers:
            check_aux_layers(aux_layers, num_layers=self.config.num_hidden_layers)
        self.aux_layers = aux_layers
        self.decoder, self.layers = find_decoder(model)
        self.head = TargetHead.of(model)
        self.embedding: Any = model.get_input_embeddings()
        takes = inspect.signature(self.decoder.forward).parameters
        if "position_ids" not in takes:
            raise UserError(
                f"the decoder of a {self.config.model_type} model takes no position_ids, so the nodes of a draft tree "
                "cannot be placed; eyas serves targets with rotary or learned positions."
            )
        self._cache_name = "cache" if "cache" in takes else "past_key_values"

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: torch.dtype,
        aux_layers: tuple[int, ...] = (),
        device: str = "cpu",
        device_map: DeviceMap = None,
        quantization: str = "none",
        attention: str = "sdpa",
    ) -> "Target":
        """Load a target from a bundled name, a model folder or a Hub id; see `load_model`."""
        model = load_model(
            name, dtype=dtype, device=device, device_map=device_map, quantization=quantization, attention=attention
        )
        return cls(model, aux_layers=aux_layers)

    def pack(self, *, rows: int) -> "Target":
        """Pack all weights in place for decoding about `rows` tokens per forward (a CPU matter), and return self."""
        pack_linears(self.layers, rows=rows)
        self.head = self.head.pack(rows=rows)
        return self

    @property
    def device(self) -> torch.device:
        """Where its input goes; with a device map its layers may be elsewhere."""
        device: torch.device = self.embedding.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight_VD.dtype

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def new_cache(self, *, batch: int, capacity: int) -> KVCache:
        """Return an empty preallocated KV cache in the target's dtype."""
        return KVCache(self.config, batch=batch, capacity=capacity, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        position_ids_BT: Tensor | None = None,
        mask_B1TL: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> TargetOutput:
        """Return aux and final states of the tokens.

        Without a mask attention is causal (right padding is then harmless); `mask_B1TL` is boolean, true where token
        t may see cache slot l. Announce cache slots with `cache.write_at` first.
        """
        if position_ids_BT is None:
            position_ids_BT = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)[None]
        with self._tapped() as taps:
            out = self.decoder(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                attention_mask=mask_B1TL,
                use_cache=cache is not None,
                **{self._cache_name: cache},
            )
        final = out.last_hidden_state
        aux = torch.cat([taps[k].to(final.device) for k in self.aux_layers], -1) if self.aux_layers else final[..., :0]
        return TargetOutput(aux_hidden_BTF=aux, final_hidden_BTD=final)

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, Tensor]]:
        """Collect the residual stream at each aux layer for the duration of one forward."""
        taps: dict[int, Tensor] = {}
        handles = []
        for k in self.aux_layers:
            if k == 0:
                handles.append(self.layers[0].register_forward_pre_hook(_tap_input(taps), with_kwargs=True))
            else:
                handles.append(self.layers[k - 1].register_forward_hook(_tap_output(taps, k)))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def self_check(self, input_ids_T: Tensor, *, tolerance: float | None = None) -> float:
        """Return the largest difference between rebuilt logits and the model's own on one row.

        Raises UserError when it exceeds `tolerance` (default 1e-4 of the logit range in fp32, 2e-2 in half precision):
        the target's head does something `TargetHead` does not reproduce.
        """
        final = self.forward(input_ids_T[None].to(self.device)).final_hidden_BTD
        rebuilt = self.head.logits(final).float()
        truth = self.model(input_ids=input_ids_T[None].to(self.device), use_cache=False).logits.float()
        difference = float((rebuilt - truth).abs().max() / truth.abs().max().clamp(min=1.0))
        limit = tolerance or (1e-4 if self.dtype == torch.float32 else 2e-2)
        if not difference <= limit:
            raise UserError(
                f"teacher logits rebuilt from the final state differ from the model's own by {difference:.2e} of their "
                f"range (allowed {limit:.0e}); the {self.config.model_type} family scales its logits in a way that "
                "models/target_head.py does not know."
            )
        return difference


def _tap_output(taps: dict[int, Tensor], k: int) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        taps[k] = output[0] if isinstance(output, tuple) else output

    return hook


def _tap_input(taps: dict[int, Tensor]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taps[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target; raises UserError when it has no chat template."""
    folder = resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of {name!r}: {error}") from error
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {name!r} has no chat template; eyas trains heads for chat models.")
    return tokenizer


def model_fingerprint(name: str) -> str:
    """Return a short hash of a target's config, tokenizer and weights (size and sampled blocks of each weight file).

    A Hub id that is not a local folder is hashed by its name and the revision that would be loaded.
    """
    folder = Path(resolve_model(name))
    if not folder.is_dir():
        revision = getattr(AutoConfig.from_pretrained(name), "_commit_hash", None)
        return hashlib.sha256(f"{name}@{revision}".encode()).hexdigest()[:16]
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".jinja", ".model"}:
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix in {".safetensors", ".bin"}:
            digest.update(f"{path.name}:{path.stat().st_size}".encode())
            _hash_blocks(path, digest)
    return digest.hexdigest()[:16]


def _hash_blocks(path: Path, digest: "hashlib._Hash", *, blocks: int = 32, size: int = 1 << 16) -> None:
    """Add evenly spaced blocks of a file, its beginning and its end among them: enough to tell fine-tunes apart."""
    last = max(0, path.stat().st_size - size)
    with path.open("rb") as file:
        for offset in sorted({last * number // (blocks - 1) for number in range(blocks)}):
            file.seek(offset)
            digest.update(file.read(size))
