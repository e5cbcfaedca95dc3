"""What must hold in a head's own files, whoever reads them next: each rule is one check that names what is broken.

Most of these faults load without a word in at least one engine and cost the whole acceptance, so `load_head`, the
exports and `eyas doctor` all pass through this one list before anything is built, written or believed.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.errors import UserError
from eyas.models.head_config import check_aux_layers
from eyas.models.head_files import CARD, CONFIG, HeadFiles
from eyas.models.head_layout import EMBEDDINGS, FLAGS, ZERO_TENSORS, expected_shapes, neutral_fields

Status = Literal["ok", "failed", "warning", "skipped"]


@dataclass(frozen=True)
class Check:
    """One finding about a head: what was looked at, how it came out, and a sentence."""

    name: str
    status: Status
    detail: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def check_files(files: HeadFiles) -> list[Check]:
    """Return one Check per rule of `FILE_CHECKS`, in their order; a rule whose ground is broken is skipped."""
    checks: list[Check] = []
    for name, rule in FILE_CHECKS.items():
        try:
            faults = list(rule(files))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            sound = not any(check.status == "failed" for check in checks)
            broken = f"{files.where}: cannot be judged, {CONFIG} is not usable ({type(error).__name__}: {error})"
            checks.append(Check(name, "failed" if sound else "skipped", broken))
            continue
        checks.append(Check(name, "failed" if faults else "ok", "; ".join(faults) or PASSED[name]))
    return checks


def require_sound(files: HeadFiles) -> None:
    """Raise UserError with every fault of a head's files, unless there is none."""
    faults = [check.detail for check in check_files(files) if check.status == "failed"]
    if faults:
        raise UserError(f"{files.where}: {' | '.join(faults)}")


def _typed_fields(files: HeadFiles) -> Iterator[str]:
    """No null anywhere; sizes are positive integers, switches booleans: huggingface_hub and vLLM refuse the rest."""
    for path, value in _walk(files.fields):
        if value is None:
            yield f"{path} is null in {CONFIG}; engines refuse a null in a typed field, leave the key out"
    for names, kind, word in ((_INTEGERS, int, "a positive integer"), (_SWITCHES, bool, "true or false")):
        for name in names:
            value = files.fields.get(name)
            if value is not None and (type(value) is not kind or (kind is int and value < 1)):
                yield f"{name} is {value!r} in {CONFIG}; it must be {word}"


_INTEGERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "max_position_embeddings", "num_hidden_layers", "target_hidden_size",
    "target_num_hidden_layers", "num_aux_hidden_states",
)  # fmt: skip
_SWITCHES = ("tie_word_embeddings", "bias", "attention_bias", "mlp_bias", *FLAGS)


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _walk(item, f"{path}[{number}]")
    else:
        yield path, value


def _required_fields(files: HeadFiles) -> Iterator[str]:
    for name in _NEEDED[files.method]:
        if name not in files.fields:
            yield f"{CONFIG} has no {name!r}"


_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size", "num_hidden_layers",
    "target_num_hidden_layers",
)  # fmt: skip
_NEEDED = {
    "eagle3": (
        *_SIZES, "draft_vocab_size", "tie_word_embeddings", "target_hidden_size", "eagle_aux_hidden_state_layer_ids",
    ),
    "eagle1": _SIZES,
}  # fmt: skip


def _bias(files: HeadFiles) -> Iterator[str]:
    for name in ("bias", "attention_bias", "mlp_bias"):
        if files.fields.get(name):
            yield (
                f"{name} is true: vLLM and SGLang then expect attention biases that no head carries, leave them "
                "uninitialised and accept nothing, without an error; write false"
            )


def _ties(files: HeadFiles) -> Iterator[str]:
    if files.fields.get("tie_word_embeddings"):
        yield "tie_word_embeddings is true: SGLang then drafts with the embedding in place of the head's lm_head"


def _quantisation(files: HeadFiles) -> Iterator[str]:
    for name in ("quantization_config", "compression_config"):
        if name in files.fields:
            yield f"{name} was copied from the target into {CONFIG}; the head is not quantised, leave it out"


def _tensors(files: HeadFiles) -> Iterator[str]:
    expected = expected_shapes(files.method, files.fields)
    found = {name: tuple(tensor.shape) for name, tensor in files.tensors.items()}
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} {found[name]} instead of {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    if EMBEDDINGS in extra:
        extra.remove(EMBEDDINGS)
        yield (
            f"{EMBEDDINGS} is there, the target's embeddings for an engine (eyas export --with-embeddings); bring such "
            "a head back with eyas import --target MODEL, which compares them"
        )
    if missing or extra or wrong:
        yield f"tensors missing {missing}, unknown {extra}, of wrong shape {wrong}"


def _dtypes(files: HeadFiles) -> Iterator[str]:
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    named = files.fields.get("torch_dtype") or files.fields.get("dtype")
    stated = getattr(torch, str(named), None)
    if not isinstance(stated, torch.dtype):
        yield f"{CONFIG} says torch_dtype {named!r}, which is no dtype; the weights' own belongs there"
    for name, tensor in files.tensors.items():
        expected = kinds.get(name) or (stated if isinstance(stated, torch.dtype) else tensor.dtype)
        if tensor.dtype != expected:
            yield f"{name} is {_short(tensor.dtype)}, {CONFIG} and the map's rule say {_short(expected)}"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _values(files: HeadFiles) -> Iterator[str]:
    for name, tensor in files.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name} holds values that are not finite"
        if name in ZERO_TENSORS[files.method] and bool(tensor.any()):
            yield f"{name} is not zero: SGLang would add it and vLLM would drop it"


def map_faults(d2t_U: Tensor, t2d_V: Tensor, *, vocab_size: int) -> Iterator[str]:
    """Yield what is wrong with a vocabulary map: it must be filled, sorted, unique, in range, and agree with t2d."""
    if not bool(d2t_U.any()) and bool(t2d_V[: len(d2t_U)].all()) and int(t2d_V.sum()) == len(d2t_U):
        return  # filled: the draft vocabulary is the first ids, whose offsets are all zero
    try:
        vocabulary = DraftVocabulary.from_d2t(d2t_U, vocab_size)
    except UserError as error:
        yield str(error).rstrip(".")
        return
    if not torch.equal(vocabulary.t2d_V, t2d_V):
        yield "d2t and t2d name different tokens: the engines would read different vocabularies"


def _map(files: HeadFiles) -> Iterator[str]:
    if files.method == "eagle3" and files.fields["draft_vocab_size"] < files.fields["vocab_size"]:
        vocab_size = files.fields["vocab_size"]
        yield from map_faults(files.tensors["d2t"], files.tensors["t2d"].bool(), vocab_size=vocab_size)


def _layer_ids(files: HeadFiles) -> Iterator[str]:
    if files.method != "eagle3":
        return
    fields = files.fields
    ours = fields["eagle_aux_hidden_state_layer_ids"]
    nested = fields.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    try:
        check_aux_layers(tuple(ours), num_layers=fields["target_num_hidden_layers"])
    except UserError as error:
        yield f"eagle_aux_hidden_state_layer_ids {ours}: {error}".rstrip(".")
        return
    if nested != [k - 1 for k in ours]:
        yield (
            f"eagle_aux_hidden_state_layer_ids is {ours} at the top level (vLLM's numbering), so eagle_config must say "
            f"{[k - 1 for k in ours]} (SGLang's, one less); it says {nested}: the two engines would read other layers"
        )
    if fields.get("num_aux_hidden_states", 3) != len(ours):
        yield f"num_aux_hidden_states is {fields.get('num_aux_hidden_states', 3)}, but {len(ours)} layers are named"


def _norm_flags(files: HeadFiles) -> Iterator[str]:
    fields, nested = files.fields, files.fields.get("eagle_config", {})
    for name in FLAGS if files.method == "eagle3" else ():
        if fields.get(name) != nested.get(name) or name not in fields:
            yield (
                f"{name} is {fields.get(name)} at the top level and {nested.get(name)} in eagle_config; engines read "
                "one or the other, so both must say the same"
            )
    if fields.get("norm_before_fc") and fields.get("fc_norm"):
        yield "norm_before_fc and fc_norm are both true; they exclude each other"


def _recorded(files: HeadFiles) -> Iterator[str]:
    """config.json must still say what eyas.json says the head was trained with."""
    trained = files.card.get("head", {})
    for name, found in neutral_fields(files.method, files.fields).items():
        if name in trained and _plain(found) != _plain(trained[name]):
            was = _plain(trained[name])
            yield f"{name} is {_plain(found)} in {CONFIG}, but the head was trained with {was} ({CARD})"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, without the empty fields that config.json leaves out."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


Rule = Callable[[HeadFiles], Iterator[str]]
FILE_CHECKS: dict[str, Rule] = {
    "typed fields": _typed_fields,
    "required fields": _required_fields,
    "bias": _bias,
    "ties": _ties,
    "quantisation": _quantisation,
    "aux layer ids": _layer_ids,
    "norm flags": _norm_flags,
    "recorded": _recorded,
    "tensors": _tensors,
    "dtypes": _dtypes,
    "values": _values,
    "vocabulary map": _map,
}
PASSED = {
    "typed fields": "no null and no field of a wrong type",
    "required fields": "all there",
    "bias": "no bias is announced",
    "ties": "the head's lm_head is its own",
    "quantisation": "no quantisation of the target left in it",
    "aux layer ids": "the same layers in vLLM's and SGLang's numbering",
    "norm flags": "the same at the top level and in eagle_config",
    "recorded": f"{CONFIG} says what {CARD} says",
    "tensors": "exactly those the engines read, in their shapes; the embeddings are the target's",
    "dtypes": "as written in config.json",
    "values": "all finite",
    "vocabulary map": "sorted, unique, in range, filled, d2t and t2d agree",
}
