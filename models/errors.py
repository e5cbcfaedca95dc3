"""The exceptions that are no fault of ours: "the user gave something wrong" and "a check came out badly".

The command line turns a `UserError` into one sentence and exit code 2, a `CheckFailed` into one and exit code 1; every
other exception is a fault of ours and keeps its traceback. The message always says what was given, what is allowed, and
what to do.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a recipe, a path or an argument."""


class CheckFailed(Exception):
    """A check that came out badly although nothing was given wrongly: too little disk, a broken contract."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the allowed word closest to `given`, or an empty string when none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
