"""Pools of worker threads that can be resized while they work, and the channel that passes blocks to the consumer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from penstock.engines.meter import Meter, Meters
from penstock.plan import Block
from penstock.storage.retry import wanted

log = logging.getLogger(__name__)

WORKER_JOIN_TIMEOUT_S = 5.0  # how long a close waits for a worker that is inside a user's function
ABORT_TIMEOUT_S = 1.0  # how long it waits before it kills a worker that can be killed


BlockParts = Iterator[tuple[Block, bool]]  # the parts of one block, each with whether another one follows
BlockJob = Block | BlockParts  # a block to start, or the remaining parts of a block that was started
BlockResult = tuple[Block, BlockParts | None]  # a finished part, and the remaining ones
_Task = tuple[BlockJob, "Future[BlockResult]"]
_CLOSED = object()  # in the queue of a channel: it is closed
_thread = threading.local()


class Closed(Exception):
    """The pool or the channel is closed."""


@contextmanager
def working_for(is_closed: Callable[[], bool]) -> Iterator[None]:
    """Within the context, this thread works for a run; other runs that it starts end when ``is_closed()``."""
    _thread.is_closed = is_closed
    try:
        yield
    finally:
        del _thread.is_closed


def check_open() -> None:
    """Check that the run that this thread works for, or locates samples for, if there is one, is open.

    Raises:
        Closed: Its consumer is gone.
    """
    is_closed: Callable[[], bool] | None = getattr(_thread, "is_closed", None)
    if not wanted() or (is_closed is not None and is_closed()):
        raise Closed


class ReassignJob(Exception):
    """A worker is gone and replacing it may take long: another worker must continue ``job``."""

    def __init__(self, job: BlockJob) -> None:
        super().__init__(job)
        self.job = job


class WorkerProxy(Protocol):
    """Does the work of one worker thread, itself or through a remote worker.

    It is created, used and closed in that thread.
    """

    def prepare(self) -> None:
        """Get ready before the first block, so that no block waits for a worker that is starting."""

    def __call__(self, job: BlockJob) -> BlockResult:
        """Process a block until its first part is finished, or process the next part of a block."""

    def cpu_seconds(self) -> float:
        """Return the processor time used so far."""

    def close(self) -> None:
        """Release everything."""

    def abort(self) -> None:
        """Make the current call return at once, if that is possible; called from another thread."""

    def overdue_error(self, timeout_s: float) -> Exception | None:
        """Return an error if the worker has spent more than ``timeout_s`` on one item; called from another thread."""


class _Stopwatch:
    """Adds up the time in which a thread is inside its ``with`` block; can be read while it runs."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None
        self._inside = 0  # threads: one for each run that uses the pool
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._since is None:
                self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._since is not None:
                since, self._since = self._since, None
                self._total += time.perf_counter() - since

    def read(self, now: float) -> float:
        since = self._since
        return self._total + (now - since if since is not None else 0.0)


class Pool:
    """Daemon threads, each with its own worker proxy; their number can change while they work."""

    def __init__(self, name: str, make_proxy: Callable[[int], WorkerProxy], meter: Meter, meters: Meters) -> None:
        """Start nothing yet: ``resize`` does, once the run knows the pool that it has to stop.

        Args:
            name: Part of the names of the threads.
            make_proxy: Creates the proxy of a worker from its number, which is reused once the worker is gone.
            meter: Counts what this pool does.
            meters: The meters of the run, with its observer.
        """
        self.awaiting_input = _Stopwatch()
        self.meter = meter
        self._name, self._make_proxy, self._meters = name, make_proxy, meters
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.RLock()  # reentrant: the garbage collector may close the run from any line of a worker
        self._threads: dict[int, threading.Thread] = {}
        self._proxies: dict[int, WorkerProxy] = {}
        self._ending = 0
        self._current: dict[int, Future[BlockResult]] = {}  # the block that each worker is working on
        self._abandoned: set[int] = set()  # workers that hang and are no longer waited for
        self._busy_s, self._busy_until = 0.0, time.perf_counter()  # worker-seconds of work until that moment

    def busy(self) -> float:
        """Return the worker-seconds spent on blocks so far, including those in progress."""
        with self._lock:
            return self._busy_s + len(self._current) * (time.perf_counter() - self._busy_until)

    def _set_current(self, number: int, future: Future[BlockResult] | None) -> None:
        """Record which block a worker is working on."""
        with self._lock:
            now = time.perf_counter()
            self._busy_s += len(self._current) * (now - self._busy_until)
            self._busy_until = now
            if future is not None:
                self._current[number] = future
            else:
                self._current.pop(number, None)

    def fail_overdue(self, timeout_s: float) -> None:
        """Fail the blocks of workers that have spent more than ``timeout_s`` on one item, and abandon the workers."""
        for number, proxy in list(self._proxies.items()):
            error = None if number in self._abandoned else proxy.overdue_error(timeout_s)
            future = self._current.get(number)
            if error is not None and future is not None and not future.done():
                self._abandoned.add(number)
                self.meter.timeouts += 1
                self._meters.notify("timeout", self.meter, worker=number, problem=str(error))
                with suppress(InvalidStateError):  # the worker has finished at this very moment
                    future.set_exception(error)

    @property
    def size(self) -> int:
        """The number of workers, without those that are about to end."""
        return len(self._threads) - self._ending

    def resize(self, workers: int) -> None:
        """Set the number of workers; a surplus worker ends once it is idle."""
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
                self._ending += 1
                self._tasks.put(None)
            if not self.meter.sizes or self.meter.sizes[-1][1] != workers:
                self.meter.workers = workers
                self.meter.sizes.append((self._meters.seconds, workers))
                self._meters.notify("workers", self.meter, items=workers)

    def submit(self, job: BlockJob) -> Future[BlockResult]:
        """Queue a block, or the next part of one.

        Raises:
            Closed: The pool accepts nothing more.
        """
        future: Future[BlockResult] = Future()
        with self._lock:
            if not self._closed:
                self._tasks.put((job, future))
            if self._closed:  # a job queued after the stop markers would never be processed
                raise Closed
        return future

    def owns(self, thread: threading.Thread) -> bool:
        """Return whether a thread belongs to this pool."""
        return thread in self._threads.values()

    def _work(self, number: int) -> None:
        """Run worker ``number``: process tasks until it receives a stop marker."""
        with working_for(lambda: self._closed):
            self._process_tasks(number)
        self._end(number)

    def _process_tasks(self, number: int) -> None:
        startup_error = self._create_proxy(number)
        while (task := self._next_task()) is not None:
            job, future = task
            if self._closed or future.cancelled():  # the pool, or the run that queued the block
                future.cancel()
                continue
            if startup_error is not None:
                self._resolve(future, startup_error)
                continue
            self._set_current(number, future)
            reassigned = False
            try:
                self._resolve(future, self._run_timed(number, job))
            except ReassignJob as exc:
                reassigned = True
                self._resubmit(exc.job, future)
            except BaseException as exc:  # raised where the result is awaited
                self._resolve(future, exc)
            self._set_current(number, None)
            del task, job, future  # an idle worker holds no samples
            if reassigned:
                startup_error = self._prepare(self._proxies[number])

    def _create_proxy(self, number: int) -> BaseException | None:
        """Create a worker's proxy; return the error if that fails, to be raised where a result is awaited."""
        try:
            proxy = self._proxies[number] = self._make_proxy(number)
        except BaseException as exc:
            return exc
        return self._prepare(proxy)

    def _prepare(self, proxy: WorkerProxy) -> BaseException | None:
        try:
            proxy.prepare()
        except BaseException as exc:
            return exc
        return None

    def _resubmit(self, job: BlockJob, future: Future[BlockResult]) -> None:
        """Queue a job again, for another worker."""
        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._tasks.put((job, future))

    def _resolve(self, future: Future[BlockResult], result: BlockResult | BaseException) -> None:
        if future.done():  # it has timed out
            return
        with suppress(InvalidStateError):  # the run that queued the block is closed at this very moment
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _next_task(self) -> _Task | None:
        """Wait for a task, and count the wait as starved (for input) or blocked (for a consumer of the output)."""
        begun = time.perf_counter()
        awaited_before = self.awaiting_input.read(begun)
        task = self._tasks.get()
        now = time.perf_counter()
        starved = min(now - begun, self.awaiting_input.read(now) - awaited_before)
        with self._lock:
            self.meter.starved += starved
            self.meter.blocked += now - begun - starved
        return task

    def _run_timed(self, number: int, job: BlockJob) -> BlockResult:
        proxy = self._proxies[number]
        begun, cpu = time.perf_counter(), proxy.cpu_seconds()
        try:
            result = proxy(job)
        finally:
            took, used = time.perf_counter() - begun, proxy.cpu_seconds() - cpu
            with self._lock:
                self.meter.busy += took
                self.meter.cpu += used
        with self._lock:
            self.meter.blocks += 1
            self.meter.inputs += result[0].new_inputs
            self.meter.items += len(result[0])
            self.meter.skips += len(result[0].lineage.skips)
        self._meters.notify("block", self.meter, worker=number, took=took, items=len(result[0]))
        return result

    def _end(self, number: int) -> None:
        proxy = self._proxies.pop(number, None)
        try:
            if proxy is not None:
                proxy.close()
        except Exception:
            log.exception("a worker of %s could not be closed", self._name)
        with self._lock:
            if not self._closed:
                self._threads.pop(number, None)
                self._ending -= 1

    def stop(self) -> None:
        """Accept no more blocks, and start none of those that are queued."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, until: float) -> list[str]:
        """Wait for the threads and abort the workers that can be aborted.

        Returns:
            The names of the threads that are still inside a function at the time ``until``.
        """
        stuck = [thread.name for number, thread in self._threads.items() if number in self._abandoned]
        threads = [thread for number, thread in self._threads.items() if number not in self._abandoned]
        abort_at = min(until, time.monotonic() + ABORT_TIMEOUT_S)
        for thread in threads:
            _join(thread, abort_at)
        for proxy in list(self._proxies.values()):
            proxy.abort()
        for thread in threads:
            _join(thread, until)
        return stuck + [thread.name for thread in threads if thread.is_alive()]


class PoolShare:
    """One run's use of a pool that other runs may use too: closing it cancels the blocks of this run only."""

    def __init__(self, pool: Pool) -> None:
        self.meter, self.awaiting_input = pool.meter, pool.awaiting_input
        self._pool = pool
        self._pending: set[Future[BlockResult]] = set()
        self._closed = False

    def submit(self, job: BlockJob) -> Future[BlockResult]:
        """Queue a block, or the next part of one.

        Raises:
            Closed: The run or the pool is closed.
        """
        future = self._pool.submit(job)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._closed:
            future.cancel()
            raise Closed
        return future

    def close(self) -> None:
        """Cancel what is queued, and let nothing wait for what is in progress."""
        self._closed = True
        for future in list(self._pending):
            future.cancel()


def map_ordered(blocks: Iterator[Block], pool: Pool | PoolShare, max_pending: Callable[[], int]) -> Iterator[Block]:
    """Yield the pool's results for the blocks, in order; at most ``max_pending()`` blocks are in progress."""
    pending: deque[Future[BlockResult]] = deque()
    for block in _timed_input(blocks, pool):
        pending.append(pool.submit(block))
        del block
        while pending and (len(pending) >= max_pending() or pending[0].done()):
            pool.meter.pending = len(pending)
            yield _take_first(pending, pool)
    while pending:
        pool.meter.pending = len(pending)
        yield _take_first(pending, pool)


def _timed_input(blocks: Iterator[Block], pool: Pool | PoolShare) -> Iterator[Block]:
    """Yield the blocks, and count the time spent waiting for them."""
    while True:
        with pool.awaiting_input:
            block = next(blocks, None)
        if block is None:
            return
        yield block
        del block


def _take_first(pending: deque[Future[BlockResult]], pool: Pool | PoolShare) -> Block:
    """Remove and return the first result, after queueing the next part of its block in its place."""
    block, rest = _wait_for(pending.popleft(), pool)
    if rest is not None:
        pending.appendleft(pool.submit(rest))
    return block


def map_unordered(blocks: Iterator[Block], pool: Pool | PoolShare, max_pending: Callable[[], int]) -> Iterator[Block]:
    """Yield the pool's results for the blocks as they are finished; the parts of one block stay together."""
    finished: SimpleQueue[Future[BlockResult]] = SimpleQueue()
    pending = 0
    for block in _timed_input(blocks, pool):
        pool.submit(block).add_done_callback(finished.put)
        del block
        pending += 1
        while pending and (pending >= max_pending() or not finished.empty()):
            pool.meter.pending = pending
            yield from _all_parts(finished, pool)
            pending -= 1
    while pending:
        pool.meter.pending = pending
        yield from _all_parts(finished, pool)
        pending -= 1


def _all_parts(finished: SimpleQueue[Future[BlockResult]], pool: Pool | PoolShare) -> Iterator[Block]:
    """Yield all parts of the next block that is finished."""
    begun = time.perf_counter()
    future = finished.get()
    pool.meter.awaited += time.perf_counter() - begun
    while True:
        block, rest = _wait_for(future, pool)
        if rest is not None:
            future = pool.submit(rest)
        yield block
        if rest is None:
            return


def _wait_for(future: Future[BlockResult], pool: Pool | PoolShare) -> BlockResult:
    try:
        if future.done():
            return future.result()
        begun = time.perf_counter()
        result = future.result()
        pool.meter.awaited += time.perf_counter() - begun
        return result
    except CancelledError:
        raise Closed from None


class Channel:
    """A short queue between the driver thread and the consumer; either side can close it.

    The interpreter itself locks its queues. With a lock of ``threading``, Ctrl-C in the consumer's thread could leave
    the lock held, or become a RuntimeError.

    Attributes:
        capacity: How many blocks it holds.
        closed: Whether one side has closed it.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        """Hold at most ``capacity()`` blocks."""
        self.capacity = capacity
        self._blocks: SimpleQueue[Any] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()
        self.closed = False

    def put(self, block: Any) -> None:
        """Add a block; wait while the channel is full.

        Raises:
            Closed: The consumer is gone.
        """
        with suppress(Empty):
            self._taken.get_nowait()  # no more entries than blocks
        while self._blocks.qsize() >= self.capacity() and not self.closed:
            with suppress(Empty):
                # With a timeout: the capacity may grow, and nothing is taken.
                self._taken.get(timeout=1.0)
        if self.closed:
            raise Closed
        self._blocks.put(block)

    def get(self) -> Any:
        """Remove and return the oldest block; wait while the channel is empty.

        Raises:
            Closed: Another thread has closed the channel.
        """
        block = _CLOSED if self.closed else self._blocks.get()
        if block is _CLOSED:
            raise Closed
        self._taken.put(None)
        return block

    def close(self) -> None:
        """Discard what is queued and wake both sides."""
        self.closed = True
        with suppress(Empty):
            while True:
                self._blocks.get_nowait()
        self._blocks.put(_CLOSED)
        self._taken.put(None)


def join_all(threads: list[threading.Thread], pools: list[Pool]) -> None:
    """Wait until all threads have ended; log those that are stuck in a user's function, and abandon them."""
    until = time.monotonic() + WORKER_JOIN_TIMEOUT_S
    stuck = [name for pool in pools for name in pool.join(until)]
    for thread in threads:  # they may be waiting for the stuck ones
        _join(thread, time.monotonic() + 0.1 if stuck else until)
    stuck = stuck or [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        log.warning("threads left behind, still inside a user's function: %s", ", ".join(stuck))


def _join(thread: threading.Thread, until: float) -> None:
    with suppress(RuntimeError):  # it was never started: Ctrl-C came first
        thread.join(max(0.0, until - time.monotonic()))
