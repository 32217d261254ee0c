"""The local engine: a pool of threads for each segment, in order, bounded, nothing left behind.

What is meant to happen:
- success: every block is delivered, then all threads have ended before the iteration does;
- failure: what came before the failing sample is delivered, then its error is raised, threads ended;
- close, Ctrl-C or a forgotten iterator: no new block begins, the one in every worker's hands is finished and thrown
  away, threads ended. A thread that does not come back from a user's function is named and left as a daemon.
Anything else is a bug. A plan that only reads runs in the caller's thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.engines.cursor import Start
from penstock.engines.flow import Each, Pace, flow
from penstock.engines.pool import Channel, Closed, Done, Job, ThreadPool, as_finished, in_order, join_all
from penstock.engines.program import Program, Segment, run_segment
from penstock.errors import EngineError
from penstock.order import Order
from penstock.plan import Block, size_in_bytes, weight

READY = 4  # finished blocks that wait for the consumer: enough to cover an uneven stage
MEMORY = 1_000_000_000
INLINE = 1_000_000  # raw bytes of a block that no other thread waits for
FEW = 4  # samples a block, until it is known what they cost


def run(
    program: Program, order: Order | None, epoch: int, start: Start, *, ordered: bool | None = None
) -> Iterator[Block]:
    """Run the plan.

    Raises:
        EngineError: a stage asks for something this engine does not have.
    """
    options = program.plan.engine
    ordered = options.get("ordered", True) if ordered is None else ordered
    segments = [segment for level in program.levels for segment in level.segments]
    _check(segments)
    if not any(segment.heavy for segment in segments):
        return flow(program, order, epoch, start, _inline(program, epoch), Pace(nbytes=INLINE))
    cores = options.get("cpus") or cores_at_hand()
    asked = options.get("memory")
    memory = MEMORY if asked is None else size_in_bytes("memory", asked)
    return _Run(program, epoch, ordered, cores, memory, asked is not None).blocks(order, start)


def cores_at_hand() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(segments: list[Segment]) -> None:
    for needs, segment in ((segment.resources, segment) for segment in segments):
        if needs is None:
            continue
        asked = {"on='processes'": needs.on == "processes", "gpus": needs.gpus, "timeout_s": needs.timeout_s}
        for what, wanted in asked.items():
            if wanted:
                raise EngineError(f"{what} in {segment.describe()}: the local engine runs on threads only")


def _inline(program: Program, epoch: int) -> Each:
    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        contexts = program.contexts(segment, epoch)
        return (part for block in blocks for part, _ in run_segment(segment, contexts, block))

    return each


@dataclass(slots=True)
class _Gauge:
    """What finished blocks of a segment weigh, so that only so many bytes are under way."""

    workers: int
    memory: int
    least: int  # blocks that may be under way however large they are
    nbytes: float = 0

    def add(self, nbytes: int) -> None:
        self.nbytes = nbytes if not self.nbytes else 0.8 * self.nbytes + 0.2 * nbytes

    def ahead(self) -> int:
        """Blocks that may be under way: two for each worker (one in hand, one to go on with) while they fit."""
        return max(self.least, min(2 * self.workers, self._fit()))

    def ready(self) -> int:
        """Finished blocks that may wait for the consumer."""
        return max(1, min(READY, self._fit()))

    def _fit(self) -> int:
        return int(self.memory / self.nbytes) if self.nbytes else READY + 2 * self.workers


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Run:
    """One iteration: its pools, and the thread that moves blocks between them."""

    program: Program
    epoch: int
    ordered: bool
    cores: int
    memory: int
    strict: bool  # the memory was asked for: rather let workers wait than use more
    pools: list[ThreadPool] = field(default_factory=list)
    pace: Pace = field(default_factory=lambda: Pace(count=1))
    channel: Channel = field(default_factory=lambda: Channel(lambda: READY))
    driver: threading.Thread | None = None
    pid: int = field(default_factory=os.getpid)

    def blocks(self, order: Order | None, start: Start) -> Iterator[Block]:
        """The finished blocks; closing the iterator ends the run."""
        self.pace.least = self._rows_wanted()
        self.pace.most = 1 if self.strict else FEW
        _live.add(self)
        try:
            chain = flow(self.program, order, self.epoch, start, self._pooled, self.pace)
            self.driver = threading.Thread(
                target=_drive, args=(chain, self.channel), name="penstock driver", daemon=True
            )
            del chain
            self.driver.start()
            while (block := self._next()) is not None:
                yield block
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
        _live.discard(self)
        if os.getpid() != self.pid:  # a fork has none of the threads, and their locks as they were
            return
        self.channel.close()
        for pool in self.pools:
            pool.stop()
        here = threading.current_thread()  # one of ours, when the collector finds a forgotten iterator there
        if self.driver not in (None, here) and not any(pool.owns(here) for pool in self.pools):
            join_all([self.driver], self.pools)

    def _rows_wanted(self) -> int:
        """The rows that stages on batches of rows would like to see together."""
        return max((placed.stage.prefers for placed in self.program.arrangement.body), default=1)

    def _pooled(self, blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        if not segment.heavy:
            return _inline(self.program, self.epoch)(blocks, segment)
        workers = self._workers(segment)
        gauge = _Gauge(workers, self._share(), 1 if self.strict else workers + 1)
        self.pace.large = min(self.pace.large, max(1, gauge.memory // (2 * workers)))
        self.channel.room = gauge.ready
        pool = ThreadPool(
            segment.stages[-1].stage.name,
            gauge.workers,
            _worker(self.program, segment, self.epoch, self.pace, gauge),
        )
        self.pools.append(pool)
        return (in_order if self.ordered else as_finished)(blocks, pool, gauge.ahead)

    def _share(self) -> int:
        """What one pool may hold of the memory; what waits for the consumer has a share too."""
        pools = sum(segment.heavy for level in self.program.levels for segment in level.segments)
        return self.memory // (pools + 1)

    def _workers(self, segment: Segment) -> int:
        asked = segment.resources.workers if segment.resources else None
        if isinstance(asked, tuple):
            return max(asked[0], min(asked[1], self.cores))
        return asked or self.cores


def _worker(
    program: Program, segment: Segment, epoch: int, pace: Pace, gauge: _Gauge
) -> Callable[[], Callable[[Job], Done]]:
    """What a thread of the pool makes for itself: the segment with contexts of its own."""

    def make() -> Callable[[Job], Done]:
        contexts = program.contexts(segment, epoch)

        def work(job: Job) -> Done:
            begun = time.perf_counter()
            parts = run_segment(segment, contexts, job) if isinstance(job, Block) else job
            done, again = next(parts)
            nbytes = weight(done.items)
            gauge.add(nbytes)
            pace.measured(done.inputs - done.begin, time.perf_counter() - begun, nbytes)
            return done, parts if again else None

        return work

    return make


def _drive(chain: Iterator[Block], channel: Channel) -> None:
    """Pull the chain into the channel until it ends or the consumer leaves."""
    try:
        for block in chain:
            channel.put(block)
            if block.error is not None:
                break
            del block
        channel.put(None)
    except Closed:
        pass
    except BaseException as exc:  # whatever happens here is the consumer's to know
        with suppress(Closed):
            channel.put(exc)


_live: weakref.WeakSet[_Run] = weakref.WeakSet()


def _close_all() -> None:
    for run_ in list(_live):
        run_.close()


atexit.register(_close_all)
