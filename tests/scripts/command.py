"""The `eyas` command as tests call it, in their own process."""

from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """How a command ended: its exit code, stdout and stderr."""

    code: object
    out: str
    err: str


Eyas = Callable[..., Outcome]


def refused(outcome: Outcome) -> str:
    """Return the one sentence that a refused command said."""
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")
