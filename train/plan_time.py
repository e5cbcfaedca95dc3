"""Seconds of every stage, from the measured speed of the machine.

A forward pass of n tokens takes the longer of computing (2 * active parameters * n / FLOP/s) and streaming the weights
(bytes / bandwidth), and its layers' small operations one after the other. What stands beside the products in a layer
(norms, rotations, softmax, copies) makes them reach a share of the machine's speed: EFFICIENCY, found on the quickstart
(docs/log.md). Take the result as right within a factor of two.
"""

from collections.abc import Callable

from eyas.inference.fit_calibration import OBSERVED_TREE, CalibrationPlan
from eyas.models.size import DTYPE_BYTES
from eyas.train.machine import Speed
from eyas.train.plan_disk import evaluated_methods, extract_bytes, measurements, train_bytes
from eyas.train.plan_facts import Facts

EFFICIENCY = 0.5
OPERATIONS_PER_LAYER = 90
ASSUMED_TAU = 1.5  # until a head is trained


def forward_seconds(facts: Facts, speed: Speed, *, tokens: int, dtype: str, kv_tokens: int = 0) -> float:
    """Return the seconds of one target forward over `tokens`, reading `kv_tokens` cached ones in all."""
    target, size = facts.target, DTYPE_BYTES[dtype]
    compute = 2 * target.active * tokens / (speed.flops(dtype) * EFFICIENCY)
    stream = size * target.active / speed.bytes_per_second
    groups = target.heads / target.kv_heads  # keys are copied to every query head before they are read
    cache = size * kv_tokens * target.kv_per_token * (1 + 2 * groups) / speed.bytes_per_second
    return max(compute, stream) + cache + _dispatch(target.layers, speed)


def _dispatch(layers: int, speed: Speed) -> float:
    return layers * OPERATIONS_PER_LAYER * speed.seconds_per_operation


def synthesize_seconds(facts: Facts, speed: Speed) -> float:
    """Decode steps of a full batch, each with its share of prompts read."""
    section, counts = facts.recipe.synthesize, facts.counts
    written = counts.reply_tokens + counts.self_prompts_asked * section.self_prompt_tokens
    context = (counts.prompt_tokens + counts.reply_tokens / 2) / max(1, counts.rows)
    batch = min(section.batch, counts.rows)
    step = forward_seconds(facts, speed, tokens=batch, dtype=section.dtype, kv_tokens=round(batch * context))
    drawing = 40 * batch * facts.target.vocab_size / speed.bytes_per_second
    prompts = 2 * facts.target.active * counts.prompt_tokens / (speed.flops(section.dtype) * EFFICIENCY)
    return written / batch * (step + drawing) + prompts


def extract_seconds(facts: Facts, speed: Speed) -> float:
    """One forward of every token and of one row per shard, full logits where a slot is taught, and the writing."""
    section, counts, target = facts.recipe.extract, facts.counts, facts.target
    if section.mode == "online":  # the checks alone: one batch, and a row of it alone
        return 2 * forward_seconds(facts, speed, tokens=section.tokens_per_batch, dtype=section.dtype)
    rows = counts.stored_rows
    again = rows / section.rows_per_shard * counts.stored_tokens / max(1, rows)
    batches = counts.stored_tokens / section.tokens_per_batch + rows / section.rows_per_shard
    return (
        _features_seconds(facts, speed, tokens=counts.stored_tokens + again)
        + (batches - counts.stored_tokens / section.tokens_per_batch) * _dispatch(target.layers, speed)
        + 4 * extract_bytes(facts) / speed.bytes_per_second
    )


def _features_seconds(facts: Facts, speed: Speed, *, tokens: float) -> float:
    """Return the seconds to compute the features of tokens: all layers of each, full logits where a slot is taught."""
    section, counts, target = facts.recipe.extract, facts.counts, facts.target
    taught = tokens * counts.stored_reply_tokens / max(1, counts.stored_tokens)
    flops = 2 * (target.active - target.embedding) * tokens + 2 * target.embedding * taught
    batches = tokens / section.tokens_per_batch
    return flops / (speed.flops(section.dtype) * EFFICIENCY) + batches * _dispatch(target.layers, speed)


def train_seconds(facts: Facts, speed: Speed) -> float:
    """Forward and backward (three forwards' work) over the TTT steps, the teacher, the optimizer, and validation."""
    section, config, counts = facts.recipe.train, facts.head_config, facts.counts
    dtype = "bfloat16" if section.precision == "bf16" else "float32"
    mean_row = counts.stored_tokens / max(1, counts.stored_rows)
    tokens = facts.tokens_per_batch
    slots = tokens * counts.stored_reply_tokens / max(1, counts.stored_tokens)
    S = section.ttt_steps
    rows_flops = (6 if section.lm_head_rate > 0 else 4) * facts.head.lm_head * slots
    step_flops = S * (6 * facts.head.layer * tokens + rows_flops) + 6 * facts.head.fuse * tokens
    teacher = 2 * config.draft_vocab_size * config.hidden_size * slots / (speed.flops("float32") * EFFICIENCY)
    distributions = 40 * S * slots * config.draft_vocab_size / speed.bytes_per_second
    optimizer = (
        12 * facts.trained + 8 * (facts.moments + facts.averaged + facts.head.parameters)
    ) / speed.bytes_per_second
    step = step_flops / (speed.flops(dtype) * EFFICIENCY) + teacher + distributions + optimizer
    step += 4 * S * _dispatch(config.num_layers, speed)
    held_out = counts.validation_rows * mean_row
    tree = section.validation_tree or facts.recipe.evaluate.tree
    rounds = held_out * counts.stored_reply_tokens / max(1, counts.stored_tokens) / ASSUMED_TAU
    drafted = section.validation_depth * held_out + rounds * ((tree.depth - 1) * tree.top_k + ASSUMED_TAU)
    check = 2 * drafted * facts.head.parameters / (speed.flops(dtype) * EFFICIENCY)
    checks = facts.steps // section.validate_every + 1
    saves = facts.steps / section.checkpoint_every * train_bytes(facts) / 3 / (speed.bytes_per_second / 4)
    computed = 0.0
    if facts.recipe.extract.mode == "online":
        seen = section.accumulate * facts.steps * tokens + checks * held_out
        computed = _features_seconds(facts, speed, tokens=seen)
    return section.accumulate * facts.steps * step + checks * check + saves + computed


def evaluate_seconds(facts: Facts, speed: Speed) -> float:
    """All methods on every prompt, one at a time, with an assumed acceptance length, and calibration, in batches."""
    section = facts.recipe.evaluate
    tokens = measurements(facts) / evaluated_methods(facts) * section.max_new_tokens
    drafted = DTYPE_BYTES[section.draft_dtype] * facts.head.parameters / speed.bytes_per_second
    drafted += 3 * _dispatch(facts.head_config.num_layers, speed)
    seconds = tokens * forward_seconds(facts, speed, tokens=1, dtype=section.dtype)
    trees = [(tree.depth, tree.num_draft_tokens) for tree in (section.tree, section.auto) if tree is not None]
    for depth, nodes in ((section.chain.depth, section.chain.depth), *trees):
        verify = forward_seconds(facts, speed, tokens=nodes + 1, dtype=section.dtype)
        seconds += tokens / ASSUMED_TAU * (verify + depth * drafted)
    calibration, batch = section.calibration, CalibrationPlan.batch
    rounds = len(calibration.temperatures) * calibration.prompts * calibration.max_new_tokens / ASSUMED_TAU / batch
    wide = forward_seconds(facts, speed, tokens=batch * OBSERVED_TREE.max_nodes, dtype=section.dtype)
    return seconds + rounds * (wide + OBSERVED_TREE.depth * drafted)


def export_seconds(facts: Facts, speed: Speed) -> float:
    """Reading and writing the head a few times."""
    return 8 * 4 * facts.head.parameters / speed.bytes_per_second


TIME: dict[str, Callable[[Facts, Speed], float]] = {
    "synthesize": synthesize_seconds,
    "extract": extract_seconds,
    "train": train_seconds,
    "evaluate": evaluate_seconds,
    "export": export_seconds,
}
