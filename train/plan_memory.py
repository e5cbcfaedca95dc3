"""Peak memory of every stage, as named terms.

Derived from what the code keeps alive, and checked against measured peaks (tests/train/test_plan_measured.py). A stage
loads weights first and works then: its peak is the larger of the two. Memory-mapped files (feature shards; the target's
weights while they are read, and for good where they are used as they are stored) count as resident while they are used
but can be dropped by the system, so they are named apart and need not fit.
"""

from collections.abc import Callable
from dataclasses import dataclass

from eyas.models.size import DTYPE_BYTES
from eyas.models.target import CHECKED_TOKENS
from eyas.train.draft_loss import chunk_rows
from eyas.train.plan_disk import extract_bytes
from eyas.train.plan_facts import Facts

VALIDATION_TOKENS = 2048  # of a batch of held-out rows (train/validation.py)
ARGMAX_CHUNK = 256  # positions whose full logits are there at once (data/extract.py)


@dataclass(frozen=True)
class Phase:
    """One phase of a stage: bytes by what they hold, and bytes of mapped files."""

    terms: dict[str, int]
    mapped: int = 0

    @property
    def needed(self) -> int:
        return sum(self.terms.values())

    @property
    def peak(self) -> int:
        return self.needed + self.mapped


def loading(facts: Facts, dtype: str) -> Phase:
    """Return the phase in which the target's weights are read from their mapped files into a dtype.

    Weights stored in that dtype are not read yet.
    """
    if stay_mapped(facts, dtype):
        return Phase({"process": facts.base})
    weights = DTYPE_BYTES[dtype] * facts.target.parameters
    mapped = facts.weight_file or weights if facts.maps else 0
    return Phase({"process": facts.base, "target weights": weights}, mapped)


def borrowing(facts: Facts) -> Phase:
    """Return the phase in which the parts that a head borrows are read, in fp32 (models/target_parts.py)."""
    if stay_mapped(facts, "float32"):
        return Phase({"process": facts.base})
    numbers = 2 * facts.target.embedding + facts.target.parameters // facts.target.layers
    return Phase({"process": facts.base, "parts of the target": 4 * numbers}, facts.weight_file)


def stay_mapped(facts: Facts, dtype: str) -> int:
    """Return the bytes of the target's files where they are used as they are, 0 where weights are converted."""
    return facts.weight_file if facts.maps and facts.weight_dtype == dtype else 0


def synthesize_phases(facts: Facts) -> list[Phase]:
    """Weights, the head's packed copy, the KV cache, one step's logits as drawn from, one layer's keys in full.

    A server that writes has all of that in its own process.
    """
    section, target = facts.recipe.synthesize, facts.target
    if section.backend.kind != "local":
        return [Phase({"process": facts.base})]
    size = DTYPE_BYTES[section.dtype]
    capacity = section.max_prompt_tokens + max(section.max_reply_tokens, section.self_prompt_tokens)
    given = max(facts.lengths.given, default=0)
    written = facts.lengths.frame + section.self_prompt_tokens if facts.counts.self_prompts_asked else 0
    prefill = min(section.batch, facts.counts.rows) * max(given, written)
    hot = [style.top_k for style in (*section.answers, *section.self_answers) if style.temperature > 0]
    drawing = 28 if 0 in hot else 8 if hot or facts.counts.self_prompts_asked else 0  # bytes per logit to draw from
    work = {
        "process": facts.base,
        "target weights": size * (target.parameters + target.embedding),
        "KV cache": size * section.batch * capacity * target.kv_per_token,
        "logits": section.batch * target.vocab_size * (size + drawing),
        "activations": size * prefill * (6 * target.hidden_size + 3 * target.mlp_width)
        + size * section.batch * capacity * 2 * target.heads * target.head_dim,
    }
    return [loading(facts, section.dtype), Phase(work, stay_mapped(facts, section.dtype))]


def extract_phases(facts: Facts) -> list[Phase]:
    """Weights, one batch's states and activations, one shard's rows and their copy in the store's dtype.

    vLLM spreads the weights over its devices. Where features are computed in training, nothing is stored here.
    """
    section, target, counts = facts.recipe.extract, facts.target, facts.counts
    size, stored = DTYPE_BYTES[section.dtype], DTYPE_BYTES[section.state_dtype]
    states = facts.head_config.aux_width + target.hidden_size
    shard = min(section.rows_per_shard, counts.stored_rows) * counts.stored_tokens // max(1, counts.stored_rows)
    mapped = stay_mapped(facts, section.dtype)
    forward = _feature_terms(facts)
    weights = forward["target weights"]
    stored_shard = {} if section.mode == "online" else {"shard": shard * states * (size + stored)}
    work = {"process": facts.base, **forward, **stored_shard}
    check = {
        "process": facts.base,
        "target weights": weights,
        "logits": 4 * 4 * CHECKED_TOKENS * target.vocab_size,  # the model's own and rebuilt ones, their difference
    }
    return [loading(facts, section.dtype), Phase(work, mapped), Phase(check, mapped)]


def _feature_terms(facts: Facts) -> dict[str, int]:
    """Return what computing the features of one batch takes, in extraction or while training."""
    section, target = facts.recipe.extract, facts.target
    size = DTYPE_BYTES[section.dtype]
    states = facts.head_config.aux_width + target.hidden_size
    longest = min(facts.counts.longest_row, facts.recipe.train.line_length)
    batch = max(section.tokens_per_batch, longest)
    weights = 0 if stay_mapped(facts, section.dtype) else size * target.parameters
    return {
        "target weights": weights // (section.vllm_tensor_parallel if section.backend == "vllm" else 1),
        "activations": size * batch * (2 * states + 6 * target.hidden_size + 3 * target.mlp_width),
        "logits": size * ARGMAX_CHUNK * target.vocab_size,
    }


def train_phases(facts: Facts) -> list[Phase]:
    """The head with gradients and moments, the embedding and teacher rows it borrows, and what one batch keeps.

    Of a TTT step the backward pass needs its activations, and of each supervised slot the output state with its
    gradient: attention keeps no scores, and the loss works on one chunk of logits at a time. Where features are
    computed while training, the target is there too.
    """
    section, target, config = facts.recipe.train, facts.target, facts.head_config
    head = 4 * facts.head.parameters
    learning = 4 * (facts.trained + facts.moments + 2 * facts.averaged)  # averaged weights are swapped in to validate
    embedding = 4 * target.embedding
    mapped_embedding = embedding if stay_mapped(facts, "float32") else 0
    borrowed = 4 * config.draft_vocab_size * config.hidden_size + embedding - mapped_embedding
    compute = 2 if section.precision == "bf16" else 4
    line = max(section.line_length, 1) if section.batching == "packed" else facts.counts.longest_row
    tokens = section.lines_per_batch * line
    replies = facts.counts.stored_reply_tokens / max(1, facts.counts.stored_tokens)
    slots, U = round(tokens * replies), config.draft_vocab_size
    width = config.num_attention_heads * config.head_dim
    per_layer = compute * (14 * config.hidden_size + 8 * width + 4 * config.intermediate_size)
    per_token = config.num_layers * per_layer + 8 * config.hidden_size
    pairs = section.ttt_steps * slots
    work = {
        "process": facts.base,
        **_decoding_target(facts),
        "head, gradients, moments": head + learning,
        "weights in compute precision": compute * facts.head.parameters if compute == 2 else 0,
        "embedding and teacher": borrowed,
        "batch": 4 * tokens * (config.aux_width + target.hidden_size),
        "activations": section.ttt_steps * tokens * per_token,
        "output states": 3 * 4 * pairs * config.hidden_size,
        "a chunk of logits": 2 * compute * U * min(chunk_rows(U), pairs),  # the head's and the teacher's
    }
    held_out = min(VALIDATION_TOKENS, facts.counts.validation_rows * facts.counts.longest_row)
    validation = {
        "process": facts.base,
        "head, gradients, moments": head + learning,
        "embedding and teacher": borrowed,
        "batch": 4 * held_out * (config.aux_width + target.hidden_size),
        "activations": 2 * held_out * per_token,
        "distributions": compute * held_out * U,
        "head that drafts": 2 * compute * facts.head.parameters,  # its packed copy included
        **_decoding_target(facts),
    }
    online = _feature_terms(facts) if facts.recipe.extract.mode == "online" else {}
    resident = {"target weights": online["target weights"]} if online else {}
    mapped = mapped_embedding + (extract_bytes(facts) if facts.maps else 0)
    mapped += stay_mapped(facts, facts.recipe.extract.dtype) if online else 0
    phases = [borrowing(facts), Phase(work | resident, mapped), Phase(validation | resident, mapped)]
    if online:
        forward = {"process": facts.base, "head, gradients, moments": head + learning, **online}
        phases.append(Phase(forward, mapped))
    return phases


def _decoding_target(facts: Facts) -> dict[str, int]:
    """Return the bytes of the target that real decoding during training keeps, with its packed copy."""
    if not facts.recipe.train.decode_every:
        return {}
    return {"target weights": 2 * DTYPE_BYTES[facts.recipe.evaluate.dtype] * facts.target.parameters}


def evaluate_phases(facts: Facts) -> list[Phase]:
    """Weights and the head's packed copy, the draft head with its packed copy, and a KV cache of one row."""
    section, target = facts.recipe.evaluate, facts.target
    size = DTYPE_BYTES[section.dtype]
    capacity = facts.recipe.synthesize.max_prompt_tokens + section.max_new_tokens + section.tree.num_draft_tokens + 1
    work = {
        "process": facts.base,
        "target weights": size * (target.parameters + target.embedding),
        "draft head": 8 * facts.head.parameters,
        "KV cache": size * capacity * target.kv_per_token,
        "logits": 4 * 4 * CHECKED_TOKENS * target.vocab_size,  # of the check on the first prompt
    }
    return [loading(facts, section.dtype), Phase(work, stay_mapped(facts, section.dtype))]


def export_phases(facts: Facts) -> list[Phase]:
    """The head in fp32 as loaded, and once more as written and read back; between the two, the target's fingerprint."""
    size, dtype = DTYPE_BYTES[facts.recipe.export.dtype], facts.recipe.extract.dtype
    mapped = stay_mapped(facts, dtype)
    weights = 0 if mapped else DTYPE_BYTES[dtype] * facts.target.parameters
    fingerprint = {"process": facts.base, "target weights": weights, "draft head": 4 * facts.head.parameters}
    written = {"process": facts.base, "draft head": (8 + 3 * size) * facts.head.parameters}
    return [loading(facts, dtype), Phase(fingerprint, mapped), Phase(written)]


MEMORY: dict[str, Callable[[Facts], list[Phase]]] = {
    "synthesize": synthesize_phases,
    "extract": extract_phases,
    "train": train_phases,
    "evaluate": evaluate_phases,
    "export": export_phases,
}
