"""Which rows go into which batch: the same plan for the same seed and epoch, on every rank and after every restart."""

import torch

from eyas.models.errors import UserError


def plan_epoch(
    lengths: list[int], *, line_length: int, lines_per_batch: int, packed: bool, seed: int, epoch: int
) -> list[list[list[int]]]:
    """Return the batches of one epoch: batches of lines of row indices; every row appears exactly once.

    Packed lines are filled first-fit in shuffled order; otherwise a line is one row. Raises UserError for a row that
    is longer than a line.
    """
    too_long = [i for i, length in enumerate(lengths) if length > line_length]
    if too_long:
        raise UserError(
            f"row {too_long[0]} has {lengths[too_long[0]]} tokens, more than train.line_length = {line_length}; "
            "raise it to the longest row."
        )
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    lines = _pack(order, lengths, line_length) if packed else [[i] for i in order]
    lines = [lines[i] for i in torch.randperm(len(lines), generator=generator).tolist()]
    return [lines[i : i + lines_per_batch] for i in range(0, len(lines), lines_per_batch)]


def _pack(order: list[int], lengths: list[int], line_length: int, *, open_lines: int = 64) -> list[list[int]]:
    """Return lines filled first-fit, keeping at most `open_lines` lines open."""
    closed: list[list[int]] = []
    open_: list[tuple[list[int], int]] = []
    for row in order:
        for k, (line, used) in enumerate(open_):
            if used + lengths[row] <= line_length:
                line.append(row)
                open_[k] = (line, used + lengths[row])
                break
        else:
            open_.append(([row], lengths[row]))
            if len(open_) > open_lines:
                fullest = max(range(len(open_)), key=lambda k: open_[k][1])
                closed.append(open_.pop(fullest)[0])
    return closed + [line for line, _ in open_]
