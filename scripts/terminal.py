"""A reply in the terminal as it is written: drafted tokens in colour, acceptance and speed below, live."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from eyas.inference.request import Round
from eyas.inference.spelling import Piece

DRAFTED = "green"
NUMBERS = "dim"


class LiveReply:
    """Shows one reply while it grows: whole lines are printed, the line in work stands above the numbers.

    Where stdout is no terminal, text is written plainly and nothing is coloured or redrawn.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.line = Text()
        self.tokens = self.rounds = 0
        self.started = time.perf_counter()
        self.live = Live(console=console, transient=True, refresh_per_second=12) if console.is_terminal else None

    def __enter__(self) -> "LiveReply":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.update(Text(""))
            self.live.stop()
            self.console.print(self.line)
        else:
            self.console.file.write("\n")

    def add(self, made: Round, pieces: list[Piece]) -> None:
        """Show what a round brought."""
        self.tokens += len(made.tokens)
        self.rounds += made.drafted > 0 or self.tokens > 1
        for piece in pieces:
            if self.live is None:
                self.console.file.write(piece.text)
                continue
            *whole, last = piece.text.split("\n")
            for text in whole:
                self.line.append(text, style=DRAFTED if piece.drafted else "")
                self.live.console.print(self.line)
                self.line = Text()
            self.line.append(last, style=DRAFTED if piece.drafted else "")
        if self.live is None:
            self.console.file.flush()
        else:
            self.live.update(Group(self.line, Text(self._numbers(), style=NUMBERS)))

    def _numbers(self) -> str:
        tau = (self.tokens - 1) / self.rounds if self.rounds else 1.0
        return f"tau {tau:.2f} | {self.tokens / (time.perf_counter() - self.started):.1f} tokens/s"
