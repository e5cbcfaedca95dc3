"""Which row goes into which batch and shard: by length over the whole corpus, the same however many processes work."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExtractionPlan:
    """`tokens_per_batch` bounds a padded batch, `rows_per_shard` a shard; rows over `max_length` tokens are refused.

    `checked_rows` of every shard are computed once more alone.
    """

    max_length: int
    tokens_per_batch: int
    rows_per_shard: int
    checked_rows: int = 2


def plan_shards(lengths: list[int], *, rows_per_shard: int) -> list[list[int]]:
    """Return the rows of every shard, longest rows first; rows of equal length keep their order."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[start : start + rows_per_shard] for start in range(0, len(order), rows_per_shard)]


def plan_batches(rows: list[int], lengths: list[int], *, tokens_per_batch: int) -> list[list[int]]:
    """Return batches of similar length, at most `tokens_per_batch` tokens with padding (or one longer row alone)."""
    batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens_per_batch:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def shards_of(count: int, *, rank: int, ranks: int) -> list[int]:
    """Return the shards one of several processes writes: every `ranks`-th, so that long ones are shared out."""
    return list(range(rank, count, ranks))


def checked_places(count: int, wanted: int) -> list[int]:
    """Return which rows of a shard are computed once more: the last one (most neighbours), others evenly spread."""
    wanted = min(wanted, count)
    return sorted({count - 1 - (count * number) // wanted for number in range(wanted)})
