"""The endless, seeded sequence of training batches, and which of them an optimizer step takes on which rank.

Batch n is the same on every rank, after every restart and for every number of ranks, so the cursor of a run is one
number: how many batches are consumed.
"""

from dataclasses import replace

import torch

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_row import FeatureRow, RowSource, as_source
from eyas.data.packing import plan_epoch


class Batches:
    """The batches over the training rows, epoch after epoch."""

    def __init__(
        self, rows: RowSource | list[FeatureRow], *, line_length: int, lines_per_batch: int, packed: bool, seed: int
    ) -> None:
        self.rows = as_source(rows)
        self.line_length = line_length
        self.lines_per_batch = lines_per_batch
        self.packed = packed
        self.seed = seed
        self.epochs: dict[int, list[list[list[int]]]] = {}
        self.starts = [0]

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        if epoch not in self.epochs:
            self.epochs[epoch] = plan_epoch(
                self.rows.lengths,
                line_length=self.line_length,
                lines_per_batch=self.lines_per_batch,
                packed=self.packed,
                seed=self.seed,
                epoch=epoch,
            )
        return self.epochs[epoch]

    def lines(self, number: int) -> list[list[FeatureRow]]:
        """Return the rows of batch `number`, line by line."""
        while number >= self.starts[-1]:
            self.starts.append(self.starts[-1] + len(self._epoch(len(self.starts) - 1)))
        epoch = next(e for e in range(len(self.starts) - 1) if number < self.starts[e + 1])
        numbers = self._epoch(epoch)[number - self.starts[epoch]]
        rows = iter(self.rows.rows([i for line in numbers for i in line]))  # asked for at once: they may be computed
        return [[next(rows) for _ in line] for line in numbers]

    def get(self, number: int) -> FeatureBatch:
        """Return batch `number`, counted over all epochs."""
        lines = self.lines(number)
        longest = max(sum(len(row) for row in line) for line in lines)
        return collate(lines, length=longest, dtype=torch.float32)

    def epoch_of(self, number: int) -> float:
        """Return how many epochs batch `number` stands at."""
        return number / max(1, len(self._epoch(0)))

    def in_epochs(self, epochs: int) -> int:
        """Return how many batches whole epochs have."""
        return sum(len(self._epoch(epoch)) for epoch in range(epochs))


def window_numbers(cursor: int, *, rank: int, ranks: int, accumulate: int, last: int | None) -> list[int | None]:
    """Return the batches that one rank takes in the step that begins at `cursor`.

    `last` is the number of batches of the whole run: in its last, short window some entries are None, and a rank takes
    part there with a batch that trains nothing.
    """
    numbers = [cursor + rank * accumulate + i for i in range(accumulate)]
    if last is None or cursor + ranks * accumulate <= last:
        return list(numbers)
    return [number if number < last else None for number in numbers]


def steps_for(batches: int, *, ranks: int, accumulate: int) -> int:
    """Return the optimizer steps that take so many batches, the last window short if need be."""
    return -(-batches // (ranks * accumulate))


def untrained(batch: FeatureBatch) -> FeatureBatch:
    """Return the batch with no slot to train: it keeps a rank in step and adds nothing to loss or gradients."""
    return replace(batch, generated_mask_BT=torch.zeros_like(batch.generated_mask_BT))
