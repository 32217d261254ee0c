"""The local engine: a pool of threads or processes for each segment, ordered and bounded, that leaves nothing behind.

The intended behaviour:
- success: every block is delivered; all threads and processes have ended before the iteration does;
- failure: the samples before the failing one are delivered, then its error is raised and the workers end;
- a worker process dies: it is replaced and its block is processed again; the stream does not change;
- close, Ctrl-C or a forgotten iterator: no new block begins, the blocks in progress are finished and discarded, and the
  workers end. A thread that does not return from a user's function is named in the log and left as a daemon; a process
  is killed.
Any deviation is a bug. A plan that only reads runs in the caller's thread.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from penstock.engines.cursor import Start
from penstock.engines.devices import assign_devices, with_device_copies
from penstock.engines.flow import COLUMN_BLOCK_BYTES, COLUMN_BLOCK_ROWS, BlockSizer, Each, Locate, SizeLimit, flow
from penstock.engines.local.heartbeat import Heartbeat
from penstock.engines.local.pool import (
    BlockJob,
    BlockResult,
    Channel,
    Closed,
    Pool,
    PoolShare,
    WorkerProxy,
    join_all,
    map_ordered,
    map_unordered,
    working_for,
)
from penstock.engines.local.process_proxy import ProcessPayload
from penstock.engines.local.supervisor import Supervisor
from penstock.engines.local.worker_proxy import RemoteWorkerProxy, SegmentPayload
from penstock.engines.meter import Meter, Meters
from penstock.engines.program import Program
from penstock.engines.segments import DEFAULT_RESOURCES, Segment, prepare, run_segment
from penstock.errors import EngineError, StageError
from penstock.order import Order
from penstock.plan import Block, Context, Place, estimate_nbytes, size_in_bytes
from penstock.plan.values import available_cores

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_READY_BLOCKS = 4  # finished blocks that wait for the consumer: enough to cover an uneven stage
MEMORY_BYTES = 1_000_000_000  # for blocks in progress, by default
BLOCK_BYTES = 2_000_000  # stored bytes of a block: passing it on costs 0.06 ms in this thread, 0.4 ms to a worker
OUTPUT_BLOCK_BYTES = 4_000_000  # bytes that a block may grow to: two per worker are in progress, and four wait
FIRST_BLOCK_SAMPLES = 4  # samples of a block until their cost is known
MAX_THREADS = 32  # of a pool without ``workers=``: most threads wait for something
MAX_THREADS_SHARED = 4  # the same, if other processes run the same plan at the same time


def run(
    program: Program,
    order: Order | None,
    epoch: int,
    start: Start,
    meters: Meters,
    *,
    ordered: bool = True,
    pools: PooledRun | None = None,
) -> Iterator[Block]:
    """Run a plan from ``start``, and return an iterator over its finished blocks.

    Args:
        program: The plan with its sources open.
        order: The order of the epoch; None for a stream.
        epoch: The number of the epoch.
        start: Where the run begins.
        meters: What the run measures about itself.
        ordered: Blocks are delivered in order, not as they are finished.
        pools: The run whose pools this one uses, from ``shared_pools``; by default it has its own.

    Raises:
        EngineError: A stage requests devices that this machine does not have, or cannot be sent to a process.
    """
    if pools is not None:
        return pools.guest(program, epoch, ordered, meters).blocks(order, start)
    options = program.plan.engine
    segments = [segment for level in program.levels for segment in level.segments]
    if not any(segment.needs_pool for segment in segments):
        sizer = BlockSizer(max_stored_bytes=BLOCK_BYTES)
        if program.columnar:
            sizer = BlockSizer(max_samples=COLUMN_BLOCK_ROWS, max_stored_bytes=COLUMN_BLOCK_BYTES)
        return flow(program, order, epoch, start, _inline(program, epoch, meters), sizer, meters)
    sharers = options.get("sharers", 1)
    if sharers > 1 and all(segment.resources in (None, DEFAULT_RESOURCES) for segment in segments):
        # As small as for a pool: the consumer waits for each block.
        sizer = BlockSizer(count=1, max_samples=FIRST_BLOCK_SAMPLES)
        return flow(program, order, epoch, start, _inline(program, epoch, meters, sizer), sizer, meters)
    return _pooled_run(program, epoch, meters, ordered).blocks(order, start)


def shared_pools(program: Program, meters: Meters) -> PooledRun | None:
    """Return pools that several runs of one program use at the same time, within the memory of one run.

    The pools start when they are first used, and end when the caller closes them. A plan that needs no pool has none.

    Raises:
        EngineError: A stage requests devices that this machine does not have, or cannot be sent to a process.
    """
    if not any(segment.needs_pool for level in program.levels for segment in level.segments):
        return None
    return _pooled_run(program, 0, meters, True).as_host()


def _pooled_run(program: Program, epoch: int, meters: Meters, ordered: bool) -> PooledRun:
    options = program.plan.engine
    sharers = options.get("sharers", 1)
    segments = [segment for level in program.levels for segment in level.segments]
    cores = max(1, (options.get("cpus") or available_cores()) // sharers)
    requested = options.get("memory")
    memory = (MEMORY_BYTES if requested is None else size_in_bytes("memory", requested)) // sharers
    pool_specs = _pool_specs(program, segments, epoch, cores, sharers, options.get("devices"))
    return PooledRun(program, epoch, ordered, cores, memory, requested is not None, meters, pool_specs)


@dataclass(slots=True)
class PoolSpec:
    """The pool of a segment: the number of its workers, their kind, and their devices."""

    segment: Segment
    min_workers: int
    max_workers: int
    initial_workers: int
    devices: list[Any]
    payload: SegmentPayload | None  # for workers in other processes; ``None``: the workers are threads

    @property
    def timeout_s(self) -> float | None:
        """The time that one item may take."""
        return self.segment.resources.timeout_s if self.segment.resources else None


def _pool_specs(
    program: Program, segments: list[Segment], epoch: int, cores: int, sharers: int, devices: Any
) -> dict[int, PoolSpec]:
    """Return the pool of every segment that needs one, by the ``id`` of the segment.

    Raises:
        EngineError: There are too few devices, or a function cannot be sent to a process.
    """
    devices_by_segment = assign_devices(segments, devices)
    pool_specs = {}
    for number, segment in enumerate(segments):
        if not segment.needs_pool:
            continue
        assert segment.resources is not None
        copying, pool_devices = with_device_copies(segment), devices_by_segment.get(number, ["cpu"])
        processes = segment.resources.on == "processes"
        min_workers, max_workers, initial = _worker_bounds(segment.resources.workers, cores, sharers, processes)
        if number in devices_by_segment:
            max_workers = len(pool_devices)
            initial = max_workers if segment.resources.workers is None else min(initial, max_workers)
        payload = ProcessPayload.of(copying, program.contexts(copying, epoch)) if processes else None
        pool_specs[id(segment)] = PoolSpec(copying, min_workers, max_workers, initial, pool_devices, payload)
    return pool_specs


def _worker_bounds(
    workers: int | tuple[int, int] | None, cores: int, sharers: int, processes: bool
) -> tuple[int, int, int]:
    """Return the minimum, maximum and initial number of workers; ``workers`` is for all sharers together."""
    if workers is None:
        return 1, cores if processes else max(cores, MAX_THREADS if sharers == 1 else MAX_THREADS_SHARED), cores
    low, high = (-(-n // sharers) for n in (workers if isinstance(workers, tuple) else (workers, workers)))
    return low, high, max(low, min(high, cores))


def _inline(program: Program, epoch: int, meters: Meters, sizer: BlockSizer | None = None) -> Each:
    """Return a function that runs segments in the calling thread; ``sizer`` learns from the cost of the first level."""

    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        meter = Meter(segment.describe(), "inline")
        meters.segments.append(meter)
        first = any(segment is other for other in program.levels[0].segments)
        limit = sizer.limit() if sizer is not None and first else None
        return _run_inline(blocks, segment, program.contexts(segment, epoch), meter, limit)

    return each


def _run_inline(
    blocks: Iterator[Block], segment: Segment, contexts: list[Context], meter: Meter, limit: SizeLimit | None
) -> Iterator[Block]:
    """Run a segment on the blocks in the calling thread."""
    try:
        for block in blocks:
            begun, cpu = time.perf_counter(), time.thread_time()
            for part, _ in run_segment(segment, contexts, block):
                meter.busy += time.perf_counter() - begun
                meter.cpu += time.thread_time() - cpu
                meter.blocks += 1
                meter.items += len(part)
                if limit is not None:
                    limit.adjust(part.new_inputs, time.perf_counter() - begun, estimate_nbytes(part.items))
                yield part
                begun, cpu = time.perf_counter(), time.thread_time()
    finally:
        _finish_stages(segment, contexts)


def _finish_stages(segment: Segment, contexts: list[Context]) -> None:
    for placed, ctx in zip(segment.stages, contexts, strict=True):
        placed.stage.finish(ctx)


@dataclass(slots=True)
class MemoryBound:
    """Bounds the blocks of a segment that are in progress or ready, by the size of its finished blocks.

    Runs that share the pool of the segment share its memory too.
    """

    meter: Meter
    max_bytes: int
    strict: bool
    runs: Callable[[], int]  # how many runs use the pool now
    mean_bytes: float = 0  # of a block; recent ones count more

    def add(self, nbytes: int) -> None:
        """Learn from the size of a finished block."""
        self.mean_bytes = nbytes if not self.mean_bytes else 0.8 * self.mean_bytes + 0.2 * nbytes

    def max_pending(self) -> int:
        """Return how many blocks of a run may be in progress: two per worker (current and next) if they fit."""
        workers = self.meter.workers
        least = 1 if self.strict else max(1, (workers + 1) // self.runs())
        return max(least, min(2 * workers, self._fitting()))

    def max_ready(self) -> int:
        """Return how many finished blocks of a run may wait for its consumer."""
        return max(1, min(MAX_READY_BLOCKS, self._fitting()))

    def _fitting(self) -> int:
        if not self.mean_bytes:
            return MAX_READY_BLOCKS + 2 * self.meter.workers
        return int(self.max_bytes / self.mean_bytes / self.runs())


@dataclass(slots=True, weakref_slot=True, eq=False)
class PooledRun:
    """One iteration: its pools, and the driver thread that moves blocks between them.

    As a host it iterates over nothing: it holds the pools that its guests use, other runs of the same program. A guest
    has its own driver, order and epoch: workers depend on none of these.
    """

    program: Program
    epoch: int
    ordered: bool
    cores: float
    memory: int
    strict: bool  # ``memory`` was set by the user: workers wait rather than exceed it
    meters: Meters
    pool_specs: dict[int, PoolSpec]
    pools: list[Pool] = field(default_factory=list)
    bounds: dict[int, tuple[Pool, MemoryBound]] = field(default_factory=dict)  # by the ``id`` of the segment
    shares: list[PoolShare] = field(default_factory=list)  # of this run in the pools
    host: PooledRun | None = None  # whose pools this run uses
    guests: list[PooledRun] = field(default_factory=list)  # open runs that use the pools of this one
    lock: threading.RLock = field(default_factory=threading.RLock)  # of a host: guests begin in any thread
    sizer: BlockSizer = field(
        default_factory=lambda: BlockSizer(count=1, max_stored_bytes=BLOCK_BYTES, max_output_bytes=OUTPUT_BLOCK_BYTES)
    )
    first_block_samples: int = FIRST_BLOCK_SAMPLES
    locate: Locate | None = None  # replaces the program's finder, if workers locate the samples they read
    channel: Channel = field(default_factory=lambda: Channel(lambda: MAX_READY_BLOCKS))
    driver: threading.Thread | None = None
    supervisor: Supervisor | None = None
    pid: int = field(default_factory=os.getpid)

    def blocks(self, order: Order | None, start: Start) -> Iterator[Block]:
        """Yield the finished blocks; closing the iterator ends the run."""
        if self.host is None:
            self._start_pools()
        live_runs.add(self)
        try:
            if self.host is not None:
                self.host._admit(self)
            chain = flow(
                self.program,
                order,
                self.epoch,
                start,
                self._pooled,
                self.sizer,
                self.meters,
                self.locate,
                self._memory_share(),
            )
            args = chain, self.channel
            self.driver = threading.Thread(target=_drive, args=args, name="penstock driver", daemon=True)
            del chain, args
            self.driver.start()
            if self.supervisor is not None:
                self.supervisor.start()
            while (block := self._next()) is not None:
                yield block
                del block
        finally:
            self.close()

    def _start_pools(self) -> None:
        """Get ready to start pools; a pool starts when the first block reaches it."""
        self.sizer.min_samples = self.program.largest_call
        self.sizer.max_samples = 1 if self.strict else self.first_block_samples
        if self.program.columnar:
            self.sizer.ceiling = COLUMN_BLOCK_ROWS
        self.supervisor = Supervisor(self.cores, self.meters)

    def as_host(self) -> PooledRun:
        """Make this run a host, which holds pools for its guests until it is closed; return it."""
        self._start_pools()
        live_runs.add(self)
        return self

    def guest(self, program: Program, epoch: int, ordered: bool, meters: Meters) -> PooledRun:
        """Return a run that uses the pools of this one; ``program`` has the same segments."""
        guest = type(self)(
            program, epoch, ordered, self.cores, self.memory, self.strict, meters, self.pool_specs, host=self
        )
        guest.sizer, guest.locate = self.sizer, self.locate
        return guest

    def _admit(self, guest: PooledRun) -> None:
        """Begin to serve a guest; the first one starts the pools.

        Raises:
            EngineError: The pools are closed.
        """
        with self.lock:
            if self not in live_runs:
                raise EngineError("the pools are closed")
            self.guests.append(guest)
            self.meters.guests.append(guest.meters)
            if not self.bounds:
                assert self.supervisor is not None
                for level in self.program.levels:
                    for segment in filter(lambda segment: segment.needs_pool, level.segments):
                        self._pool_of(segment)
                        self.meters.segments.append(self.bounds[id(segment)][1].meter)
                self.supervisor.start()

    def _leave_host(self) -> None:
        """Cancel what this run has queued in the pools of its host."""
        assert self.host is not None
        for share in self.shares:
            share.close()
        with self.host.lock:
            if self in self.host.guests:
                self.host.guests.remove(self)
                self.host.meters.guests.remove(self.meters)
                self.host.meters.waited += self.meters.waiting()

    def _next(self) -> Block | None:
        if os.getpid() != self.pid:
            raise EngineError("an iterator cannot continue in a forked process: create a new one there")
        try:
            received = self.channel.get()
        except Closed:
            raise EngineError("the run was closed while it was being read") from None
        if isinstance(received, BaseException):
            raise received
        assert received is None or isinstance(received, Block)
        return received

    def close(self) -> None:
        """End everything that this run started."""
        live_runs.discard(self)
        if os.getpid() != self.pid:  # a fork has none of the threads, and their locks may be held
            return
        self.channel.close()
        if self.host is not None:
            self._leave_host()
        with self.lock:
            guests = list(self.guests)
        for guest in guests:
            guest.close()
        if self.supervisor is not None:
            self.supervisor.stop()
        for pool in self.pools:
            pool.stop()
        # A thread of this run cannot join itself: the garbage collector may close a forgotten iterator in one.
        current = threading.current_thread()
        owned = self.pools if self.host is None else self.host.pools
        if self.driver is not current and not any(pool.owns(current) for pool in owned):
            threads = (self.driver, None if self.supervisor is None else self.supervisor.thread)
            join_all([thread for thread in threads if thread not in (None, current)], self.pools)

    def _pooled(self, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        """Run a segment on the blocks in its pool, or in the driver if it needs no pool."""
        if not segment.needs_pool:
            return _inline(self.program, self.epoch, self.meters)(blocks, segment)
        pool, bound = (self.host or self)._pool_of(segment)
        self.meters.segments.append(bound.meter)
        self.channel.capacity = bound.max_ready
        share = PoolShare(pool)
        self.shares.append(share)
        return (map_ordered if self.ordered else map_unordered)(blocks, share, bound.max_pending)

    def _pool_of(self, segment: Segment) -> tuple[Pool, MemoryBound]:
        """Return the pool of a segment, which is started by the first call, and its memory bound."""
        with self.lock:
            if id(segment) not in self.bounds:
                self.bounds[id(segment)] = self._start_pool(segment)
            return self.bounds[id(segment)]

    def _start_pool(self, segment: Segment) -> tuple[Pool, MemoryBound]:
        spec = self.pool_specs[id(segment)]
        on = spec.payload.on if spec.payload is not None else "threads"
        meter = Meter(segment.describe(), on, spec.min_workers, spec.max_workers, spec.initial_workers)
        bound = MemoryBound(meter, self._memory_share(), self.strict, lambda: len(self.guests) or 1)
        block_bytes = max(1, bound.max_bytes // (2 * spec.initial_workers))
        self.sizer.max_output_bytes = min(self.sizer.max_output_bytes, block_bytes)
        # After a group stage, the cost of a block says nothing about blocks of the source.
        limit = self.sizer.limit() if any(segment is other for other in self.program.levels[0].segments) else None
        make_proxy = partial(self._make_proxy, spec, bound, limit)
        pool = Pool(segment.stages[-1].stage.name, make_proxy, meter, self.meters)
        self.pools.append(pool)
        pool.resize(spec.initial_workers)
        assert self.supervisor is not None
        self.supervisor.watch(pool, spec.timeout_s if spec.payload is None else None)
        return pool, bound

    def _make_proxy(self, spec: PoolSpec, bound: MemoryBound, limit: SizeLimit | None, number: int) -> WorkerProxy:
        device = spec.devices[number % len(spec.devices)]
        if spec.payload is not None:
            proxy: WorkerProxy = self._remote_proxy(spec.payload, device, bound.meter, number)
        else:
            contexts = self.program.contexts(spec.segment, self.epoch)
            for ctx in contexts:
                ctx.device = device
            proxy = ThreadWorkerProxy(spec.segment, contexts, bound.meter, spec.timeout_s is not None)
        return _MeasuringProxy(proxy, bound, limit)

    def _remote_proxy(self, payload: SegmentPayload, device: Any, meter: Meter, number: int) -> WorkerProxy:
        """Return the proxy of a worker in another process."""
        return RemoteWorkerProxy(payload, device, meter, self.meters, number)

    def _memory_share(self) -> int:
        """Return the share of the memory for one pool; the blocks that wait for the consumer have a share too."""
        return self.memory // (len(self.pool_specs) + 1)


@dataclass(slots=True, eq=False)
class ThreadWorkerProxy:
    """A worker proxy that does the work itself, in the worker thread."""

    segment: Segment
    contexts: list[Context]
    meter: Meter
    has_timeout: bool
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    block: Block | None = None  # the current one, if there is a time limit
    retried: int = 0

    def __post_init__(self) -> None:
        if self.has_timeout:
            for number, ctx in enumerate(self.contexts):
                ctx.watch = partial(self.heartbeat.begin, number)

    def prepare(self) -> None:
        prepare(self.segment, self.contexts)

    def __call__(self, job: BlockJob) -> BlockResult:
        self.block = job if self.has_timeout and isinstance(job, Block) else None
        parts = run_segment(self.segment, self.contexts, job) if isinstance(job, Block) else job
        try:
            done, more_parts = next(parts)
        finally:
            if self.has_timeout:
                self.heartbeat.clear()
            retried = sum(ctx.retried for ctx in self.contexts)
            self.meter.retries += retried - self.retried
            self.retried = retried
        return done, parts if more_parts else None

    def cpu_seconds(self) -> float:
        return time.thread_time()

    def close(self) -> None:
        _finish_stages(self.segment, self.contexts)

    def abort(self) -> None:
        """Do nothing: a thread cannot be ended."""

    def overdue_error(self, timeout_s: float) -> Exception | None:
        current, block = self.heartbeat.read(), self.block
        if current is None or current[2] <= timeout_s:
            return None
        place = block.lineage.origin.place(current[1]) if block is not None else Place(None, None)
        stage = self.segment.stages[current[0]].stage
        return StageError(f"it takes longer than timeout_s={timeout_s:g}", stage.describe(), place.key, place.shard)


@dataclass(slots=True, eq=False)
class _MeasuringProxy:
    """Measures the size and time of another proxy's blocks, so that the next ones get the right size."""

    proxy: WorkerProxy
    bound: MemoryBound
    limit: SizeLimit | None

    def prepare(self) -> None:
        self.proxy.prepare()

    def __call__(self, job: BlockJob) -> BlockResult:
        begun = time.perf_counter()
        done, parts = self.proxy(job)
        nbytes = estimate_nbytes(done.items)
        self.bound.add(nbytes)
        self.bound.meter.nbytes += nbytes
        if self.limit is not None:
            self.limit.adjust(done.new_inputs, time.perf_counter() - begun, nbytes)
        return done, parts

    def cpu_seconds(self) -> float:
        return self.proxy.cpu_seconds()

    def close(self) -> None:
        self.proxy.close()

    def abort(self) -> None:
        self.proxy.abort()

    def overdue_error(self, timeout_s: float) -> Exception | None:
        return self.proxy.overdue_error(timeout_s)


def _drive(chain: Iterator[Block], channel: Channel) -> None:
    """Move the blocks of the chain into the channel until it ends or the consumer is gone."""
    try:
        with working_for(lambda: channel.closed):
            for block in chain:
                channel.put(block)
                if block.lineage.error is not None:
                    break
                del block
        channel.put(None)
    except Closed:  # usually the consumer is gone; but if a pool was closed, the consumer must not wait forever
        with suppress(Closed):
            channel.put(EngineError("the run was closed while it was being read"))
    except BaseException as exc:  # raised in the consumer, whatever it is
        with suppress(Closed):
            channel.put(exc)


live_runs: weakref.WeakSet[PooledRun] = weakref.WeakSet()
_open_iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def closed_at_exit(iterate: Callable[_P, Generator[_T, None, None]]) -> Callable[_P, Generator[_T, None, None]]:
    """Decorate a generator function: when the program exits, the iterators that are still open are closed.

    Otherwise the interpreter closes some of them only when it has cleared the modules that their ``finally`` blocks
    need, and prints the errors.
    """

    @wraps(iterate)
    def iterate_until_exit(*args: _P.args, **options: _P.kwargs) -> Generator[_T, None, None]:
        iterator = iterate(*args, **options)
        _open_iterators.add(iterator)
        return iterator

    return iterate_until_exit


# Penstock's own, and those of a DataLoader with workers: none of them iterates over a run for the user.
_HARMLESS_THREAD = re.compile(r"penstock|QueueFeederThread|Thread-\d+ \(_pin_memory_loop\)")


def close_all() -> None:
    """End every run of this process."""
    current = threading.current_thread()
    others = [thread for thread in threading.enumerate() if not _HARMLESS_THREAD.match(thread.name)]
    if others == [current]:  # another thread could take the end of a closed iterator for the end of the data
        for iterator in list(_open_iterators):
            with suppress(ValueError):  # it is running: a thread of ours waits for its next item
                iterator.close()
    for live_run in list(live_runs):
        live_run.close()


atexit.register(close_all)
