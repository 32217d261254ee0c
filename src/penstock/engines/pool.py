"""Threads that work on blocks, and the channel that hands finished blocks to the consumer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any

from penstock.plan import Block

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # how long a close waits for a worker that is inside a user's function


class Closed(Exception):
    """The other side is gone."""


class ThreadPool:
    """So many daemon threads, each with a work function of its own, made inside the thread."""

    def __init__(self, name: str, workers: int, make: Callable[[], Callable[[Block], Block]]) -> None:
        """Start the threads."""
        self.workers = workers
        self._jobs: SimpleQueue[tuple[Block, Future[Block]] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(make,), name=f"penstock {name} {i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, block: Block) -> Future[Block]:
        """Have ``block`` worked on.

        Raises:
            Closed: the pool takes nothing more.
        """
        future: Future[Block] = Future()
        with self._lock:  # a job behind the stop marks would never be answered
            if self._closed:
                raise Closed
            self._jobs.put((block, future))
        return future

    def _work(self, make: Callable[[], Callable[[Block], Block]]) -> None:
        work: Callable[[Block], Block] | None = None
        while (job := self._jobs.get()) is not None:
            block, future = job
            if self._closed:
                future.cancel()
                continue
            try:
                work = work or make()
                future.set_result(work(block))
            except BaseException as exc:  # it belongs to whoever waits for the block
                future.set_exception(exc)
            del job, block, future  # an idle worker holds no samples

    def stop(self) -> None:
        """Let nothing new begin."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, until: float) -> list[str]:
        """Wait for the threads; the names of those still inside a function at ``until``."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]


def in_order(blocks: Iterator[Block], pool: ThreadPool, ahead: Callable[[], int]) -> Iterator[Block]:
    """The blocks as the pool finishes them, in the order they came; at most ``ahead()`` are under way."""
    pending: deque[Future[Block]] = deque()
    for block in blocks:
        pending.append(pool.submit(block))
        while pending and (len(pending) >= ahead() or pending[0].done()):
            yield _result(pending.popleft())
    while pending:
        yield _result(pending.popleft())


def as_finished(blocks: Iterator[Block], pool: ThreadPool, ahead: Callable[[], int]) -> Iterator[Block]:
    """The blocks as the pool finishes them, whichever comes first."""
    finished: SimpleQueue[Future[Block]] = SimpleQueue()
    pending = 0
    for block in blocks:
        pool.submit(block).add_done_callback(finished.put)
        pending += 1
        while pending and (pending >= ahead() or not finished.empty()):
            yield _result(finished.get())
            pending -= 1
    for _ in range(pending):
        yield _result(finished.get())


def _result(future: Future[Block]) -> Block:
    try:
        return future.result()
    except CancelledError:
        raise Closed from None


class Channel:
    """A short queue between the driving thread and the consumer, which either side can close."""

    def __init__(self, room: int) -> None:
        """Hold at most ``room`` blocks."""
        self.room = room
        self._blocks: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, block: Any) -> None:
        """Pass a block on, waiting for room.

        Raises:
            Closed: the consumer is gone.
        """
        with self._changed:
            while len(self._blocks) >= self.room and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Closed
            self._blocks.append(block)
            self._changed.notify_all()

    def get(self) -> Any:
        """Take a block, waiting for one.

        Raises:
            Closed: the channel was closed by another thread.
        """
        with self._changed:
            while not self._blocks:
                if self._closed:
                    raise Closed
                self._changed.wait()
            block = self._blocks.popleft()
            self._changed.notify_all()
            return block

    def close(self) -> None:
        """Wake whoever waits and let nothing more through."""
        with self._changed:
            self._closed = True
            self._blocks.clear()
            self._changed.notify_all()


def join_all(threads: list[threading.Thread], pools: list[ThreadPool]) -> None:
    """Wait until everything has ended; a thread stuck in a user's function is named and left as a daemon."""
    until = time.monotonic() + PATIENCE_S
    stuck = [name for pool in pools for name in pool.join(until)]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()) if not stuck else 0.0)
    if stuck:
        log.warning("still inside a function after %.0f s, left behind: %s", PATIENCE_S, ", ".join(stuck))
