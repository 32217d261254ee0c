"""Workers that take blocks, in whatever number is wanted at the moment, and the channel that hands blocks on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

from penstock.engines.meter import Meter, Meters
from penstock.plan import Block

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # how long a close waits for a worker that is inside a user's function
ABORT_S = 1.0  # and for one that can be ended


Parts = Iterator[tuple[Block, bool]]  # of one block, each with whether another one follows
Job = Block | Parts  # a block to begin with, or the parts still to come of one that was begun
Done = tuple[Block, Parts | None]  # a finished block, and the parts still to come
_Task = tuple[Job, "Future[Done]"]


class Closed(Exception):
    """The other side is gone."""


class Stranded(Exception):
    """A worker is gone and another may take long: somebody else shall go on with ``job``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.job = job


class WorkerProxy(Protocol):
    """What a worker thread works with; made, used and closed in that thread."""

    def prepare(self) -> None:
        """Get ready: a block should not wait for a worker that is being made."""

    def __call__(self, job: Job) -> Done:
        """Work on a block, or go on with one."""

    def cpu(self) -> float:
        """Seconds of a processor used so far."""

    def close(self) -> None:
        """Let go of everything."""

    def abort(self) -> None:
        """Come back from a block at once, if that can be; called from another thread."""

    def overdue(self, limit: float) -> Exception | None:
        """What to say if it has been at one item for longer than so many seconds; called from another thread."""


class _Clock:
    """Adds up the time in which something goes on; read while it does."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        since, self._since = self._since, None
        if since is not None:
            self._total += time.perf_counter() - since

    def read(self, now: float) -> float:
        since = self._since
        return self._total + (now - since if since is not None else 0.0)


class Pool:
    """So many daemon threads, each with a hand of its own; how many can change while they work."""

    def __init__(
        self, name: str, workers: int, make: Callable[[int], WorkerProxy], meter: Meter, meters: Meters
    ) -> None:
        """Start the threads; ``make`` is given the worker's number, which is free again when the worker is gone."""
        self.asking = _Clock()  # while the pool asks for more input
        self.meter = meter
        self._name, self._make, self._meters = name, make, meters
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.RLock()  # the collector may close the run from inside any line of these threads
        self._threads: dict[int, threading.Thread] = {}
        self._hands: dict[int, WorkerProxy] = {}
        self._leaving = 0
        self._now: dict[int, Future[Done]] = {}  # what each worker has in hand
        self._gone: set[int] = set()  # workers nobody waits for any more
        self._area, self._at = 0.0, time.perf_counter()  # worker-seconds in hand until then
        self.resize(workers)

    def busy(self) -> float:
        """Worker-seconds spent on blocks so far, this moment included."""
        with self._lock:
            return self._area + len(self._now) * (time.perf_counter() - self._at)

    def _hold(self, number: int, future: Future[Done] | None) -> None:
        """Note what a worker has in hand."""
        with self._lock:
            now = time.perf_counter()
            self._area += len(self._now) * (now - self._at)
            self._at = now
            if future is not None:
                self._now[number] = future
            else:
                self._now.pop(number, None)

    def give_up_after(self, limit: float) -> None:
        """Fail the blocks of workers that have been at one item for longer; such a worker is left to itself."""
        for number, hand in list(self._hands.items()):
            problem = None if number in self._gone else hand.overdue(limit)
            future = self._now.get(number)
            if problem is not None and future is not None and not future.done():
                self._gone.add(number)
                self.meter.timeouts += 1
                self._meters.tell("timeout", self.meter, worker=number, problem=str(problem))
                with suppress(InvalidStateError):  # it came back at this very moment
                    future.set_exception(problem)

    @property
    def size(self) -> int:
        """How many workers there are, but for those on their way out."""
        return len(self._threads) - self._leaving

    def resize(self, workers: int) -> None:
        """Have so many workers from now on; one too many leaves when it has nothing to do."""
        with self._lock:
            if self._closed:
                return
            while self.size < workers:
                number = next(n for n in range(len(self._threads) + 1) if n not in self._threads)
                thread = threading.Thread(
                    target=self._work, args=(number,), name=f"penstock {self._name} {number}", daemon=True
                )
                self._threads[number] = thread
                thread.start()
            while self.size > workers:
                self._leaving += 1
                self._tasks.put(None)
            if not self.meter.sizes or self.meter.sizes[-1][1] != workers:
                self.meter.workers = workers
                self.meter.sizes.append((self._meters.seconds, workers))
                self._meters.tell("workers", self.meter, items=workers)

    def submit(self, job: Job) -> Future[Done]:
        """Have a block, or the next part of one, worked on.

        Raises:
            Closed: the pool takes nothing more.
        """
        future: Future[Done] = Future()
        with self._lock:
            if not self._closed:
                self._tasks.put((job, future))
            if self._closed:  # a job behind the stop marks would never be answered
                raise Closed
        return future

    def owns(self, thread: threading.Thread) -> bool:
        """Whether it is one of this pool's."""
        return thread in self._threads.values()

    def _work(self, number: int) -> None:
        trouble = self._prepared(number)
        while (task := self._next()) is not None:
            job, future = task
            if self._closed:
                future.cancel()
                continue
            if trouble is not None:
                self._settle(future, trouble)
                continue
            self._hold(number, future)
            stranded = False
            try:
                self._settle(future, self._timed(number, job))
            except Stranded as exc:
                stranded = True
                self._again(exc.job, future)
            except BaseException as exc:  # it belongs to whoever waits for the block
                self._settle(future, exc)
            self._hold(number, None)
            del task, job, future  # an idle worker holds no samples
            if stranded:
                trouble = self._ready(self._hands[number])
        self._leave(number)

    def _prepared(self, number: int) -> BaseException | None:
        """Make the worker's hand; what went wrong belongs to whoever waits for a block."""
        try:
            hand = self._hands[number] = self._make(number)
        except BaseException as exc:
            return exc
        return self._ready(hand)

    def _ready(self, hand: WorkerProxy) -> BaseException | None:
        try:
            hand.prepare()
        except BaseException as exc:
            return exc
        return None

    def _again(self, job: Job, future: Future[Done]) -> None:
        """Have somebody else go on with it."""
        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._tasks.put((job, future))

    def _settle(self, future: Future[Done], result: Done | BaseException) -> None:
        if future.done():  # somebody lost patience with it
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _next(self) -> _Task | None:
        """Wait for a task, noting what for: input, or somebody to take what is finished."""
        begun = time.perf_counter()
        asked = self.asking.read(begun)
        task = self._tasks.get()
        now = time.perf_counter()
        starved = min(now - begun, self.asking.read(now) - asked)
        with self._lock:
            self.meter.starved += starved
            self.meter.blocked += now - begun - starved
        return task

    def _timed(self, number: int, job: Job) -> Done:
        hand = self._hands[number]
        begun, cpu = time.perf_counter(), hand.cpu()
        try:
            done = hand(job)
        finally:
            took, used = time.perf_counter() - begun, hand.cpu() - cpu
            with self._lock:
                self.meter.busy += took
                self.meter.cpu += used
        with self._lock:
            self.meter.blocks += 1
            self.meter.inputs += done[0].inputs - done[0].begin
            self.meter.items += len(done[0])
            self.meter.skips += len(done[0].skips)
        self._meters.tell("block", self.meter, worker=number, took=took, items=len(done[0]))
        return done

    def _leave(self, number: int) -> None:
        hand = self._hands.pop(number, None)
        try:
            if hand is not None:
                hand.close()
        except Exception:
            log.exception("a worker of %s could not be closed", self._name)
        with self._lock:
            if not self._closed:
                self._threads.pop(number, None)
                self._leaving -= 1

    def stop(self) -> None:
        """Let nothing new begin."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, until: float) -> list[str]:
        """Wait for the threads, ending what can be ended; the names of those still inside a function at ``until``."""
        stuck = [thread.name for number, thread in self._threads.items() if number in self._gone]
        threads = [thread for number, thread in self._threads.items() if number not in self._gone]
        soon = min(until, time.monotonic() + ABORT_S)
        for thread in threads:
            thread.join(max(0.0, soon - time.monotonic()))
        for hand in list(self._hands.values()):
            hand.abort()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return stuck + [thread.name for thread in threads if thread.is_alive()]


def in_order(blocks: Iterator[Block], pool: Pool, ahead: Callable[[], int]) -> Iterator[Block]:
    """The blocks as the pool finishes them, in the order they came; at most ``ahead()`` are under way."""
    pending: deque[Future[Done]] = deque()
    for block in _asked_for(blocks, pool):
        pending.append(pool.submit(block))
        del block
        while pending and (len(pending) >= ahead() or pending[0].done()):
            pool.meter.pending = len(pending)
            yield _first(pending, pool)
    while pending:
        pool.meter.pending = len(pending)
        yield _first(pending, pool)


def _asked_for(blocks: Iterator[Block], pool: Pool) -> Iterator[Block]:
    """The blocks, with the time that waiting for them takes counted as asking."""
    while True:
        with pool.asking:
            block = next(blocks, None)
        if block is None:
            return
        yield block
        del block


def _first(pending: deque[Future[Done]], pool: Pool) -> Block:
    """The first of them; the next part of it takes its place, and is begun before this one is used."""
    block, rest = _result(pending.popleft(), pool)
    if rest is not None:
        pending.appendleft(pool.submit(rest))
    return block


def as_finished(blocks: Iterator[Block], pool: Pool, ahead: Callable[[], int]) -> Iterator[Block]:
    """The blocks as the pool finishes them, whichever comes first; the parts of one come together."""
    finished: SimpleQueue[Future[Done]] = SimpleQueue()
    pending = 0
    for block in _asked_for(blocks, pool):
        pool.submit(block).add_done_callback(finished.put)
        del block
        pending += 1
        while pending and (pending >= ahead() or not finished.empty()):
            pool.meter.pending = pending
            yield from _whole(finished, pool)
            pending -= 1
    while pending:
        pool.meter.pending = pending
        yield from _whole(finished, pool)
        pending -= 1


def _whole(finished: SimpleQueue[Future[Done]], pool: Pool) -> Iterator[Block]:
    begun = time.perf_counter()
    future = finished.get()
    pool.meter.awaited += time.perf_counter() - begun
    while True:
        block, rest = _result(future, pool)
        if rest is not None:
            future = pool.submit(rest)
        yield block
        if rest is None:
            return


def _result(future: Future[Done], pool: Pool) -> Done:
    try:
        if future.done():
            return future.result()
        begun = time.perf_counter()
        done = future.result()
        pool.meter.awaited += time.perf_counter() - begun
        return done
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


def join_all(threads: list[threading.Thread], pools: list[Pool]) -> None:
    """Wait until everything has ended; a thread stuck in a user's function is named and left as a daemon."""
    until = time.monotonic() + PATIENCE_S
    stuck = [name for pool in pools for name in pool.join(until)]
    for thread in threads:  # they may wait for those
        thread.join(0.1 if stuck else max(0.0, until - time.monotonic()))
    stuck = stuck or [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        log.warning("left behind, still inside a function: %s", ", ".join(stuck))
