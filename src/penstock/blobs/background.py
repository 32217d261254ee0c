"""Work done in the background, one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]
Submit = Callable[[Job], None]


def run_now(job: Job) -> None:
    """Do a job here and now."""
    job()


class BackgroundThread:
    """A thread that does jobs one after the other; after one that failed, none.

    The failure is raised to whoever gives the next job, or ends the line.
    """

    def __init__(self, name: str, room: int) -> None:
        """Begin; with ``room`` jobs waiting, giving another one waits too."""
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __call__(self, job: Job) -> None:
        """Give it a job."""
        self._check()
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until all is done, and end."""
        self._end()
        self._check()

    def stop(self, after_all: bool = False) -> None:
        """End after the job at hand, or after those that wait too; no failure is raised."""
        self._stopped = not after_all
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is None and not self._stopped:
                try:
                    job()
                except BaseException as exc:  # raised again where somebody can see it
                    self._failure = exc
            del job
