"""Progress bars on stderr: what is done, how fast, and when it will be finished."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_PER_LINE = 30.0


class Bar:
    """One bar. `update` sets the count and adds units (tokens) to the rate shown behind it.

    Where stderr is no terminal a line is printed every half minute instead of a moving bar.
    """

    def __init__(self, console: Console, unit: str) -> None:
        self.unit = unit
        self.units = 0
        self.started = self.printed = time.perf_counter()
        self.progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2 if console.is_terminal else 0.05,
        )
        self.task: TaskID | None = None
        self.phase = ""

    def update(self, phase: str, done: int, total: int, units: int, note: str = "") -> None:
        """Show `done` of `total` in a phase, unless there is nothing to do; `units` were worked off since last."""
        if total == 0:
            return
        if self.task is None or phase != self.phase:
            self.phase, self.units, self.started = phase, 0, time.perf_counter()
            self.task = self.progress.add_task(phase, total=total, completed=done, rate="")
        self.units += units
        elapsed = time.perf_counter() - self.started
        rate = f"{self.units / elapsed:.0f} {self.unit}/s" if self.units and elapsed > 0.5 else ""
        text = f"{rate} {note}".strip()
        self.progress.update(self.task, completed=done, total=total, rate=text)
        console = self.progress.console
        if not console.is_terminal and time.perf_counter() - self.printed >= SECONDS_PER_LINE:
            self.printed = time.perf_counter()
            console.print(f"  {phase} {done}/{total} {text}".rstrip(), markup=False, soft_wrap=True)


class Reporter:
    """Where a run talks to its user: lines and bars on stderr; silent when asked (tests, --json keeps stdout clean)."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(file=sys.stderr, quiet=quiet, highlight=False, emoji=False)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print an error, even when silent otherwise."""
        Console(file=sys.stderr, highlight=False, emoji=False).print(
            f"error: {text}", style="red", soft_wrap=True, markup=False
        )

    @contextmanager
    def bar(self, unit: str) -> Iterator[Bar]:
        """Show a bar for the duration of a piece of work."""
        bar = Bar(self.console, unit)
        with bar.progress:
            yield bar
