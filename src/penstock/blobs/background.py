"""Calls that run in a background thread, one after another, and a bounded queue between threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")
Call = Callable[[], object]
Submit = Callable[[Call], None]

_POLL_S = 0.01  # between looks at a thread that cannot be joined


def run_now(call: Call) -> None:
    """Run a call in the calling thread: the ``Submit`` of writers that have no background thread."""
    call()


def join_thread(thread: threading.Thread, timeout_s: float = threading.TIMEOUT_MAX) -> None:
    """Wait until a thread has ended, even if Ctrl-C interrupted an earlier wait for it.

    CPython 3.11 and 3.12 take a thread for ended once ``Thread.join`` was interrupted, although it is still running.
    """
    until = time.monotonic() + timeout_s
    while thread in threading.enumerate() and (left := until - time.monotonic()) > 0:
        if thread.is_alive():
            thread.join(min(left, threading.TIMEOUT_MAX))
        else:
            time.sleep(_POLL_S)


class BoundedQueue(Generic[_T]):
    """A queue between threads that Ctrl-C cannot leave locked.

    The lock of ``queue.Queue`` is acquired and released by Python code. An interrupt within that code leaves the lock
    held, and the next operation waits for ever. The two queues of this one are locked by the interpreter itself.
    """

    def __init__(self, capacity: int) -> None:
        self._items: SimpleQueue[_T] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self.make_room(capacity)

    def put(self, item: _T) -> None:
        """Append an item; wait while the queue is full."""
        self._room.get()
        self._items.put(item)

    def put_last(self, item: _T) -> None:
        """Append an item without waiting for room."""
        self._items.put(item)

    def get(self) -> _T:
        """Remove the first item; wait while the queue is empty."""
        item = self._items.get()
        self.make_room(1)
        return item

    def make_room(self, count: int) -> None:
        """Let ``count`` more calls of ``put`` pass."""
        for _ in range(count):
            self._room.put(None)


class BackgroundThread:
    """A daemon thread that runs submitted calls one after another.

    After the first call that fails, all later ones are skipped; the failure is raised by the next submission, or by
    ``finish``.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """Start the thread; a submission blocks while ``capacity`` calls are queued."""
        self._calls: BoundedQueue[Call | None] = BoundedQueue(capacity)
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
        self._calls.put_last(None)
        join_thread(self._thread)

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
