"""Measuring the latency table of a target and a head on this machine, in seconds.

The pieces of a round are timed as the runtime runs them: the target's forward over all rows' nodes with its greedy
choice, feeding the head, and drafting trees of one and of three levels. Sizes take turns, the best of each counts, and
more nodes are never taken to cost less.
"""

import time
from collections.abc import Callable

import torch
from scipy.optimize import isotonic_regression

from eyas.inference.draft import DynamicTree
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.latency import LatencyTable, RowsLatency
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.models.target import Target, TargetOutput

CONTEXT = 256  # tokens of text before a round
SIZES = (1, 2, 3, 4, 6, 8, 12, 17, 25, 33, 49, 65, 97, 129)  # nodes per row
MOST_TOKENS = 256  # nodes over all rows of a measured forward
FED = 2  # tokens that a round feeds to the head


def measure_latency(
    target: Target,
    head: DraftHead,
    *,
    rows: int,
    max_nodes: int,
    top_k: int,
    kv_dtype: torch.dtype | None = None,
    seconds: float = 3.0,
    progress: Callable[[int, int, int], None],
) -> LatencyTable:
    """Return the table for up to `rows` rows and trees of `max_nodes` nodes, root included.

    About `seconds` go into every number of rows: 1, 2, 4, ... and `rows` itself. `progress` hears how many are done.
    """
    counts = sorted({*(2**power for power in range(rows.bit_length())), rows})
    context = min(CONTEXT, target.position_limit // 2)
    head.lend(target)
    entries = []
    for number, count in enumerate(counts):
        entries.append(_measure_rows(target, head, count, max_nodes, top_k, context, kv_dtype, seconds))
        progress(number + 1, len(counts), 0)
    return LatencyTable(context, tuple(entries))


@torch.inference_mode()
def _measure_rows(
    target: Target,
    head: DraftHead,
    rows: int,
    max_nodes: int,
    top_k: int,
    context: int,
    kv_dtype: torch.dtype | None,
    seconds: float,
) -> RowsLatency:
    most = max(2, min(max_nodes, MOST_TOKENS // rows))
    nodes = (*(size for size in SIZES if size < most), most)
    works: dict[str, Callable[[], object]] = {
        f"verify {count}": _verification(target, rows, count, context, kv_dtype) for count in nodes
    }
    works |= _drafting(target, head, rows, top_k, context)
    best = _best_in_turn(works, seconds, synchronise=target.device.type == "cuda")
    verify = isotonic_regression([best[f"verify {count}"] for count in nodes]).x
    level = max(0.0, (best["draft 3"] - best["draft 1"]) / 2)
    return RowsLatency(rows, nodes, tuple(map(float, verify)), best["feed"], best["draft 1"], level)


def _verification(
    target: Target, rows: int, nodes: int, context: int, kv_dtype: torch.dtype | None
) -> Callable[[], object]:
    """Return a target forward over chains of so many nodes behind a text, with the greedy choice at every node."""
    device = target.device
    cache = target.new_cache(batch=rows, capacity=context + nodes, dtype=kv_dtype)
    ids_RN = torch.zeros(rows, nodes, dtype=torch.int64, device=device)
    positions_RN = (context + torch.arange(nodes, device=device)).expand(rows, -1)
    mask_R1NL = (torch.arange(context + nodes, device=device) <= positions_RN[:, None, :, None]).contiguous()
    slots_RN = positions_RN.contiguous()

    def work() -> object:
        if rows == 1:
            cache.write_at(context, nodes, rows=slice(0, 1))
        else:
            cache.write_rows_at(slice(0, rows), slots_RN)
        out = target.forward(ids_RN, position_ids_BT=positions_RN, mask_B1TL=mask_R1NL, cache=cache)
        return target.head.logits(out.final_hidden_BTD).max(-1)

    return work


def _drafting(target: Target, head: DraftHead, rows: int, top_k: int, context: int) -> dict[str, Callable[[], object]]:
    """Return the feed of a round, and drafting one and three levels, behind a text of zeros."""
    tree = DynamicTree(3, top_k, 1)
    drafting = EagleDrafting(head, tree)
    drafting.join([(0,)] * rows, [Sampling()] * rows, capacity=context + FED)
    weight = target.head.weight_VD
    width = len(target.aux_layers) * target.config.hidden_size

    def states(count: int) -> TargetOutput:
        aux = torch.zeros(rows, count, width, dtype=target.dtype, device=weight.device)
        return TargetOutput(aux, aux.new_zeros(rows, count, target.config.hidden_size))

    drafting.extend(0, [[0] * context] * rows, states(context))
    fed = states(FED)

    def feed() -> object:
        drafting.cache.discard_tree()
        drafting.cache.lengths[:rows] = [context] * rows
        drafting.extend(0, [[0] * FED] * rows, fed)
        return drafting.logits_RU

    def draft(levels: int) -> Callable[[], object]:
        maker = DynamicTree(levels, top_k, 1)

        def work() -> object:
            drafting.cache.discard_tree()
            return maker.make(drafting, [0] * rows)

        return work

    return {"feed": feed, "draft 1": draft(1), "draft 3": draft(3)}


def _best_in_turn(works: dict[str, Callable[[], object]], seconds: float, *, synchronise: bool) -> dict[str, float]:
    """Return the best seconds of each piece of work, all taking turns until the time is over (three turns at least)."""
    best = dict.fromkeys(works, float("inf"))
    started, turns = time.perf_counter(), 0
    while turns < 4 or time.perf_counter() - started < seconds:
        for name, work in works.items():
            before = time.perf_counter()
            work()
            if synchronise:
                torch.cuda.synchronize()
            if turns > 0:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - before)
        turns += 1
    return best
