"""One run of a program: its items, the position from which it can be resumed, and the samples that it skipped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.engines import serial
from penstock.engines.cursor import Start
from penstock.engines.delivered import Delivered, can_run_unordered
from penstock.engines.lineage import DELIVERED, ItemLineage
from penstock.engines.local import engine as local
from penstock.engines.local.pool import check_open
from penstock.engines.meter import Meters
from penstock.engines.program import Program
from penstock.engines.report import Report
from penstock.engines.run_log import RunLog
from penstock.engines.stats import Stats, snapshot
from penstock.engines.upcoming import expect_uses
from penstock.errors import DataError, StageError, printable, short_traceback
from penstock.order import I64, Order, total
from penstock.plan import Block, Cut, Plan, Skipped

log = logging.getLogger("penstock")

# Called with a table of the samples that were delivered (see ``lineage``) and the number of items they are in.
DeliveryCallback = Callable[[I64, int], None]


def _on_ray(*args: Any, **options: Any) -> Iterator[Block]:
    from penstock.engines.ray.engine import run  # imported here so that only users of Ray load it

    return run(*args, **options)


ENGINES: dict[str, Callable[..., Iterator[Block]]] = {"local": local.run, "ray": _on_ray, "serial": serial.run}


def start_pools(program: Program, meters: Meters, *, keep_remote: bool = False) -> local.PooledRun | None:
    """Return pools for runs of ``program`` that work at the same time; None if its engine or its plan needs no pools.

    With ``keep_remote`` the items of runs on a cluster stay there, for consumers in other processes.

    Raises:
        EngineError: The engine cannot run the plan.
    """
    match program.plan.engine.name:
        case "local":
            return local.shared_pools(program, meters)
        case "ray":
            from penstock.engines.ray.engine import shared_actor_pools

            return shared_actor_pools(program, meters, keep_remote)
    return None


class Run:
    """An engine that runs a program from a start; it can be iterated once.

    Attributes:
        start: Where the run began.
        meters: What the run measures about itself.
        skipped: The skipped samples of all blocks that were delivered completely.
    """

    def __init__(
        self,
        program: Program,
        order: Order | None,
        epoch: int,
        start: Start,
        *,
        tracked: bool = False,
        on_delivered: DeliveryCallback | None = None,
        pools: local.PooledRun | None = None,
        alone: bool = True,
        cut: Cut | None = None,
    ) -> None:
        """Start the engine; it stops when the run is exhausted or closed.

        Args:
            program: The program.
            order: The order of the epoch; None for a stream.
            epoch: The number of the epoch.
            start: Where to begin.
            tracked: ``here()`` will be called: a run that could not answer it out of order runs in order.
            on_delivered: Called with the samples that are in the items: before an item that is a block of its own,
                after the last item of any other block, and by ``report_delivered()``.
            pools: The pools that the run uses together with others; by default it starts its own.
            alone: No other run uses the program at the same time.
            cut: The cut of this rank, if it is not the plan's.

        Raises:
            EngineError: The engine cannot run the plan.
        """
        self.start = start
        options = program.plan.engine
        self.meters = Meters(engine=options.name, observer=options.get("observer"))
        self._report = Report(self.meters) if options.get("report") else None
        self._log = _run_log(program.plan, self.meters, epoch)
        self.skipped: list[Skipped] = []
        self._quarantined = 0  # how many of them are in the quarantine
        self._quarantine = program.quarantine
        self._program, self._order = program, order
        unordered = options.name != "serial" and not options.get("ordered", True)
        if tracked and unordered and not can_run_unordered(program, start):
            unordered = False
        self._delivered_ranges = Delivered(start) if tracked and unordered else None
        extra: dict[str, Any] = {"ordered": False} if unordered else {}
        extra |= {} if pools is None else {"pools": pools}
        self._alone = alone
        self._on_delivered = on_delivered
        self._reported = 0  # items of the current block that ``on_delivered`` was called with
        begin = start if on_delivered is None else replace(start, traced=True)
        self._caches = expect_uses(program, order, epoch, start, cut)
        self._blocks = ENGINES[options.name](program, order, epoch, begin, self.meters, **extra)
        self._block: Block | None = None  # the current one
        self._delivered = 0  # items of the current block
        self._delivered_before = 0  # items of the blocks before it
        self._midway = False  # the skips of the current block are not yet in ``skipped``
        self._ended = self._closed = False

    def items(self) -> Iterator[Any]:
        """Yield the items, for consumers that do not call ``here()``: it is exact only between blocks."""
        failure = StageError  # the interpreter clears the module's names before it closes the last iterators
        try:
            for items in self.runs():
                yield from items
                del items
        except failure as error:
            raise short_traceback(error) from error.__cause__

    @local.closed_at_exit
    def runs(self) -> Generator[Sequence[Any], None, None]:
        """Yield the items block by block, as lists or columns; ``here()`` is exact after each.

        Raises:
            PenstockError: A sample failed, after the items before it.
        """
        try:
            for block in self._timed_blocks():
                if not block.is_marker:
                    self._block, self._delivered, self._midway = block, len(block), True
                yield block.items
                self._finish(block)
                del block
        finally:
            self.close()
        self._end()

    @local.closed_at_exit
    def __iter__(self) -> Generator[Any, None, None]:
        """Yield the items; ``here()`` is exact after each. Closing the run ends the iteration.

        Raises:
            PenstockError: A sample failed, after the items before it.
        """
        try:
            for block in self._timed_blocks():
                if not block.is_marker:
                    self._block, self._delivered, self._midway = block, 0, True
                self._reported = -1
                if self._on_delivered is not None and len(block) <= 1:
                    self._report_items(block, len(block))
                for item in block.items:
                    self._delivered += 1
                    yield item
                    if self._closed:
                        return
                if self._on_delivered is not None:
                    self._report_items(block, len(block))
                if self._delivered_ranges is not None and not block.is_marker:
                    self._delivered_ranges.record(block, len(block))
                    self._delivered_ranges.compact()
                self._finish(block)
            if self._closed:
                return
        finally:
            self.close()
        self._end()

    def report_delivered(self) -> None:
        """Call ``on_delivered`` with what was delivered since its last call."""
        if self._on_delivered is not None and self._block is not None and self._midway:
            self._report_items(self._block, self._delivered)

    def _report_items(self, block: Block, delivered: int) -> None:
        if self._reported < delivered:
            low, first = max(0, self._reported), self._reported < 0
            assert self._on_delivered is not None
            self._on_delivered(
                ItemLineage(block.lineage, low, delivered, with_gaps=first).trace(DELIVERED), delivered - low
            )
            self._reported = delivered

    def _timed_blocks(self) -> Iterator[Block]:
        """Yield the blocks of the engine, and measure the time that the consumer waits for them."""
        meters = self.meters
        meters.begun = time.perf_counter()
        meters.notify("begin")
        if self._report is not None:
            self._report.start()
        if self._log is not None:
            self._log.start()
        while True:
            check_open()  # this may be the run of a sort or join within another run
            meters.waiting_since = begun = time.perf_counter()
            block = next(self._blocks, None)
            meters.waiting_since = None
            meters.waited += time.perf_counter() - begun
            if block is None:
                return
            meters.items += len(block)
            yield block
            del block

    def _finish(self, block: Block) -> None:
        self.skipped += block.lineage.skips
        self._delivered_before += len(block)
        self._midway = False
        self._quarantine_skips()
        if block.lineage.error is not None:
            raise block.lineage.error
        if block.lineage.skips:
            self._check_limit()

    def _quarantine_skips(self) -> None:
        """Write the skipped samples before the cursor to the quarantine."""
        if self._quarantine is not None and (self.skipped or self._midway):
            self._quarantine.add(self.skips_so_far()[self._quarantined :])
            self._quarantined = len(self.skipped)

    def _end(self) -> None:
        self._ended = True
        if self.skipped:
            self._check_limit()
            log_skipped(self.skipped)

    def _check_limit(self) -> None:
        limit = self._program.plan.errors.limit
        known = self._order is not None and self._order.size >= 0
        if limit is not None and 0 < limit < 1 and not known and not self._ended:
            return  # a share of an unknown number: checked at the end of the run
        whole = total(self.start.left) if known else self._delivered_before + len(self.skipped)
        check_limit(self.skipped, limit, whole)

    def skips_so_far(self) -> list[Skipped]:
        """Return the skipped samples before the cursor."""
        current = self._block.skips_before(self._delivered) if self._block is not None and self._midway else ()
        return [*self.skipped, *current]

    def here(self) -> Start:
        """Return the start of a run that continues after the last item that was delivered."""
        self._quarantine_skips()
        if self._ended:
            return self.start.after(None, None)
        if self._block is None:
            return self.start
        if self._delivered_ranges is not None:
            if self._midway:
                self._delivered_ranges.record(self._block, self._delivered)
            return self._delivered_ranges.remaining()
        return self.start.after(self._block.cursor(self._delivered), self._program.window_level)

    def hold_back(self) -> None:
        """Count the last item as not delivered; the run must not be iterated any further."""
        self._delivered -= 1

    def close(self) -> None:
        """Stop the engine; a second call does nothing."""
        self._closed = True
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()
        if self._alone:  # else it would stop the prefetching of the others
            self._program.suspend()
        for cache in self._caches:
            cache.dismiss()
        if self.meters.ended is None:
            self.meters.ended = time.perf_counter()
            self.meters.notify("end")
            if self._report is not None:
                self._report.stop()
            if self._log is not None:
                self._log.stop()

    def stats(self) -> Stats:
        """Return what the run did so far."""
        return snapshot(self.meters)


def check_limit(skipped: Sequence[Skipped], limit: float | None, whole: int) -> None:
    """Check that no more samples failed than a limit allows, which is a number or a share of ``whole`` samples.

    Raises:
        DataError: More samples failed.
    """
    if limit is not None and len(skipped) > (limit * whole if 0 < limit < 1 else limit):
        last = skipped[-1]
        count = f"{len(skipped)} samples failed, more than on_error's limit of {limit}"
        raise DataError(f"{count}; the last: {last.problem}", last.place.shard, last.place.key)


def log_skipped(skipped: Sequence[Skipped]) -> None:
    """Warn that samples failed, with the first of them."""
    if skipped:
        examples = printable(", ".join(f"{skip.place.shard}:{skip.place.key}" for skip in skipped[:3]))
        log.warning("skipped %d samples that failed (%s%s)", len(skipped), examples, ", ..." * (len(skipped) > 3))


def _run_log(plan: Plan, meters: Meters, epoch: int) -> RunLog | None:
    """Return the log of a run, if the plan's engine has a monitor."""
    folder = plan.engine.get("monitor")
    if folder is None:
        return None
    rank, world = (0, 1) if plan.cut is None else (plan.cut.rank, plan.cut.world)
    return RunLog(meters, folder, rank=rank, world=world, epoch=epoch, plan=plan.describe())


def start_run(plan: Plan, epoch: int, program: Program | None = None) -> Run:
    """Start a run of an epoch from its beginning.

    Args:
        plan: The plan.
        epoch: The number of the epoch.
        program: The program of the plan, if the caller has one.

    Raises:
        PenstockError: The plan cannot run.
    """
    program = program or Program(plan)
    if program.stream is not None:
        return Run(program, None, epoch, program.stream_start())
    alone = plan.cut is None or plan.cut.world == 1
    order = program.order(epoch, counts=not alone, fetch=False)
    return Run(program, order, epoch, program.start(order, plan.cut))
