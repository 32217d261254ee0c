"""One run of a program: its items, where it stands, and what it had to leave out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.engines import serial
from penstock.engines.cursor import Start
from penstock.engines.delivered import Delivered, accountable
from penstock.engines.lineage import DELIVERED, Trail
from penstock.engines.local import engine as local
from penstock.engines.meter import Meters
from penstock.engines.program import Program
from penstock.engines.report import Report
from penstock.engines.stats import Stats, snapshot
from penstock.errors import DataError
from penstock.order import I64, Order, Piece, tail, total
from penstock.plan import Block, Plan, Skipped

log = logging.getLogger("penstock")

Witness = Callable[[I64, int], None]  # a table of samples (see ``tracing``), and how many items they are in


def _on_ray(*args: Any, **options: Any) -> Iterator[Block]:
    from penstock.engines.ray.engine import run  # nobody who does not use Ray loads any of it

    return run(*args, **options)


ENGINES: dict[str, Callable[..., Iterator[Block]]] = {"local": local.run, "ray": _on_ray, "serial": serial.run}


class Run:
    """An engine at work on a program, from ``start`` on."""

    def __init__(
        self,
        program: Program,
        order: Order | None,
        epoch: int,
        start: Start,
        *,
        tracked: bool = False,
        witness: Witness | None = None,
    ) -> None:
        """Start the engine; it stops when the run is exhausted or closed.

        A run that is ``tracked`` can say where it stands: it keeps the order where it could not otherwise. A
        ``witness`` is told which samples are in the items: of an item that is a block of its own before it is out, of
        others when their block is used up, and at ``tell()``.
        """
        self.start = start
        options = program.plan.engine
        self.meters = Meters(engine=options.name, observer=options.get("observer"))
        self._report = Report(self.meters) if options.get("report") else None
        self.skipped: list[Skipped] = []
        self._listed = 0  # of those, in the quarantine
        self._quarantine = program.quarantine
        self._program, self._order = program, order
        loose = options.name != "serial" and not options.get("ordered", True)
        if tracked and loose and not accountable(program, start):
            loose = False
        self._outstanding = Delivered(start) if tracked and loose else None
        asked = {"ordered": False} if loose else {}
        self._witness = witness
        self._told = 0  # items of the block at hand that the witness knows of
        begin = start if witness is None else replace(start, traced=True)
        self._blocks = ENGINES[options.name](program, order, epoch, begin, self.meters, **asked)
        self._block: Block | None = None
        self._delivered = 0
        self._given = 0  # items of whole blocks
        self._midway = False  # the block's skips are not yet among ours
        self._ended = self._closed = False

    def items(self) -> Iterator[Any]:
        """The items, without keeping track of each: for those who ask for no state."""
        for run in self.runs():
            yield from run
            del run

    def runs(self) -> Iterator[Sequence[Any]]:
        """The items in runs of neighbours, lists or columns, as they come; ``here()`` is exact after each run."""
        try:
            for block in self._arriving():
                if block.inputs or block.items:
                    self._block, self._delivered, self._midway = block, len(block), True
                yield block.items
                self._finish(block)
                del block
        finally:
            self.close()
        self._end()

    def __iter__(self) -> Iterator[Any]:
        """The items; ``here()`` is exact after each. Once the run is closed nothing more comes."""
        try:
            for block in self._arriving():
                if block.inputs or block.items:
                    self._block, self._delivered, self._midway = block, 0, True
                self._told = -1
                if self._witness is not None and len(block) <= 1:
                    self._tell(block, len(block))
                for item in block.items:
                    self._delivered += 1
                    yield item
                    if self._closed:
                        return
                if self._witness is not None:
                    self._tell(block, len(block))
                if self._outstanding is not None and (block.inputs or block.items):
                    self._outstanding.note(block, len(block))
                    self._outstanding.tidy()
                self._finish(block)
            if self._closed:
                return
        finally:
            self.close()
        self._end()

    def tell(self) -> None:
        """Have the witness know of all that was delivered."""
        if self._witness is not None and self._block is not None and self._midway:
            self._tell(self._block, self._delivered)

    def _tell(self, block: Block, delivered: int) -> None:
        if self._told < delivered:
            low, first = max(0, self._told), self._told < 0
            assert self._witness is not None
            self._witness(Trail.of(block, low, delivered, gaps=first).trace(DELIVERED), delivered - low)
            self._told = delivered

    def _arriving(self) -> Iterator[Block]:
        """The blocks, with the time that waiting for them takes."""
        meters = self.meters
        meters.begun = time.perf_counter()
        meters.tell("begin")
        if self._report is not None:
            self._report.start()
        while True:
            meters.since = begun = time.perf_counter()
            block = next(self._blocks, None)
            meters.since = None
            meters.waited += time.perf_counter() - begun
            if block is None:
                return
            meters.items += len(block)
            yield block
            del block

    def _finish(self, block: Block) -> None:
        self.skipped += block.skips
        self._given += len(block)
        self._midway = False
        self._list_skips()
        if block.error is not None:
            raise block.error
        if block.skips:
            self._check_limit()

    def _list_skips(self) -> None:
        """Have the skipped samples before the cursor in the quarantine."""
        if self._quarantine is not None and (self.skipped or self._midway):
            self._quarantine.add(self.passed()[self._listed :])
            self._listed = len(self.skipped)

    def _end(self) -> None:
        self._ended = True
        if self.skipped:
            self._check_limit()
            some = ", ".join(f"{skip.place.shard}:{skip.place.key}" for skip in self.skipped[:3])
            log.warning(
                "skipped %d samples that failed (%s%s)",
                len(self.skipped),
                some,
                ", ..." * (len(self.skipped) > 3),
            )

    def _check_limit(self) -> None:
        limit = self._program.plan.errors.limit
        if limit is None:
            return
        share = 0 < limit < 1
        known = self._order is not None and self._order.size >= 0
        if share and not known and not self._ended:
            return  # a share of an unknown number: the end will tell
        whole = total(self.start.left) if known else self._given + len(self.skipped)
        if len(self.skipped) > (limit * whole if share else limit):
            last = self.skipped[-1]
            many = f"{len(self.skipped)} samples failed, more than on_error's limit of {limit}"
            problem = f"{many}; the last: {last.problem}"
            raise DataError(problem, last.place.shard, last.place.key)

    def passed(self) -> list[Skipped]:
        """The skipped samples that lie before the cursor."""
        open_ = self._block.passed(self._delivered) if self._block is not None and self._midway else []
        return self.skipped + open_

    def here(self) -> Start:
        """Where a run would begin that goes on after what was delivered."""
        self._list_skips()
        if self._ended:
            return self.start.after(None, None)
        if self._block is None:
            return self.start
        if self._outstanding is not None:
            if self._midway:
                self._outstanding.note(self._block, self._delivered)
            return self._outstanding.left()
        return self.start.after(self._block.cursor(self._delivered), self._program.window_level)

    def hold_back(self) -> None:
        """Count the item that came last as not delivered; nothing may be asked of the run after that."""
        self._delivered -= 1

    def left_out(self, here: Start) -> list[Piece]:
        """The positions that the run leaves out if it ends ``here``, so that ranks are equal."""
        if self.start.quota is not None:
            return tail(self.start.left, self.start.quota)
        return [*here.left, *(piece for part in here.opens for piece in part.pieces)]

    def repeated(self) -> list[Piece]:
        """The positions that the run repeats, so that ranks are equal."""
        short = 0 if self.start.quota is None else self.start.quota - total(self.start.left)
        return [self.start.pad] if short > 0 and self.start.pad else []

    def close(self) -> None:
        """Stop the engine."""
        self._closed = True
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()
        self._program.rest()
        if self.meters.ended is None:
            self.meters.ended = time.perf_counter()
            self.meters.tell("end")
            if self._report is not None:
                self._report.stop()

    def stats(self) -> Stats:
        """What the run did so far."""
        return snapshot(self.meters)


def start_run(plan: Plan, epoch: int, program: Program | None = None) -> Run:
    """A run of a plan's epoch from its beginning, for those who ask for no state; ``program`` is that of the plan."""
    program = program or Program(plan)
    if program.stream is not None:
        return Run(program, None, epoch, program.front())
    alone = plan.cut is None or plan.cut.world == 1
    order = program.order(epoch, counts=not alone)
    return Run(program, order, epoch, program.start(order, plan.cut))
