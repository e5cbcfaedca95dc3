"""Where speculation stops paying as concurrency grows: an estimate from the roofline.

With B requests decoded together a plain step computes B tokens, a round of speculation B * (n + 1), and both stream the
weights and every request's keys once:
    seconds(B, tokens) = max(2 * parameters * tokens / FLOP/s, weights / bandwidth) + B * keys / bandwidth
Speculation pays while tau * seconds(B, B) > seconds(B, B * (n + 1)) + drafting. While the weights' stream is the longer
part the n extra tokens are free; past the ridge each of them costs as much as a plain one.
"""

from dataclasses import dataclass

from eyas.models.size import DTYPE_BYTES
from eyas.train.machine import Speed
from eyas.train.plan_facts import Facts

TAUS = (1.5, 2.0, 3.0, 4.0)
BATCHES = (1, 8, 32)
LARGEST = 1024


@dataclass(frozen=True)
class BreakEven:
    """For one method and acceptance length: the speed-up at some batch sizes and the largest batch that has one.

    `pays_to` is 0 where speculation never pays, None where it still does at the largest batch looked at.
    """

    method: str
    tau: float
    speedups: dict[int, float]
    pays_to: int | None


def break_even_table(facts: Facts, speed: Speed) -> list[BreakEven]:
    """Return a row per method of the recipe's evaluation and acceptance length it can reach, in bf16 serving."""
    chain, tree = facts.recipe.evaluate.chain, facts.recipe.evaluate.tree
    rows = []
    for method, depth, nodes, width in (
        (f"chain of {chain.depth}", chain.depth, chain.depth, 1),
        (f"tree of {tree.num_draft_tokens}", tree.depth, tree.num_draft_tokens, tree.top_k),
    ):
        for tau in (tau for tau in TAUS if tau <= depth + 1):
            gains = {
                batch: tau / round_cost(facts, speed, batch=batch, depth=depth, nodes=nodes, width=width)
                for batch in range(1, LARGEST + 1)
            }
            last = max((batch for batch, gain in gains.items() if gain > 1), default=0)
            speedups = {batch: gains[batch] for batch in BATCHES}
            rows.append(BreakEven(method, tau, speedups, None if last == LARGEST else last))
    return rows


def round_cost(facts: Facts, speed: Speed, *, batch: int, depth: int, nodes: int, width: int) -> float:
    """Return the seconds of a round of speculation in plain decode steps."""
    plain = _seconds(facts, speed, batch=batch, tokens=batch)
    verify = _seconds(facts, speed, batch=batch, tokens=batch * (nodes + 1))
    size = DTYPE_BYTES["bfloat16"]
    head = facts.head.layer + facts.head.lm_head
    level = max(2 * head * batch * width / speed.flops_bfloat16, size * head / speed.bytes_per_second)
    return (verify + depth * level) / plain


def _seconds(facts: Facts, speed: Speed, *, batch: int, tokens: int) -> float:
    """Return the seconds of one target forward in bf16, every request as long as the recipe's rows may get."""
    target, size = facts.target, DTYPE_BYTES["bfloat16"]
    context = facts.recipe.synthesize.max_prompt_tokens + facts.recipe.synthesize.max_reply_tokens
    keys = batch * context * target.kv_per_token * size / speed.bytes_per_second
    return max(2 * target.active * tokens / speed.flops_bfloat16, size * target.active / speed.bytes_per_second) + keys
