"""SIGTERM (and SIGINT) as a request: training finishes its step, saves and stops, instead of dying in the middle."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a signal asked this process to stop, and which."""

    def __init__(self) -> None:
        self.signal_name = ""

    def __bool__(self) -> bool:
        return bool(self.signal_name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name:  # asked twice: the user will not wait for the step to end
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


class StoppedBySignal(Exception):
    """Training was asked to stop and has saved its state; exit code 143 for SIGTERM, 130 for SIGINT."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130}


@contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """Collect stop signals for the duration of the block; the former handlers come back after it."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals only ever reach the main thread
        yield request
        return
    former = {number: signal.signal(number, request._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
