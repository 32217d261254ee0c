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


Parts = Iterator[tuple[Block, bool]]  # of one block, each with whether another one follows
Job = Block | Parts  # a block to begin with, or the parts still to come of one that was begun
Done = tuple[Block, Parts | None]  # a finished block, and the parts still to come


class Closed(Exception):
    """The other side is gone."""


class ThreadPool:
    """So many daemon threads, each with a work function of its own, made inside the thread."""

    def __init__(self, name: str, workers: int, make: Callable[[], Callable[[Job], Done]]) -> None:
        """Start the threads."""
        self.workers = workers
        self._jobs: SimpleQueue[tuple[Job, Future[Done]] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.RLock()  # the collector may close the run from inside any line of these threads
        self._threads = [
            threading.Thread(target=self._work, args=(make,), name=f"penstock {name} {i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[Done]:
        """Have a block, or the next part of one, worked on.

        Raises:
            Closed: the pool takes nothing more.
        """
        future: Future[Done] = Future()
        with self._lock:
            if not self._closed:
                self._jobs.put((job, future))
            if self._closed:  # a job behind the stop marks would never be answered
                raise Closed
        return future

    def owns(self, thread: threading.Thread) -> bool:
        """Whether it is one of this pool's."""
        return thread in self._threads

    def _work(self, make: Callable[[], Callable[[Job], Done]]) -> None:
        work: Callable[[Job], Done] | None = None
        while (task := self._jobs.get()) is not None:
            job, future = task
            if self._closed:
                future.cancel()
                continue
            try:
                work = work or make()
                future.set_result(work(job))
            except BaseException as exc:  # it belongs to whoever waits for the block
                future.set_exception(exc)
            del task, job, future  # an idle worker holds no samples

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
    pending: deque[Future[Done]] = deque()
    for block in blocks:
        pending.append(pool.submit(block))
        while pending and (len(pending) >= ahead() or pending[0].done()):
            yield _first(pending, pool)
    while pending:
        yield _first(pending, pool)


def _first(pending: deque[Future[Done]], pool: ThreadPool) -> Block:
    """The first of them; the next part of it takes its place, and is begun before this one is used."""
    block, rest = _result(pending.popleft())
    if rest is not None:
        pending.appendleft(pool.submit(rest))
    return block


def as_finished(blocks: Iterator[Block], pool: ThreadPool, ahead: Callable[[], int]) -> Iterator[Block]:
    """The blocks as the pool finishes them, whichever comes first."""
    finished: SimpleQueue[Future[Done]] = SimpleQueue()
    pending = 0
    for block in blocks:
        pool.submit(block).add_done_callback(finished.put)
        pending += 1
        while pending and (pending >= ahead() or not finished.empty()):
            done, rest = _result(finished.get())
            pending -= rest is None
            if rest is not None:
                pool.submit(rest).add_done_callback(finished.put)
            yield done
    while pending:
        done, rest = _result(finished.get())
        pending -= rest is None
        if rest is not None:
            pool.submit(rest).add_done_callback(finished.put)
        yield done


def _result(future: Future[Done]) -> Done:
    try:
        return future.result()
    except CancelledError:
        raise Closed from None


class Channel:
    """A short queue between the driving thread and the consumer, which either side can close."""

    def __init__(self, room: Callable[[], int]) -> None:
        """Hold at most ``room()`` blocks."""
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
            while len(self._blocks) >= self.room() and not self._closed:
                self._changed.wait(1.0)  # the collector may have closed it, in this thread, on the way here
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
    if not stuck:  # else they wait for those
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        log.warning("still inside a function after %.0f s, left behind: %s", PATIENCE_S, ", ".join(stuck))
