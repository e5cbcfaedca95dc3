"""Answering: every request exactly once, whatever order replies finish in, through kills and over processes.

Replies lie in numbered part files, each written whole and renamed, so a kill loses at most the replies of one part and
none is ever half there. A reply is known by its request's id and prompt: what is on disk is not asked again, whichever
of however many processes wrote it.

In half precision a decoded reply depends, by rounding, on what it is decoded beside. `group` takes that out: requests
are decoded in groups of so many, always the same ones together, and a group that was broken off is decoded again whole.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from eyas.data.backends import Backend, Reply, Request
from eyas.data.corpus import write_atomically
from eyas.data.ranks import Ranks

Progress = Callable[[str, int, int, int], None]  # phase, replies done, replies in all, tokens written in this call


@dataclass(frozen=True)
class _Entry:
    """One line of a part file."""

    id: str
    prompt: str
    token_ids: tuple[int, ...]
    finish_reason: str
    exact: bool
    fault: str


class ReplyLog:
    """The part files of one folder; each rank appends its own, `rows_per_part` replies to a file."""

    def __init__(self, folder: Path, *, rows_per_part: int, rank: int = 0) -> None:
        self.folder = folder
        self.rows_per_part = rows_per_part
        self.rank = rank
        self.pending: list[_Entry] = []
        folder.mkdir(parents=True, exist_ok=True)
        numbers = (int(path.stem.rpartition("-")[2]) for path in folder.glob(f"part-{rank:03d}-*.jsonl"))
        self.next_part = max(numbers, default=-1) + 1

    def add(self, reply: Reply) -> None:
        """Keep a reply; writes a part when enough have gathered."""
        entry = _Entry(
            reply.request.id, _prompt_key(reply.request), reply.token_ids, reply.finish_reason, reply.exact, reply.fault
        )
        self.pending.append(entry)
        if len(self.pending) >= self.rows_per_part:
            self.close()

    def close(self) -> None:
        """Write the pending replies as one part."""
        if not self.pending:
            return
        text = "".join(json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in self.pending)
        write_atomically(self.folder / f"part-{self.rank:03d}-{self.next_part:05d}.jsonl", text)
        self.next_part += 1
        self.pending = []

    def read(self, requests: list[Request]) -> dict[str, Reply]:
        """Return the replies to these requests that are in finished parts, of every rank, by request id."""
        asked = {(request.id, _prompt_key(request)): request for request in requests}
        replies = {}
        for part in sorted(self.folder.glob("part-*.jsonl")):
            with part.open(encoding="utf-8") as file:
                for line in file:
                    entry = _Entry(**json.loads(line))
                    request = asked.get((entry.id, entry.prompt))
                    if request is not None:
                        ids = tuple(entry.token_ids)
                        replies[entry.id] = Reply(request, ids, entry.finish_reason, entry.exact, entry.fault)
        return replies

    def sweep(self) -> None:
        """Delete what a killed process left half-written; call it while nobody writes."""
        for path in self.folder.glob(".part-*.tmp"):
            path.unlink()


def answer_all(
    backend: Backend, requests: list[Request], log: ReplyLog, ranks: Ranks, *, group: int = 0, phase: str,
    progress: Progress,
) -> list[Reply]:  # fmt: skip
    """Return one reply per request, in request order, asking the backend only for those not yet in the log.

    Every rank must call this with the same requests; each asks for its own share and all get all replies. `group` 0
    asks for all that is missing at once.
    """
    done = log.read(requests)
    if ranks.first:
        log.sweep()
    ranks.wait()  # nobody writes before everybody has read: all ranks divide the same rest
    if group:
        groups = [requests[start : start + group] for start in range(0, len(requests), group)]
        broken = [one for one in groups if any(request.id not in done for request in one)]
        asked = broken[ranks.rank :: ranks.count]
    else:
        asked = [ranks.share(request for request in requests if request.id not in done)]
    finished = len(done)
    total = finished + sum(request.id not in done for one in asked for request in one)
    progress(phase, finished, total, 0)
    try:
        for one in asked:
            for reply in backend.run(one):
                if reply.request.id in done:
                    continue
                log.add(reply)
                finished += 1
                progress(phase, finished, total, len(reply.token_ids))
    finally:
        log.close()
    ranks.wait()
    done = log.read(requests)
    return [done[request.id] for request in requests]


def _prompt_key(request: Request) -> str:
    return hashlib.sha256(" ".join(map(str, request.prompt_ids)).encode()).hexdigest()[:16]
