"""Synthesis as one or several processes of the test's own, which can be killed at any moment."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eyas.train import __main__ as train_main

Process = multiprocessing.process.BaseProcess


def be_rank(rank: int, count: int, port: int, arguments: list[str], said: Path) -> None:
    """Be one of `count` ranks of `python -m eyas.train`, as a launcher would start it; what it says goes to a file."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if count > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
    with said.open("a") as sys.stderr:
        code = train_main.main(arguments)
    os._exit(code)  # what torch keeps open must not delay the end


def start(recipe: Path, folder: Path, *, processes: int) -> list[Process]:
    """Start the synthesize stage on as many ranks, forked from a process that has the libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eyas.train.stage_synthesize", "eyas.tests.train.killed_run"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(recipe), "--out", str(folder), "--stage", "synthesize"]
    started = []
    for rank in range(processes):
        said = folder.with_name(f"{folder.name}-rank{rank}.txt")
        process = context.Process(target=be_rank, args=(rank, processes, port, arguments, said))
        process.start()
        started.append(process)
    return started


def parts(folder: Path) -> int:
    """Return how many part files there are."""
    return len(list((folder / "corpus").glob("*/part-*.jsonl")))


def kill_at(started: Sequence[Process], folder: Path, *, part: int, delay: float) -> None:
    """Kill the processes (SIGKILL) once there are `part` part files, `delay` seconds later."""
    deadline = time.monotonic() + 60
    while parts(folder) < part:
        assert time.monotonic() < deadline, "it never came so far"
        assert any(process.is_alive() for process in started), "it ended before it could be killed"
        time.sleep(0.001)
    time.sleep(delay)
    for process in started:
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
    for process in started:
        process.join(timeout=30)
        assert process.exitcode == -signal.SIGKILL, "it ended before it could be killed"


def finish(started: Sequence[Process], folder: Path) -> None:
    """Wait until the processes end well."""
    for rank, process in enumerate(started):
        process.join(timeout=120)
        said = folder.with_name(f"{folder.name}-rank{rank}.txt")
        assert process.exitcode == 0, said.read_text()
