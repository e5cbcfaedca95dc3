"""Whether a head belongs to a target: what their configs and tokenizers say, and what the loaded target shows."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.models.checkpoint import head_config_from_json
from eyas.models.embedding_scale import check_embedding_scale, norm_deviation
from eyas.models.errors import UserError
from eyas.models.feature_fingerprint import TOLERANCE, feature_distances
from eyas.models.head_checks import Check
from eyas.models.head_files import HeadFiles
from eyas.models.head_layout import SCALE_FIELD
from eyas.models.rope import build_rope, check_same_rope
from eyas.models.target import Target, model_fingerprint
from eyas.models.target_facts import TargetFacts

NOT_RECORDED = "not recorded in this head's eyas.json"


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short hash of a tokenizer's vocabulary and special tokens."""
    content = [sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), sorted(tokenizer.all_special_ids)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_target_config(
    files: HeadFiles, facts: TargetFacts, tokenizer: PreTrainedTokenizerBase, template_arguments: dict[str, Any]
) -> list[Check]:
    """Return the checks that need no weights: sizes, positions, quantisation, tokenizer, chat template."""
    return [
        _sizes(files, facts),
        _positions(files, facts),
        _quantisation(files, facts),
        _tokenizer(files, tokenizer),
        _template(files, tokenizer, template_arguments),
        _weights(files, facts),
    ]


def check_loaded_target(files: HeadFiles, target: Target) -> list[Check]:
    """Return the checks that need the loaded target: RoPE angles, embeddings, and the states it was trained on."""
    return [_rope(files, target), _embeddings(files, target), _features(files, target)]


def _sizes(files: HeadFiles, facts: TargetFacts) -> Check:
    fields, config = files.fields, facts.config
    heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    pairs = {
        "hidden size": (fields.get("target_hidden_size", fields["hidden_size"]), config.hidden_size),
        "number of layers": (fields["target_num_hidden_layers"], config.num_hidden_layers),
        "vocabulary size": (fields["vocab_size"], config.vocab_size),
        "head_dim": (fields["head_dim"], head_dim),
    }
    faults = [
        f"{what} {ours} of the head is {theirs} in the target"
        for what, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    said = "; ".join(faults) or "hidden size, layers, vocabulary, head_dim"
    return Check("target sizes", "failed" if faults else "ok", said)


def _positions(files: HeadFiles, facts: TargetFacts) -> Check:
    ours, theirs = files.fields["max_position_embeddings"], facts.config.max_position_embeddings
    if ours == theirs:
        return Check("positions", "ok", f"{ours}, as in the target")
    return Check(
        "positions", "failed",
        f"max_position_embeddings is {ours}, the target has {theirs}: engines size the head's rotary table by it and "
        "read beyond its end, or draft badly there; write the target's",
    )  # fmt: skip


def _quantisation(files: HeadFiles, facts: TargetFacts) -> Check:
    if "target_quantisation" not in files.card:
        return Check("target quantisation", "skipped", NOT_RECORDED)
    trained, served = files.card["target_quantisation"], facts.quantisation
    said = f"trained against {trained or 'plain weights'}, this target has {served or 'plain weights'}"
    return Check("target quantisation", "ok" if trained == served else "warning", said)


def _tokenizer(files: HeadFiles, tokenizer: PreTrainedTokenizerBase) -> Check:
    trained, found = files.card.get("tokenizer_fingerprint"), tokenizer_fingerprint(tokenizer)
    if trained is None:
        return Check("tokenizer", "skipped", NOT_RECORDED)
    if trained == found:
        return Check("tokenizer", "ok", f"the one it was trained with ({found})")
    return Check("tokenizer", "failed", f"{found}, but the head was trained with {trained}: its ids mean other tokens")


def _template(files: HeadFiles, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> Check:
    trained = files.card.get("chat_template")
    if trained is None:
        return Check("chat template", "skipped", NOT_RECORDED)
    if trained != tokenizer.chat_template:
        return Check("chat template", "failed", "not the template it was trained with; serve with that one (eyas.json)")
    recorded = files.card.get("template_arguments", {})
    if recorded != arguments:
        return Check("chat template", "failed", f"served with arguments {arguments}, trained with {recorded}")
    return Check("chat template", "ok", f"the one it was trained with, arguments {recorded}")


def _weights(files: HeadFiles, facts: TargetFacts) -> Check:
    trained, found = files.card.get("target_fingerprint"), model_fingerprint(facts.name)
    if trained is None:
        return Check("target files", "skipped", NOT_RECORDED)
    if trained == found:
        return Check("target files", "ok", f"those it was trained on ({found})")
    return Check("target files", "warning", f"not those it was trained on ({found}, was {trained}); its states decide")


def _rope(files: HeadFiles, target: Target) -> Check:
    try:
        config = head_config_from_json(files.fields, where=files.where)
        check_same_rope(build_rope(config), target.decoder, config)
    except UserError as error:
        return Check("RoPE", "failed", str(error))
    return Check("RoPE", "ok", "the target's angles at positions 0, 63, 5000 and the last")


def _embeddings(files: HeadFiles, target: Target) -> Check:
    """Engines lend a head the target's bare table, whatever the target's own module makes of it."""
    if files.method == "eagle1":
        scale = files.fields.get(SCALE_FIELD, 1.0)
        try:
            check_embedding_scale(target.embedding, scale)
        except UserError as error:
            return Check("embeddings", "failed", str(error))
        said = "the target's table as it is" if scale == 1 else f"the target's scale of {scale:g} is multiplied into fc"
        return Check("embeddings", "ok", f"{said}; engines lend the bare table")
    deviation = norm_deviation(target.embedding, eps=files.fields["rms_norm_eps"])
    said = f"engines lend the target's bare table; behind the head's norm it differs by {deviation:.2%}"
    if deviation > 0.01:
        return Check("embeddings", "warning", f"{said}; eyas export --format vllm --with-embeddings writes its own")
    return Check("embeddings", "ok", said)


def _features(files: HeadFiles, target: Target) -> Check:
    recorded = files.card.get("features")
    if recorded is None:
        return Check("features", "skipped", NOT_RECORDED)
    try:
        distances = feature_distances(recorded, target)
    except UserError as error:
        return Check("features", "failed", str(error))
    worst = max(distances, key=lambda name: distances[name])
    if distances[worst] > TOLERANCE:
        return Check(
            "features", "failed",
            f"this target's states differ from those the head was trained on: {worst} by {distances[worst]:.0%} on a "
            "fixed prompt (fine-tuned, rotated or coarsely quantised weights); train the head on this target",
        )  # fmt: skip
    return Check("features", "ok", f"within {distances[worst]:.2%} of those it was trained on (furthest: {worst})")
