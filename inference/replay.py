"""Replay: the exact acceptance of chain rounds at T=0, walked over a row that the target wrote greedily.

Rounds start where the last one failed, at the harder positions, so averaging over all slots over-states tau. All drafts
are computed for all slots in parallel (they equal what the runtime drafts there), then the rounds are walked one by one
as the engine would: start at the slot before the first drafted token, accept n, go on n + 1 slots later.
"""

from torch import Tensor

from eyas.inference.acceptance import AcceptanceStats


def replay_chain(hits_TS: Tensor, *, first: int, last: int) -> AcceptanceStats:
    """Return the acceptance of replaying one reply at token positions first..last (inclusive).

    `hits_TS` is bool: whether the draft of slot t at step s equals the row's token t+2+s. The first reply token comes
    from the prefill; the round that starts at slot t has root t+1. Drafts past `last` are not counted.
    """
    depth = hits_TS.shape[1]
    stats = AcceptanceStats(depth)
    run_T = hits_TS.long().cumprod(-1).sum(-1).tolist()
    slot = first - 1
    while (left := last - (slot + 1)) > 0:
        accepted = min(run_T[slot], left)
        stats.record(accepted, drafted=depth)
        slot += accepted + 1
    return stats


def average_over_slots(hits_TS: Tensor, *, first: int, last: int) -> AcceptanceStats:
    """Return the slot average over the same reply: every slot counted as if a round started there. Over-states tau."""
    stats = AcceptanceStats(hits_TS.shape[1])
    run_T = hits_TS.long().cumprod(-1).sum(-1).tolist()
    for slot in range(first - 1, last - 1):
        stats.record(min(run_T[slot], last - (slot + 1)), drafted=stats.depth)
    return stats
