"""What the tests of several processes run in each of them: extract the toy corpus of a tiny target.

python -m eyas.tests.data.extract_job FOLDER SECONDS_PER_BATCH   with RANK and WORLD_SIZE set
"""

import os
import sys
import time
from pathlib import Path

import torch

from eyas.data.encode import encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.forward_rows import Example
from eyas.tests.data.toys import spec_of
from eyas.tests.toys import tiny_target

ROWS, SHARDS = 29, 10


def job_examples() -> list[Example]:
    """Return 29 random rows of 2 to 60 tokens."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for number in range(ROWS):
        length = int(torch.randint(2, 61, (1,), generator=generator))
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        rows.append((f"row-{number}", encode_reply(ids[: length // 2], ids[length // 2 :])))
    return rows


def run_job(folder: Path, *, rank: int, ranks: int, seconds_per_batch: float = 0.0) -> None:
    """Extract as one of several processes, slowed down so that there is time to be killed."""
    torch.set_num_threads(1)
    target = tiny_target()
    plan = ExtractionPlan(max_length=64, tokens_per_batch=100, rows_per_shard=3)
    spec = spec_of(target, state_dtype="bfloat16")

    def progress(_done: int, _total: int, tokens: int) -> None:
        time.sleep(seconds_per_batch if tokens else 0.0)

    extract(
        target, job_examples(), plan, folder, spec=spec, progress=progress, rank=rank, ranks=ranks, stall_seconds=60
    )


if __name__ == "__main__":
    run_job(
        Path(sys.argv[1]),
        rank=int(os.environ.get("RANK", "0")),
        ranks=int(os.environ.get("WORLD_SIZE", "1")),
        seconds_per_batch=float(sys.argv[2]),
    )
