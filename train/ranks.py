"""The processes that a launcher started (`accelerate launch`, `torchrun`), and how they wait for each other."""

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from eyas.data.ranks import Ranks

if TYPE_CHECKING:
    from accelerate import PartialState

# A rank may write replies for days while another has none left; one that dies ends the others through the launcher.
LONGEST_WAIT = timedelta(days=30)


def is_main_rank() -> bool:
    """Return whether this process is the first, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def launched_ranks(*, cpu: bool) -> Ranks:
    """Return this process's place among those launched."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Ranks()
    import torch.distributed

    _state(cpu=cpu)  # starts the processes' group; training keeps its own, short patience there
    patient = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    return Ranks(int(os.environ["RANK"]), count, lambda: torch.distributed.barrier(group=patient))


def main_rank_first(*, cpu: bool) -> AbstractContextManager[Any]:
    """Return a context that the main rank passes before the others; nothing to wait for in a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return nullcontext()
    return _state(cpu=cpu).main_process_first()


def _state(*, cpu: bool) -> "PartialState":
    from accelerate import PartialState

    return PartialState(cpu=cpu)  # without `cpu` it would take CPU ranks for single processes
