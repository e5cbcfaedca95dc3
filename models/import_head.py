"""Import: a published head as a native checkpoint, with nothing guessed silently.

Whatever the files say twice must agree; whatever they leave open is asked for (`Answers`), all questions at once; and
whatever was decided on the way is a note. An export of eyas' own answers every question by its eyas.json.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.embedding_scale import embedding_scale, fold_scale
from eyas.models.errors import UserError
from eyas.models.head_checks import require_sound
from eyas.models.head_files import CARD, HeadFiles, read_head_files
from eyas.models.head_json import native_json
from eyas.models.head_layout import EMBEDDINGS, FLAGS, PLAIN_FIELDS, SCALE_FIELD, TOKEN_FIELDS, ZERO_TENSORS
from eyas.models.import_layers import resolve_layers
from eyas.models.raw_head import RawHead, read_raw_head
from eyas.models.target_facts import TargetFacts
from eyas.models.target_parts import input_embedding, input_embeddings

RELAID = ("eagle", "speculators", "eagle1-eagle")  # exports of eyas that are not in the native layout


@dataclass(frozen=True)
class Answers:
    """What the user says where a head's files are silent: aux layers (neutral index), norm flags, meaning of d2t."""

    aux_layers: tuple[int, ...] | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    map_kind: str | None = None


@dataclass(frozen=True)
class Imported:
    """A native head and the notes of its import."""

    files: HeadFiles
    notes: tuple[str, ...]


@dataclass
class _Inquiry:
    """What was decided and what must be asked, gathered so that the user hears all of it at once."""

    notes: list[str]
    questions: list[str] = field(default_factory=list)


def import_head(folder: Path, *, target: TargetFacts | None, answers: Answers) -> Imported:
    """Return a published head as native files.

    `target` may be None for exports of eyas' own. Raises UserError with every open question, or naming what makes the
    head unusable (unknown tensors, biases, embeddings that are not the target's, a malformed map).
    """
    raw = read_raw_head(folder)
    inquiry = _Inquiry(list(raw.notes))
    tensors = dict(raw.tensors)
    facts = _facts(raw, target)
    _settle_config(raw, inquiry)
    _settle_embeddings(raw, tensors, target, inquiry)
    _settle_bias(raw, tensors, inquiry)
    neutral = _neutral(raw, tensors, facts, inquiry) | {"embedding_scale": _embedding_scale(raw, target)}
    if raw.method == "eagle3":
        neutral |= _settle_flags(raw, tensors, answers, inquiry)
        neutral["aux_layers"] = resolve_layers(raw, facts, answers.aux_layers, inquiry.notes, inquiry.questions)
        _settle_map(raw, tensors, neutral, answers, inquiry)
        _settle_lm_head(raw, tensors, neutral, target, inquiry)
    if inquiry.questions:
        raise UserError(f"{folder}: {' | '.join(inquiry.questions)}")
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = max(dtypes, key=lambda kind: kind.itemsize)
    if len(dtypes) > 1:
        inquiry.notes.append(f"its tensors had {len(dtypes)} dtypes; all are {_name(dtype)} now")
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    fields = native_json(raw.method, neutral, dtype=_name(dtype))
    card = {name: value for name, value in raw.card.items() if name != "format"} or {
        "head": neutral, "method": raw.method, "imported": {"from": str(folder), "notes": inquiry.notes},
    }  # fmt: skip
    files = HeadFiles(fields, {name: tensor.contiguous() for name, tensor in tensors.items()}, card, str(folder))
    require_sound(files)
    return Imported(files, tuple(inquiry.notes))


def read_any_head(folder: Path, *, target: TargetFacts, answers: Answers) -> Imported:
    """Return a head of any known layout as sound native files: as it lies there if eyas wrote it so, else imported.

    Raises UserError naming every fault of a native head, or every open question of a foreign one.
    """
    if (folder / CARD).is_file():
        files = read_head_files(folder)
        if files.card.get("format") not in RELAID:
            require_sound(files)
            return Imported(files, ())
    return import_head(folder, target=target, answers=answers)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _facts(raw: RawHead, target: TargetFacts | None) -> dict[str, Any]:
    """Return what the head must have in common with its target, from the target or, failing that, from eyas.json."""
    if target is not None:
        return target.shared
    recorded = raw.card.get("head", {})
    names = ("target_hidden_size", "target_num_layers", "vocab_size")
    if not all(name in recorded for name in names):
        raise UserError(f"{raw.where} has no eyas.json to say what it was trained for; name its target with --target.")
    return {name: recorded[name] for name in names}


def _settle_config(raw: RawHead, inquiry: _Inquiry) -> None:
    """Say which fields are not taken over."""
    for name in ("bias", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        if raw.fields.get(name):
            inquiry.notes.append(f"{name} was true, though no such tensor is there; it is false now")
    if "quantization_config" in raw.fields:
        inquiry.notes.append("quantization_config was left out: the head's own weights are not quantised")


def _settle_embeddings(raw: RawHead, tensors: dict[str, Tensor], target: TargetFacts | None, inquiry: _Inquiry) -> None:
    own = tensors.pop(EMBEDDINGS, None)
    if own is None:
        return
    if target is None:
        inquiry.questions.append("it carries embeddings; name the target with --target to compare them with its own")
        return
    theirs = target.embedding()
    bare = _alike(own, theirs)
    if not (bare or _alike(own, input_embeddings(target.name, dtype=own.dtype))):
        raise UserError(
            f"{raw.where} carries embeddings of its own {tuple(own.shape)} that differ from the target's "
            f"{tuple(theirs.shape)}: it was trained for another target, or trained them, which eyas heads do not."
        )
    inquiry.notes.append("its embeddings equal the target's and were left out")
    if raw.method == "eagle1" and not bare:
        scale = embedding_scale(input_embedding(target.name, dtype=torch.float32))
        tensors["fc.weight"] = fold_scale(tensors["fc.weight"], scale)
        inquiry.notes.append(f"they were {scale:g} times the target's table, which is multiplied into fc now")


def _embedding_scale(raw: RawHead, target: TargetFacts | None) -> float:
    """Return what the module that feeds an EAGLE-1 head multiplies its table by: as written, else as the target does.

    Engines lend every EAGLE-1 head the bare table, so its files are for the bare table, ours and others' alike.
    """
    written = raw.fields.get(SCALE_FIELD)
    if raw.method != "eagle1" or written is not None or target is None:
        return float(written or 1.0)
    return embedding_scale(input_embedding(target.name, dtype=torch.float32))


def _alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in the coarser of their dtypes."""
    coarse = min((a.dtype, b.dtype), key=lambda kind: kind.itemsize)
    return a.shape == b.shape and torch.equal(a.to(coarse), b.to(coarse))


def _settle_bias(raw: RawHead, tensors: dict[str, Tensor], inquiry: _Inquiry) -> None:
    for name in [name for name in tensors if name.endswith(".bias")]:
        if bool(tensors[name].any()):
            raise UserError(
                f"{raw.where}: {name} is not zero, and engines disagree on biases of draft heads (vLLM drops "
                "fc.bias, SGLang adds it); such a head cannot be served everywhere and is not imported."
            )
        if name not in ZERO_TENSORS[raw.method]:
            del tensors[name]
            inquiry.notes.append(f"{name} is all zeros and was left out")
    for name in ZERO_TENSORS[raw.method]:
        if name not in tensors:
            weight = tensors["fc.weight"]
            tensors[name] = torch.zeros(weight.shape[0], dtype=weight.dtype)
            inquiry.notes.append(f"{name} of zeros was added, because SGLang would keep random values without it")


def _neutral(raw: RawHead, tensors: dict[str, Tensor], facts: dict[str, Any], inquiry: _Inquiry) -> dict[str, Any]:
    """Return the plain fields of HeadConfig; sizes that a config leaves out are read off the tensors."""
    prefix = "midlayer." if raw.method == "eagle3" else "layers.0."
    fields = dict(raw.fields)
    hidden = int(tensors["fc.weight"].shape[0])
    heads = fields.get("num_attention_heads")
    q = tensors.get(f"{prefix}self_attn.q_proj.weight")
    sizes = {
        "hidden_size": hidden,
        "target_hidden_size": facts["target_hidden_size"] if raw.method == "eagle3" else hidden,
        "vocab_size": facts["vocab_size"],
        "num_key_value_heads": heads,
        "draft_vocab_size": _draft_size(raw, tensors, facts),
        "head_dim": q.shape[0] // heads if q is not None and heads else None,
        "hidden_act": "silu",
    }
    neutral: dict[str, Any] = {}
    for name in PLAIN_FIELDS:
        given = fields.get(name)
        neutral[name] = sizes.get(name) if given is None else given
        if given is None and name not in ("target_hidden_size", "draft_vocab_size", "vocab_size", "hidden_size"):
            inquiry.notes.append(f"{name} was not written; {neutral[name]} follows from the rest")
        if neutral[name] is None:
            inquiry.questions.append(f"its config has no {name!r}; write it into config.json")
        elif name in ("target_hidden_size", "vocab_size", "hidden_size") and neutral[name] != sizes[name]:
            raise UserError(
                f"{raw.where}: {name} is {neutral[name]}, its tensors and target say {sizes[name]}; is this its target?"
            )
    neutral |= {name: fields.get(name) for name in TOKEN_FIELDS} | dict.fromkeys(FLAGS, False)
    eos = neutral["eos_token_id"]
    neutral["eos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
    return neutral | {
        "aux_layers": (), "target_num_layers": facts["target_num_layers"], "rope_parameters": _rope(fields, inquiry),
        "num_layers": fields.get("num_hidden_layers", 1),
    }  # fmt: skip


def _draft_size(raw: RawHead, tensors: dict[str, Tensor], facts: dict[str, Any]) -> int:
    if raw.method == "eagle1":
        return int(facts["vocab_size"])
    return int(next((len(tensors[name]) for name in ("lm_head.weight", "d2t") if name in tensors), facts["vocab_size"]))


def _rope(fields: dict[str, Any], inquiry: _Inquiry) -> dict[str, Any]:
    """Return RoPE parameters from any of the three ways that configs write them."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = {name: value for name, value in scaling.items() if name not in ("type", "rope_theta")}
    rope.setdefault("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        theta = 10000.0
        inquiry.notes.append("rope_theta was not written; every engine then reads 10000, and so does this import")
    return {"rope_theta": theta, **rope}


def _settle_flags(raw: RawHead, tensors: dict[str, Tensor], answers: Answers, inquiry: _Inquiry) -> dict[str, bool]:
    """Return the norm flags: said in one place, in two that agree, or by the user; never both unsaid and needed."""
    nested = raw.fields.get("eagle_config") or {}
    of_tensors = {"norm_before_fc": "input_norm.weight" in tensors, "fc_norm": "fc_norm.0.weight" in tensors}
    flags = {}
    for name in FLAGS:
        said = {bool(place[name]) for place in (raw.fields, nested, answers.flags) if place.get(name) is not None}
        if len(said) == 2:
            inquiry.questions.append(f"{name} is said to be both true and false; its files and --flag must agree")
        elif not said and name == "norm_before_residual" and raw.layout == "speculators":
            inquiry.questions.append(
                f"{name} is not written, and programs that read this layout disagree on what that means; say --flag "
                f"{name}=true or --flag {name}=false"
            )
        elif not said and name not in of_tensors:
            inquiry.notes.append(f"{name} was not written; every engine then reads false, and so does this import")
        flags[name] = said.pop() if len(said) == 1 else of_tensors.get(name, False)
        if flags[name] != of_tensors.get(name, flags[name]):
            inquiry.questions.append(f"{name} is {flags[name]}, but its tensors say otherwise; which head is this?")
    return flags


def _settle_map(
    raw: RawHead, tensors: dict[str, Tensor], neutral: dict[str, Any], answers: Answers, inquiry: _Inquiry
) -> None:
    """Bring the vocabulary map into the native form: int64 offsets and their mask, or none for a whole vocabulary."""
    V, U = neutral["vocab_size"], neutral["draft_vocab_size"]
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if U >= V:
        if d2t is not None:
            inquiry.notes.append("it drafts the whole vocabulary; the map, which engines would refuse, was left out")
        return
    if d2t is None and t2d is None:
        raise UserError(
            f"{raw.where} drafts {U} of {V} tokens and has neither d2t nor t2d; without the map its draft ids mean "
            "nothing."
        )
    if d2t is None:
        ids = t2d.bool().nonzero().squeeze(-1)  # type: ignore[union-attr]
        inquiry.notes.append("d2t was derived from t2d")
    else:
        ids = _target_ids(d2t.to(torch.int64), t2d, V, answers, inquiry)
        if d2t.dtype != torch.int64:
            inquiry.notes.append(f"d2t was {_name(d2t.dtype)} and is int64 now")
    vocabulary = DraftVocabulary(ids, V)
    if len(vocabulary) != U:
        raise UserError(
            f"{raw.where}: the map has {len(vocabulary)} entries, lm_head has {U} rows; they must be equal."
        )
    if t2d is not None and not torch.equal(vocabulary.t2d_V, t2d.bool()):
        raise UserError(f"{raw.where}: d2t and t2d name different tokens; one of them belongs to another head.")
    if t2d is None:
        inquiry.notes.append("t2d was not written and was derived from d2t")
    tensors |= {"d2t": vocabulary.d2t_U, "t2d": vocabulary.t2d_V}


def _target_ids(d2t_U: Tensor, t2d: Tensor | None, vocab_size: int, answers: Answers, inquiry: _Inquiry) -> Tensor:
    """Return the target ids of a map of offsets or of ids; asks where both readings are possible."""
    readings = {"offsets": torch.arange(len(d2t_U)) + d2t_U, "ids": d2t_U}
    if answers.map_kind is not None:
        return readings[answers.map_kind]
    possible = {name: ids for name, ids in readings.items() if _is_vocabulary(ids, vocab_size, t2d)}
    if len(possible) == 1 and "ids" in possible:
        inquiry.notes.append("d2t held target ids, not offsets, and was rewritten")
    elif len(possible) == 2:
        inquiry.questions.append("d2t could be offsets or target ids; say --map offsets or --map ids")
    return next(iter(possible.values()), readings["offsets"])


def _is_vocabulary(ids: Tensor, vocab_size: int, t2d: Tensor | None) -> bool:
    try:
        vocabulary = DraftVocabulary(ids, vocab_size)
    except UserError:
        return False
    return t2d is None or torch.equal(vocabulary.t2d_V, t2d.bool())


def _settle_lm_head(
    raw: RawHead, tensors: dict[str, Tensor], neutral: dict[str, Any], target: TargetFacts | None, inquiry: _Inquiry
) -> None:
    if "lm_head.weight" in tensors:
        return
    if neutral["draft_vocab_size"] < neutral["vocab_size"] or target is None:
        raise UserError(
            f"{raw.where} has no lm_head.weight; vLLM would draft wrong ids with it, and nothing can replace it."
        )
    tensors["lm_head.weight"] = target.output_rows().to(tensors["fc.weight"].dtype)
    inquiry.notes.append("it has no lm_head of its own; the target's was taken, as SGLang does")
