"""The one exception that means "the user gave something wrong".

The command line turns a `UserError` into one sentence and exit code 2; every other exception is a fault of ours and
keeps its traceback. The message always says what was given, what is allowed, and what to do.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a recipe, a path or an argument."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the allowed word closest to `given`, or an empty string when none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
