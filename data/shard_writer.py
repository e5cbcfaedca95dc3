"""Writing shards behind the forward passes: one thread, one shard under way and none waiting, errors handed back."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class ShardWriter:
    """Runs jobs one after the other in a thread; `submit` waits while one is under way, so memory stays bounded."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer")
        self._job: Future[None] | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job once the one before it is done; raises what that one raised."""
        self.wait()
        self._job = self._pool.submit(job)

    def wait(self) -> None:
        """Wait for the job under way; raises what it raised."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._pool.shutdown(wait=True)
