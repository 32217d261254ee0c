"""Calls that run in a background thread, one after another, in the order of their submission."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Call = Callable[[], object]
Submit = Callable[[Call], None]


def run_now(call: Call) -> None:
    """Run a call in the calling thread: the ``Submit`` of writers that have no background thread."""
    call()


class BackgroundThread:
    """A daemon thread that runs submitted calls one after another.

    After the first call that fails, all later ones are skipped; the failure is raised by the next submission, or by
    ``finish``.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """Start the thread; a submission blocks while ``capacity`` calls are queued."""
        self._calls: queue.Queue[Call | None] = queue.Queue(capacity)
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __call__(self, call: Call) -> None:
        """Submit a call.

        Raises:
            BaseException: What an earlier call raised.
        """
        self.check()
        self._calls.put(call)

    def finish(self) -> None:
        """Wait until every submitted call has run, and end the thread.

        Raises:
            BaseException: What a call raised.
        """
        self._end()
        self.check()

    def stop(self, after_all: bool = False) -> None:
        """End the thread after the running call, or with ``after_all`` after the queued ones; raise no failure."""
        self._stopped = not after_all
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()

    def check(self) -> None:
        """Raise the failure of a call that ran, if there is one.

        Raises:
            BaseException: What an earlier call raised.
        """
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failure is None and not self._stopped:
                try:
                    call()
                except BaseException as exc:  # raised again in the thread that submits or finishes
                    self._failure = exc
            del call
