"""Acceptance by the length of the text a round stands behind: heads lose it beyond the lengths they were trained on."""

from collections.abc import Iterable
from typing import Any

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.evaluation import PLAIN, Measurement

SHORTEST = 64  # tokens: contexts below it are one class, above it every doubling is one


def context_class(context: int) -> int:
    """Return the shortest context of the class that a context of so many tokens is in: 0, 64, 128, 256, ..."""
    return 0 if context < SHORTEST else 1 << (context.bit_length() - 1)


def acceptance_by_context(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Return one entry per speculative method, temperature and class of contexts, in ascending order of contexts.

    A round's context is the text it stands behind: the prompt and all tokens emitted before the round.
    `context` is the class's shortest, `below` is the next class's.
    """
    groups: dict[tuple[str, float, int], AcceptanceStats] = {}
    for measurement in measurements:
        if measurement.method == PLAIN:
            continue
        context = measurement.prompt_tokens + 1  # the prompt's own forward emits the first token
        for accepted, drafted, emitted in measurement.rounds:
            key = (measurement.method, measurement.temperature, context_class(context))
            stats = groups.setdefault(key, AcceptanceStats(measurement.stats["depth"]))
            stats.record(accepted, drafted=drafted)
            context += emitted
    return [
        {"method": method, "temperature": temperature, "context": context, "below": max(SHORTEST, 2 * context)}
        | {"tau": stats.tau, "rounds": stats.rounds}
        for (method, temperature, context), stats in sorted(groups.items(), key=lambda one: one[0])
    ]
