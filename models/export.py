"""Exports: one head in the files of one engine. `EXPORTS` says how each differs from the native layout.

A head is judged before anything is written: its own files by `head_checks`, the engine by `engines`. Whatever an engine
would refuse or silently misread is refused here, with the reason and the alternative. What was written is imported
again before it gets its name: it must lead back to the same head, byte for byte. Every export carries eyas.json, which
engines ignore.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.embedding_scale import check_embedding_scale
from eyas.models.engines import judge
from eyas.models.errors import UserError, nearest
from eyas.models.head_checks import require_sound
from eyas.models.head_files import HeadFiles, read_head_files, write_head_files
from eyas.models.head_layout import EMBEDDINGS, FLAGS, SCALE_FIELD
from eyas.models.import_head import Answers, import_head
from eyas.models.launch import Serving, serving_readme
from eyas.models.target_facts import TargetFacts
from eyas.models.target_parts import input_embedding, input_embeddings

Fields = dict[str, Any]


@dataclass(frozen=True)
class Export:
    """How one engine's files differ from the native ones.

    `rename` maps prefixes of tensor names, `leave_out` names tensors and top-level config keys that the engine must not
    find, `config` rewrites what is left of config.json.
    """

    method: str
    engine: str
    rename: tuple[tuple[str, str], ...] = ()
    leave_out: tuple[str, ...] = ()
    config: Callable[[Fields, Serving], Fields] = lambda fields, _serving: fields


def export_head(
    source: Path, format_name: str, out: Path, *, serving: Serving, embeddings_of: str | None = None
) -> HeadFiles:
    """Write a native head's folder in an engine's format to `out` and return what was written.

    The embeddings of the target `embeddings_of` go with it: an engine on several pipeline stages reads the head's own,
    and keeps random ones where there are none.

    Raises UserError naming every fault of the head, or why the engine cannot serve it and what to do instead.
    """
    files = read_head_files(source)
    require_sound(files)
    exported = export_files(files, format_name, serving=serving)
    target = None
    if embeddings_of is not None:
        target = TargetFacts.of(embeddings_of)
        exported.tensors[EMBEDDINGS] = _embeddings(files, embeddings_of)

    def check(folder: Path) -> None:
        again = import_head(folder, target=target, answers=Answers()).files
        assert again.fields == files.fields, f"{format_name} lost {_difference(again.fields, files.fields)}"
        assert same_tensors(again.tensors, files.tensors), f"{format_name} changed the tensors"

    readme = serving_readme(EXPORTS[format_name].engine, files.method, serving)
    write_head_files(out, exported, check=check, texts={"README.md": readme})
    return exported


def export_files(files: HeadFiles, format_name: str, *, serving: Serving) -> HeadFiles:
    """Return a native head's files as an engine reads them; raises UserError where that engine would misread them."""
    if format_name not in EXPORTS:
        hint = nearest(format_name, EXPORTS)
        raise UserError(f"unknown export format {format_name!r}; the formats are {', '.join(EXPORTS)}.{hint}")
    export = EXPORTS[format_name]
    if export.method != files.method:
        usable = ", ".join(name for name, other in EXPORTS.items() if other.method == files.method)
        raise UserError(
            f"{files.where} is an {files.method} head and {format_name} is a format of {export.method} heads; "
            f"use {usable}."
        )
    verdict = judge(export.engine, files.fields)
    if not verdict.serves:
        raise UserError(f"{verdict.engine} cannot serve {files.where}: {' | '.join(verdict.reasons)}.")
    tensors = {
        _renamed(name, export.rename): tensor for name, tensor in files.tensors.items() if name not in export.leave_out
    }
    fields = {name: value for name, value in files.fields.items() if name not in export.leave_out}
    card = {**files.card, "format": format_name}
    return replace(files, fields=export.config(fields, serving), tensors=tensors, card=card)


def _embeddings(files: HeadFiles, target: str) -> Tensor:
    """Return a target's embeddings in the head's dtype, for EAGLE-1 the bare table that its files are for.

    Raises UserError when the head cannot read them.
    """
    dtype = files.tensors["fc.weight"].dtype
    if files.method == "eagle1":
        embedding = input_embedding(target, dtype=dtype)
        check_embedding_scale(embedding, files.fields.get(SCALE_FIELD, 1.0))
        embeddings_VD: Tensor = embedding.weight.detach()
    else:
        embeddings_VD = input_embeddings(target, dtype=dtype)
    expected = (files.fields["vocab_size"], files.fields["hidden_size"])
    if tuple(embeddings_VD.shape) != expected:
        raise UserError(
            f"the embeddings of {target!r} are {tuple(embeddings_VD.shape)}, {files.where} reads {expected}; name the "
            "target it was trained for with --target."
        )
    return embeddings_VD


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether two sets of tensors are equal in name, dtype, shape and every byte."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name in a
    )


def _renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _difference(a: Fields, b: Fields) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


def _two_key_rope(fields: Fields, _serving: Serving) -> Fields:
    """The original code reads rope_scaling as {type, factor}."""
    scaling = fields.get("rope_scaling")
    if scaling is None:
        return fields
    return {**fields, "rope_scaling": {"type": scaling["rope_type"], "factor": scaling["factor"]}}


def _speculators(fields: Fields, serving: Serving) -> Fields:
    """The speculators format: the layer's config nested, the head's own fields beside it, and how to verify."""
    head = {
        name: fields[name]
        for name in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *FLAGS)
    }
    own = {*head, "architectures", "eagle_config", "num_aux_hidden_states"}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": serving.depth}],
            "verifier": {"name_or_path": serving.target, "architectures": ["LlamaForCausalLM"]},
        },
        **head,
        "tie_word_embeddings": False,
        "transformer_layer_config": {name: value for name, value in fields.items() if name not in own},
    }


EXPORTS = {
    "vllm": Export("eagle3", "vllm"),
    "sglang": Export("eagle3", "sglang"),
    # With target_hidden_size in the config the original code skips loading the target's embeddings, without a word.
    "eagle": Export("eagle3", "eagle", leave_out=("target_hidden_size",), config=_two_key_rope),
    "speculators": Export("eagle3", "vllm", rename=(("midlayer.", "layers.0."),), config=_speculators),
    "eagle1-vllm": Export("eagle1", "vllm"),
    "eagle1-sglang": Export("eagle1", "sglang"),
    # Its fc has no bias when the config says so, and loading is strict.
    "eagle1-eagle": Export("eagle1", "eagle", leave_out=("fc.bias",), config=_two_key_rope),
}
