"""The head's native checkpoint: one folder that vLLM, SGLang, the original EAGLE code, llama.cpp and eyas all load.

config.json carries the aux layers in both numberings (top level: vLLM's, equal to the neutral index; eagle_config:
SGLang's, one less) and the norm flags in both places. model.safetensors carries exactly the tensors the engines read;
d2t and t2d are there iff the vocabulary is reduced. eyas.json carries what the engines do not need: the neutral shape,
fingerprints, the template, measured numbers, where it came from. Strict both ways, and never half-written.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.draft_head import DraftHead
from eyas.models.embedding_scale import fold_scale
from eyas.models.errors import UserError
from eyas.models.head_checks import map_faults, require_sound
from eyas.models.head_config import HeadConfig
from eyas.models.head_files import HeadFiles, head_method, read_head_files, write_head_files
from eyas.models.head_json import head_config_json
from eyas.models.head_layout import ZERO_TENSORS, expected_shapes, neutral_fields
from eyas.models.heads import new_head


def head_config_from_json(fields: dict[str, Any], *, where: str) -> HeadConfig:
    """Return the HeadConfig of a config.json written by `head_config_json`; raises UserError naming what is missing."""
    try:
        method = head_method(fields, where=where)
        return HeadConfig(kind=method, **neutral_fields(method, fields))
    except KeyError as missing:
        raise UserError(f"{where} has no {missing}: not a head written by eyas, or an older layout.") from None


def head_files(head: DraftHead, *, metadata: dict[str, Any], dtype: torch.dtype) -> HeadFiles:
    """Return a head as native files in a dtype; raises UserError when they would not be sound."""
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in _scaled(head.state_dict(), head.config.embedding_scale).items()
    }
    fields = head_config_json(head.config, dtype=dtype)
    files = HeadFiles(fields, tensors, {"head": asdict(head.config), **metadata}, "the head")
    for name in ZERO_TENSORS[files.method]:
        tensors[name] = torch.zeros(expected_shapes(files.method, fields)[name], dtype=dtype)
    require_sound(files)
    return files


def save_head(
    head: DraftHead, folder: Path, *, metadata: dict[str, Any], dtype: torch.dtype, files: dict[str, str] | None = None
) -> None:
    """Write a native checkpoint to `folder`, replacing what is there; `files` are extra texts (launch lines, card)."""
    native = head_files(head, metadata=metadata, dtype=dtype)
    write_head_files(folder, native, check=lambda written: load_head(written, dtype=dtype), texts=files)


def load_head(folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> DraftHead:
    """Return the head of a native checkpoint; raises UserError naming every fault its files have."""
    return head_from_files(read_head_files(folder), dtype=dtype, device=device)


def head_from_files(files: HeadFiles, *, dtype: torch.dtype, device: str = "cpu") -> DraftHead:
    """Return the head that native files describe; raises UserError naming every fault they have."""
    require_sound(files)
    head = new_head(head_config_from_json(files.fields, where=f"{files.where}/config.json"))
    owned = {name: tensor for name, tensor in files.tensors.items() if name not in ZERO_TENSORS[files.method]}
    head.load_state_dict(_scaled(owned, 1 / head.config.embedding_scale))
    return head.to(device=device, dtype=dtype).eval()


def _scaled(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return a head's tensors with the embedding half of fc times a scale: files are for the target's bare table."""
    return tensors if scale == 1 else {**tensors, "fc.weight": fold_scale(tensors["fc.weight"].float(), scale)}


def check_map(head: DraftHead) -> None:
    """Raise UserError unless the head's vocabulary map is sorted, in range, filled, and d2t agrees with t2d."""
    if head.config.full_vocabulary:
        return
    for fault in map_faults(head.d2t.cpu(), head.t2d.cpu(), vocab_size=head.config.vocab_size):
        raise UserError(f"{fault}.")
