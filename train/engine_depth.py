"""How many tokens an engine should let a head draft, by batch size: from measured acceptance and the roofline.

A chain of K tokens emits 1 + survival_1 + ... + survival_K per round; every one of them costs a step of the head and a
token of verification, dearer the more requests share a forward. So the best K falls as the batch grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.train.break_even import BATCHES, round_cost
from eyas.train.machine import Speed
from eyas.train.plan_facts import Facts


@dataclass(frozen=True)
class EngineDepth:
    """The best chain at a batch size; depth 0: none is faster than plain decoding."""

    batch: int
    depth: int
    tau: float
    speedup: float


def best_depths(facts: Facts, speed: Speed, survival: Sequence[float]) -> tuple[EngineDepth, ...]:
    """Return the chain of the highest estimated speed-up for every batch size; `survival` is measured, by depth."""
    found = []
    for batch in BATCHES:
        choices = [EngineDepth(batch, 0, 1.0, 1.0)]
        for depth in range(1, len(survival) + 1):
            tau = 1.0 + sum(survival[:depth])
            cost = round_cost(facts, speed, batch=batch, depth=depth, nodes=depth, width=1)
            choices.append(EngineDepth(batch, depth, tau, tau / cost))
        found.append(max(choices, key=lambda choice: choice.speedup))
    return tuple(found)


def measured_survival(evaluated: dict[str, Any]) -> list[float]:
    """Return the chain's survival by depth over all prompts at the lowest temperature; empty if none was measured."""
    chains = [
        entry for entry in evaluated.get("results", []) if (entry["method"], entry["prompt_set"]) == ("chain", "all")
    ]
    return min(chains, key=lambda entry: entry["temperature"])["survival"] if chains else []
