"""Bytes that every stage leaves on disk."""

from collections.abc import Callable

from eyas.data.state_format import bytes_per_token
from eyas.models.size import DTYPE_BYTES
from eyas.train.plan_facts import Facts
from eyas.train.training_state import KEEP

CORPUS_ROW, CORPUS_TOKEN = 220, 9.0  # a JSON line: its keys and ids; a token as a number and as text
REPLY_ROW, REPLY_TOKEN = 100, 6.0  # a reply's JSON line in its part
SHARD_ROW = 100  # a row's share of its shard's header
MEASUREMENT, MEASURED_TOKEN = 560, 14  # a line of measurements.jsonl
REPORT, REPORT_MEASUREMENT = 260_000, 950  # report.html with its plots, report.json and acceptance.png
METRICS_STEP, CURVES, COVERAGE = 205, 90_000, 56_000  # a line of metrics.jsonl; curves.png; coverage.json and .png
STATE_FRAME, HEAD_FRAME, EXPORT_FRAME = 16_000, 4_000, 31_000  # what a checkpoint and heads hold besides tensors


def synthesize_bytes(facts: Facts) -> int:
    """Return the bytes of the corpus, of the replies as they came in (ids alone), and of the user turns that the target
    wrote.
    """
    counts, section = facts.counts, facts.recipe.synthesize
    rows = CORPUS_ROW * counts.rows + CORPUS_TOKEN * counts.tokens
    rows += REPLY_ROW * counts.rows + REPLY_TOKEN * counts.reply_tokens
    return round(rows + counts.self_prompts_asked * (CORPUS_ROW + CORPUS_TOKEN * section.self_prompt_tokens))


def extract_bytes(facts: Facts) -> int:
    """Return the bytes of the feature store; a row's last generated token teaches nothing. None while features are
    computed in training (extract.mode online).
    """
    counts, section = facts.counts, facts.recipe.extract
    if section.mode == "online":
        return 0
    per_token = bytes_per_token(
        hidden_size=facts.target.hidden_size,
        aux_layers=len(facts.head_config.aux_layers),
        state_dtype=section.state_dtype,
        final_everywhere=facts.final_everywhere,
    )
    taught = counts.stored_reply_tokens - counts.stored_rows
    return per_token.total(tokens=counts.stored_tokens, taught=taught) + counts.stored_rows * SHARD_ROW


def state_bytes(facts: Facts) -> int:
    """Return the bytes of one training checkpoint: fp32 weights, moments and averaged weights."""
    numbers = facts.head.parameters + facts.moments + facts.averaged
    return 4 * numbers + facts.vocabulary_map + STATE_FRAME


def train_bytes(facts: Facts) -> int:
    """Return the bytes of the checkpoints kept, the best head, the metrics and their curves."""
    best = 4 * facts.head.parameters + facts.vocabulary_map + HEAD_FRAME
    coverage = 0 if facts.head_config.full_vocabulary else COVERAGE
    return KEEP * state_bytes(facts) + best + METRICS_STEP * facts.steps + CURVES + coverage


def measurements(facts: Facts) -> int:
    """Return how many prompt-method-temperature combinations are decoded."""
    section = facts.recipe.evaluate
    hot = min(facts.evaluation_prompts, section.sampled_prompts * facts.evaluation_sets)
    return evaluated_methods(facts) * sum(facts.evaluation_prompts if t == 0 else hot for t in section.temperatures)


def evaluated_methods(facts: Facts) -> int:
    """Return how many ways of decoding are compared: plain, chain and tree, and the cost-aware tree where asked for."""
    return 3 + (facts.recipe.evaluate.auto is not None)


def evaluate_bytes(facts: Facts) -> int:
    """Return the bytes of the measurements and the report."""
    count = measurements(facts)
    line = MEASUREMENT + MEASURED_TOKEN * facts.recipe.evaluate.max_new_tokens
    return REPORT + count * (line + REPORT_MEASUREMENT)


def export_bytes(facts: Facts) -> int:
    """Return the bytes of the exported head."""
    return DTYPE_BYTES[facts.recipe.export.dtype] * facts.head.parameters + facts.vocabulary_map + EXPORT_FRAME


DISK: dict[str, Callable[[Facts], int]] = {
    "synthesize": synthesize_bytes,
    "extract": extract_bytes,
    "train": train_bytes,
    "evaluate": evaluate_bytes,
    "export": export_bytes,
}


def in_flight_bytes(facts: Facts) -> int:
    """Return what a run needs for a moment besides: a checkpoint is whole under a temporary name before one is
    deleted, and so is the best head.
    """
    return state_bytes(facts) + 4 * facts.head.parameters
