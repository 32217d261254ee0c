"""One run of a program: its items, where it stands, and what it had to leave out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.engines import local, serial
from penstock.engines.cursor import Start
from penstock.engines.ledger import Ledger, accountable
from penstock.engines.meter import Meters
from penstock.engines.program import Program
from penstock.engines.report import Report
from penstock.engines.stats import Stats, snapshot
from penstock.errors import DataError
from penstock.order import Order, total
from penstock.plan import Block, Skipped

log = logging.getLogger("penstock")

ENGINES: dict[str, Callable[..., Iterator[Block]]] = {"local": local.run, "serial": serial.run}


class Run:
    """An engine at work on a program, from ``start`` on."""

    def __init__(
        self, program: Program, order: Order | None, epoch: int, start: Start, *, tracked: bool = False
    ) -> None:
        """Start the engine; it stops when the run is exhausted or closed.

        A run that is ``tracked`` can say where it stands: it keeps the order where it could not otherwise.
        """
        self.start = start
        options = program.plan.engine
        self.meters = Meters(engine=options.name, observer=options.get("observer"))
        self._report = Report(self.meters) if options.get("report") else None
        self.skipped: list[Skipped] = []
        self._program, self._order = program, order
        loose = options.name != "serial" and not options.get("ordered", True)
        if tracked and loose and not accountable(program, start):
            loose = False
        self._ledger = Ledger(start) if tracked and loose else None
        asked = {"ordered": False} if loose else {}
        self._blocks = ENGINES[options.name](program, order, epoch, start, self.meters, **asked)
        self._block: Block | None = None
        self._delivered = 0
        self._given = 0  # items of whole blocks
        self._midway = False  # the block's skips are not yet among ours
        self._ended = self._closed = False

    def items(self) -> Iterator[Any]:
        """The items, without keeping track of each: for those who ask for no state."""
        try:
            for block in self._arriving():
                yield from block.items
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
                for item in block.items:
                    self._delivered += 1
                    yield item
                    if self._closed:
                        return
                if self._ledger is not None and (block.inputs or block.items):
                    self._ledger.note(block, len(block))
                    self._ledger.tidy()
                self._finish(block)
            if self._closed:
                return
        finally:
            self.close()
        self._end()

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
        if block.error is not None:
            raise block.error
        if block.skips:
            self._check_limit()

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
        if self._ended:
            return self.start.after(None, None)
        if self._block is None:
            return self.start
        if self._ledger is not None:
            if self._midway:
                self._ledger.note(self._block, self._delivered)
            return self._ledger.left()
        return self.start.after(self._block.cursor(self._delivered), self._program.window_level)

    @property
    def dropped(self) -> int:
        """Positions left out so that ranks are equal."""
        return max(0, total(self.start.left) - self.start.quota) if self.start.quota is not None else 0

    @property
    def padded(self) -> int:
        """Positions repeated so that ranks are equal."""
        return max(0, self.start.quota - total(self.start.left)) if self.start.quota is not None else 0

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
