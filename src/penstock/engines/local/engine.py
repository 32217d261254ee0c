"""The local engine: a pool of threads or processes for each segment, in order, bounded, nothing left behind.

What is meant to happen:
- success: every block is delivered, then all threads and processes have ended before the iteration does;
- failure: what came before the failing sample is delivered, then its error is raised, workers ended;
- a worker process dies: it is replaced and its block done again, the stream does not change;
- close, Ctrl-C or a forgotten iterator: no new block begins, the one in every worker's hands is finished and thrown
  away, workers ended. A thread that does not come back from a user's function is named and left as a daemon; a process
  is killed.
Anything else is a bug. A plan that only reads runs in the caller's thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.engines.cursor import Start
from penstock.engines.devices import shared_out, with_moves
from penstock.engines.flow import WIDE, WIDE_BYTES, BlockSizer, Each, Find, SizeLimit, flow
from penstock.engines.local.heartbeat import Heartbeat
from penstock.engines.local.monitor import Monitor
from penstock.engines.local.pool import Channel, Closed, Done, Job, Pool, WorkerProxy, as_finished, in_order, join_all
from penstock.engines.local.process_proxy import ProcessPayload
from penstock.engines.local.worker_proxy import RemoteWorkerProxy, SegmentPayload
from penstock.engines.meter import Meter, Meters
from penstock.engines.program import ANY, Program, Segment, prepare, run_segment
from penstock.errors import EngineError, StageError
from penstock.order import Order
from penstock.plan import Block, Context, Place, size_in_bytes, weight

READY = 4  # finished blocks that wait for the consumer: enough to cover an uneven stage
MEMORY = 1_000_000_000
INLINE = 1_000_000  # raw bytes of a block that no other thread waits for
POOLED = 2_000_000  # raw bytes of a block that a worker reads: handing one over costs 0.4 ms, large or small
MADE = 4_000_000  # bytes of what it makes of them: as much is under way for every worker, twice, and waits, four times
FEW = 4  # samples a block, until it is known what they cost
THREADS = 32  # what a pool of threads may grow to where nobody says: most of them wait for something
SHARING = 4  # the same, where other processes run the same plan beside this one


def run(
    program: Program, order: Order | None, epoch: int, start: Start, meters: Meters, *, ordered: bool = True
) -> Iterator[Block]:
    """Run the plan.

    Raises:
        EngineError: a stage asks for something this machine does not have, or cannot be sent to a process.
    """
    options = program.plan.engine
    segments = [segment for level in program.levels for segment in level.segments]
    if not any(segment.heavy for segment in segments):
        pace = BlockSizer(most=WIDE, nbytes=WIDE_BYTES) if program.columnar else BlockSizer(nbytes=INLINE)
        return flow(program, order, epoch, start, _inline(program, epoch, meters), pace, meters)
    sharers = options.get("sharers", 1)
    if sharers > 1 and all(segment.resources in (None, ANY) for segment in segments):
        pace = BlockSizer(count=1, most=FEW)  # as fine as for a pool: the consumer waits for every block
        return flow(program, order, epoch, start, _inline(program, epoch, meters, pace), pace, meters)
    cores = max(1, (options.get("cpus") or cores_at_hand()) // sharers)
    asked = options.get("memory")
    memory = (MEMORY if asked is None else size_in_bytes("memory", asked)) // sharers
    crews = _crews(program, segments, epoch, cores, sharers, options.get("devices"))
    return PooledRun(program, epoch, ordered, cores, memory, asked is not None, meters, crews).blocks(order, start)


def cores_at_hand() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class PoolSpec:
    """How a segment is worked on: by how many, where, and on which devices."""

    segment: Segment
    least: int
    most: int
    begin: int
    devices: list[Any]
    cargo: SegmentPayload | None  # where the work is done elsewhere

    @property
    def timeout_s(self) -> float | None:
        """How long one item may take."""
        return self.segment.resources.timeout_s if self.segment.resources else None


def _crews(
    program: Program, segments: list[Segment], epoch: int, cores: int, sharers: int, devices: Any
) -> dict[int, PoolSpec]:
    """The crew of every heavy segment, by the segment's identity; whatever cannot be had is refused here.

    Raises:
        EngineError: a device or a function that cannot travel.
    """
    shares = shared_out(segments, devices)
    crews = {}
    for number, segment in enumerate(segments):
        if not segment.heavy:
            continue
        assert segment.resources is not None
        ready, share = with_moves(segment), shares.get(number, ["cpu"])
        processes = segment.resources.on == "processes"
        least, most, begin = _bounds(segment.resources.workers, cores, sharers, processes)
        if number in shares:
            most = len(share)
            begin = most if segment.resources.workers is None else min(begin, most)
        cargo = ProcessPayload.of(ready, program.contexts(ready, epoch)) if processes else None
        crews[id(segment)] = PoolSpec(ready, least, most, begin, share, cargo)
    return crews


def _bounds(workers: int | tuple[int, int] | None, cores: int, sharers: int, processes: bool) -> tuple[int, int, int]:
    """The fewest workers, the most, and how many to begin with; what was asked for is for all sharers together."""
    if workers is None:
        return 1, cores if processes else max(cores, THREADS if sharers == 1 else SHARING), cores
    least, most = (-(-n // sharers) for n in (workers if isinstance(workers, tuple) else (workers, workers)))
    return least, most, max(least, min(most, cores))


def _inline(program: Program, epoch: int, meters: Meters, pace: BlockSizer | None = None) -> Each:
    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        meter = Meter(segment.describe(), "inline")
        meters.segments.append(meter)
        first = any(segment is one for one in program.levels[0].segments)
        limit = pace.limit() if pace is not None and first else None
        return _worked(blocks, segment, program.contexts(segment, epoch), meter, limit)

    return each


def _worked(
    blocks: Iterator[Block], segment: Segment, contexts: list[Context], meter: Meter, limit: SizeLimit | None
) -> Iterator[Block]:
    """The blocks, worked on where they are asked for."""
    try:
        for block in blocks:
            begun, cpu = time.perf_counter(), time.thread_time()
            for part, _ in run_segment(segment, contexts, block):
                meter.busy += time.perf_counter() - begun
                meter.cpu += time.thread_time() - cpu
                meter.blocks += 1
                meter.items += len(part)
                if limit is not None:
                    limit.measured(part.inputs - part.begin, time.perf_counter() - begun, weight(part.items))
                yield part
                begun, cpu = time.perf_counter(), time.thread_time()
    finally:
        _finish(segment, contexts)


def _finish(segment: Segment, contexts: list[Context]) -> None:
    for placed, ctx in zip(segment.stages, contexts, strict=True):
        placed.stage.finish(ctx)


@dataclass(slots=True)
class _Gauge:
    """What finished blocks of a segment weigh, so that only so many bytes are under way."""

    meter: Meter
    memory: int
    strict: bool
    nbytes: float = 0

    def add(self, nbytes: int) -> None:
        self.nbytes = nbytes if not self.nbytes else 0.8 * self.nbytes + 0.2 * nbytes

    def ahead(self) -> int:
        """Blocks that may be under way: two for each worker (one in hand, one to go on with) while they fit."""
        workers = self.meter.workers
        return max(1 if self.strict else workers + 1, min(2 * workers, self._fit()))

    def ready(self) -> int:
        """Finished blocks that may wait for the consumer."""
        return max(1, min(READY, self._fit()))

    def _fit(self) -> int:
        return int(self.memory / self.nbytes) if self.nbytes else READY + 2 * self.meter.workers


@dataclass(slots=True, weakref_slot=True, eq=False)
class PooledRun:
    """One iteration: its pools, and the thread that moves blocks between them."""

    program: Program
    epoch: int
    ordered: bool
    cores: float
    memory: int
    strict: bool  # the memory was asked for: rather let workers wait than use more
    meters: Meters
    crews: dict[int, PoolSpec]
    pools: list[Pool] = field(default_factory=list)
    pace: BlockSizer = field(default_factory=lambda: BlockSizer(count=1, nbytes=POOLED, large=MADE))
    few: int = FEW
    find: Find | None = None  # how samples are found, where not as they always are
    channel: Channel = field(default_factory=lambda: Channel(lambda: READY))
    driver: threading.Thread | None = None
    monitor: Monitor | None = None
    pid: int = field(default_factory=os.getpid)

    def blocks(self, order: Order | None, start: Start) -> Iterator[Block]:
        """The finished blocks; closing the iterator ends the run."""
        self.pace.least = self._rows_wanted()
        self.pace.most = 1 if self.strict else self.few
        if self.program.columnar:
            self.pace.ceiling = WIDE
        live.add(self)
        try:
            self.monitor = Monitor(self.cores, self.meters)
            chain = flow(self.program, order, self.epoch, start, self._pooled, self.pace, self.meters, self.find)
            self.driver = threading.Thread(
                target=_drive, args=(chain, self.channel), name="penstock driver", daemon=True
            )
            del chain
            self.driver.start()
            self.monitor.start()
            while (block := self._next()) is not None:
                yield block
                del block
        finally:
            self.close()

    def _next(self) -> Block | None:
        if os.getpid() != self.pid:
            raise EngineError("an iterator cannot go on in a forked process; iterate the dataset there")
        try:
            got = self.channel.get()
        except Closed:
            raise EngineError("the run was closed while it was being read") from None
        if isinstance(got, BaseException):
            raise got
        assert got is None or isinstance(got, Block)
        return got

    def close(self) -> None:
        """End everything this run started."""
        live.discard(self)
        if os.getpid() != self.pid:  # a fork has none of the threads, and their locks as they were
            return
        self.channel.close()
        if self.monitor is not None:
            self.monitor.stop()
        for pool in self.pools:
            pool.stop()
        here = threading.current_thread()  # one of ours, when the collector finds a forgotten iterator there
        if self.driver not in (None, here) and not any(pool.owns(here) for pool in self.pools):
            join_all([self.driver, *self.monitor_threads()], self.pools)

    def monitor_threads(self) -> list[threading.Thread]:
        """The thread that watches over the pools, where it must be waited for."""
        thread = self.monitor.thread if self.monitor is not None else None
        return [] if thread is None or thread is threading.current_thread() else [thread]

    def _rows_wanted(self) -> int:
        """The rows that stages on batches of rows would like to see together."""
        return max((placed.stage.prefers for placed in self.program.arrangement.body), default=1)

    def _pooled(self, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        if not segment.heavy:
            return _inline(self.program, self.epoch, self.meters)(blocks, segment)
        crew = self.crews[id(segment)]
        on = crew.cargo.on if crew.cargo is not None else "threads"
        meter = Meter(segment.describe(), on, crew.least, crew.most, crew.begin)
        self.meters.segments.append(meter)
        gauge = _Gauge(meter, self._share(), self.strict)
        self.pace.large = min(self.pace.large, max(1, gauge.memory // (2 * crew.begin)))
        self.channel.room = gauge.ready
        # Behind a group the items are others, which the size of the source's blocks says nothing about.
        limit = self.pace.limit() if any(segment is one for one in self.program.levels[0].segments) else None
        make = partial(self._hand, crew, gauge, limit)
        pool = Pool(segment.stages[-1].stage.name, crew.begin, make, meter, self.meters)
        self.pools.append(pool)
        assert self.monitor is not None
        self.monitor.watch(pool, crew.timeout_s if crew.cargo is None else None)
        return (in_order if self.ordered else as_finished)(blocks, pool, gauge.ahead)

    def _hand(self, crew: PoolSpec, gauge: _Gauge, limit: SizeLimit | None, number: int) -> WorkerProxy:
        device = crew.devices[number % len(crew.devices)]
        if crew.cargo is not None:
            inner: WorkerProxy = self._away(crew.cargo, device, gauge.meter, number)
        else:
            contexts = self.program.contexts(crew.segment, self.epoch)
            for ctx in contexts:
                ctx.device = device
            inner = ThreadWorkerProxy(crew.segment, contexts, gauge.meter, crew.timeout_s is not None)
        return _Measured(inner, gauge, limit)

    def _away(self, cargo: SegmentPayload, device: Any, meter: Meter, number: int) -> WorkerProxy:
        """The hand of a worker elsewhere."""
        return RemoteWorkerProxy(cargo, device, meter, self.meters, number)

    def _share(self) -> int:
        """What one pool may hold of the memory; what waits for the consumer has a share too."""
        return self.memory // (len(self.crews) + 1)


@dataclass(slots=True, eq=False)
class ThreadWorkerProxy:
    """What a worker thread works with when it does the work itself."""

    segment: Segment
    contexts: list[Context]
    meter: Meter
    watched: bool
    board: Heartbeat = field(default_factory=Heartbeat)
    block: Block | None = None  # in hand, where somebody watches
    retried: int = 0

    def __post_init__(self) -> None:
        if self.watched:
            for number, ctx in enumerate(self.contexts):
                ctx.watch = partial(self.board.enter, number)

    def prepare(self) -> None:
        """Make the functions."""
        prepare(self.segment, self.contexts)

    def __call__(self, job: Job) -> Done:
        """Work on a block, or go on with one."""
        self.block = job if self.watched and isinstance(job, Block) else None
        parts = run_segment(self.segment, self.contexts, job) if isinstance(job, Block) else job
        try:
            done, again = next(parts)
        finally:
            if self.watched:
                self.board.leave()
            retried = sum(ctx.retried for ctx in self.contexts)
            self.meter.retries += retried - self.retried
            self.retried = retried
        return done, parts if again else None

    def cpu(self) -> float:
        """Seconds of a processor that this thread has used."""
        return time.thread_time()

    def close(self) -> None:
        """Let go of what the stages kept."""
        _finish(self.segment, self.contexts)

    def abort(self) -> None:
        """A thread cannot be ended."""

    def overdue(self, limit: float) -> Exception | None:
        """What to say if it has been at one item for longer."""
        at, block = self.board.read(), self.block
        if at is None or at[2] <= limit:
            return None
        place = block.origin.place(at[1]) if block is not None else Place(None, None)
        stage = self.segment.stages[at[0]].stage
        return StageError(f"it takes longer than timeout_s={limit:g}", stage.describe(), place.key, place.shard)


@dataclass(slots=True, eq=False)
class _Measured:
    """A hand whose blocks are weighed and timed, so that the next ones have the right size."""

    hand: WorkerProxy
    gauge: _Gauge
    limit: SizeLimit | None

    def prepare(self) -> None:
        self.hand.prepare()

    def __call__(self, job: Job) -> Done:
        begun = time.perf_counter()
        done, parts = self.hand(job)
        nbytes = weight(done.items)
        self.gauge.add(nbytes)
        self.gauge.meter.nbytes += nbytes
        if self.limit is not None:
            self.limit.measured(done.inputs - done.begin, time.perf_counter() - begun, nbytes)
        return done, parts

    def cpu(self) -> float:
        return self.hand.cpu()

    def close(self) -> None:
        self.hand.close()

    def abort(self) -> None:
        self.hand.abort()

    def overdue(self, limit: float) -> Exception | None:
        return self.hand.overdue(limit)


def _drive(chain: Iterator[Block], channel: Channel) -> None:
    """Pull the chain into the channel until it ends or the consumer leaves."""
    try:
        for block in chain:
            channel.put(block)
            if block.error is not None:
                break
            del block
        channel.put(None)
    except Closed:  # as a rule the consumer has left; a pool that was closed under it must not keep it waiting
        with suppress(Closed):
            channel.put(EngineError("the run was ended under its consumer"))
    except BaseException as exc:  # whatever happens here is the consumer's to know
        with suppress(Closed):
            channel.put(exc)


live: weakref.WeakSet[PooledRun] = weakref.WeakSet()


def close_all() -> None:
    """End every run that is going on."""
    for run_ in list(live):
        run_.close()


atexit.register(close_all)
