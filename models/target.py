"""The frozen target: any Hugging Face causal LM, its decoder layers found by structure (models/target_loading.py).

States are tapped with forward hooks, in the neutral index k = decoder layers already applied. Aux states are pre-norm
residual streams; the final state is the decoder's own output, post-norm, ready for the output head.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eyas.kernels.triton_support import available
from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.fused_norm import fuse_norms
from eyas.models.head_config import check_aux_layers
from eyas.models.kv_cache import FULL, SLIDING, KVCache, attention_kinds, head_shape
from eyas.models.packed_linear import pack_linears
from eyas.models.target_head import TargetHead
from eyas.models.target_loading import DeviceMap, find_decoder, load_model
from eyas.models.tree_attention import EYAS_TREE, TreeLayout, notice, over_trees, switch_to_trees, why_not

CHECKED_TOKENS = 64  # full logits of a long row would take gigabytes


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

    @cached_property
    def attention_kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer; raises UserError where the bundled runtime cannot serve one."""
        implementation = self.config._attn_implementation
        if implementation not in ("sdpa", "eager", EYAS_TREE):
            raise UserError(
                f"this model attends by {implementation!r}, which takes no mask of a draft tree's paths; load it with "
                "attn_implementation sdpa or eager."
            )
        return attention_kinds(self.config)

    @property
    def trees_by_kernel(self) -> bool:
        """Whether layers attend to trees by the kernel: it runs on the device, and says what these layers say."""
        if not available(self.device):
            return False
        if self._why_no_kernel is not None:
            notice(self.config.model_type, self._why_no_kernel)
        return self._why_no_kernel is None

    @cached_property
    def _why_no_kernel(self) -> str | None:
        reason = why_not(self.model, head_dim=head_shape(self.config)[1], dtype=self.dtype)
        if reason is None:
            switch_to_trees(self.model)
        return reason

    @property
    def position_limit(self) -> int:
        """Positions that one request may use.

        LongRoPE turns the whole forward by other frequencies as soon as one token lies past the original length: the
        keys that are already cached, and other requests' tokens, would not fit it any more.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        original = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
        return int(original or self.config.max_position_embeddings)

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
        attention: str = "auto",
    ) -> "Target":
        """Load a target from a bundled name, a model folder or a Hub id; see `load_model`."""
        model = load_model(
            name, dtype=dtype, device=device, device_map=device_map, quantization=quantization, attention=attention
        )
        return cls(model, aux_layers=aux_layers)

    def pack(self, *, rows: int) -> "Target":
        """Make the target fast, in place, for decoding about `rows` tokens per forward, and return self (a CPU matter).

        Weights are packed, norms are one operation each, and grouped keys are not copied for every query.
        """
        if self.device.type == "cpu":
            pack_linears(self.layers, rows=rows)
            fuse_norms(self.decoder)
            if self.config._attn_implementation == "sdpa" and self.model._can_set_attn_implementation():
                switch_to_trees(self.model)
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

    def new_cache(self, *, batch: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """Return an empty preallocated KV cache, in the target's dtype if none is given (`check_kv_dtype`)."""
        return KVCache(self.config, batch=batch, capacity=capacity, dtype=dtype or self.dtype, device=self.device)

    @torch.inference_mode()
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
        """Return aux and final states of the tokens.

        Without a mask attention is causal (right padding is then harmless); `mask_B1TL` is boolean, true where token
        t may see cache slot l, windows left aside. Layers with a sliding window narrow it by position; where the
        position in a slot is not the slot's number (tree nodes), give `key_positions_BL`. Announce cache slots with
        `cache.write_at` first.

        `tree` stands for both: the tokens are the nodes that it lays out, at the positions given. The kernel reads it
        as it is; elsewhere it is written out as a mask.
        """
        if position_ids_BT is None:
            position_ids_BT = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)[None]
        with contextlib.ExitStack() as entered:
            if tree is None:
                masks = self._masks(mask_B1TL, position_ids_BT, key_positions_BL, cache)
            elif self.trees_by_kernel:
                masks = self._unread_masks(input_ids_BT.device)
                entered.enter_context(over_trees(tree, self._windows))
            else:
                assert cache is not None
                key_positions_BL = tree.key_positions(position_ids_BT, cache.visible)
                masks = self._masks(tree.mask(cache.visible)[:, None], position_ids_BT, key_positions_BL, cache)
            taps = entered.enter_context(self._tapped())
            out = self.decoder(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                attention_mask=masks,
                use_cache=cache is not None,
                **{self._cache_name: cache},
            )
        final = out.last_hidden_state
        aux = torch.cat([taps[k].to(final.device) for k in self.aux_layers], -1) if self.aux_layers else final[..., :0]
        return TargetOutput(aux_hidden_BTF=aux, final_hidden_BTD=final)

    @property
    def _windows(self) -> tuple[int | None, ...]:
        return tuple(self.config.sliding_window if kind == SLIDING else None for kind in self.attention_kinds)

    def _unread_masks(self, device: torch.device) -> Tensor | dict[str, Tensor]:
        """Return a mask of one element in the form the decoder takes: given one, the library makes none of its own."""
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        kinds = set(self.attention_kinds)
        return dict.fromkeys(kinds, mask) if len(kinds) == 2 else mask

    def _masks(
        self,
        mask_B1TL: Tensor | None,
        positions_BT: Tensor,
        key_positions_BL: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor | dict[str, Tensor] | None:
        """Return the mask in the form the decoder takes: one, or one per kind of layer where it has both."""
        kinds = set(self.attention_kinds) if cache is not None or mask_B1TL is not None else set()
        eager = self.config._attn_implementation == "eager"
        if mask_B1TL is None:
            if cache is None or (kinds == {FULL} and not eager):
                return None  # causal, as the library does it best
            mask_B1TL = torch.arange(cache.visible, device=positions_BT.device) <= positions_BT[:, None, :, None]
        masks = {FULL: mask_B1TL}
        if SLIDING in kinds:
            if key_positions_BL is None:
                key_positions_BL = torch.arange(mask_B1TL.shape[-1], device=mask_B1TL.device)[None]
            distance_B1TL = positions_BT[:, None, :, None] - key_positions_BL[:, None, None, :]
            masks[SLIDING] = mask_B1TL & (distance_B1TL < self.config.sliding_window)
        if eager or self.device.type == "cpu":  # adds its mask to the scores: done once, not in every layer
            lowest = torch.finfo(self.dtype).min
            masks = {
                kind: torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, lowest)
                for kind, mask in masks.items()
            }
        return masks if len(kinds) == 2 else masks[kinds.pop()]

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
        """Return the largest difference between rebuilt logits and the model's own on one row's first tokens.

        Raises UserError when it exceeds `tolerance` (default 1e-4 of the logit range in fp32, 2e-2 in half precision):
        the target's head does something `TargetHead` does not reproduce.
        """
        input_ids_T = input_ids_T[:CHECKED_TOKENS]
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
