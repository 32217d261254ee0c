"""A pipeline: one plan for several consumers, whose runs share one set of pools and one memory limit.

The contract:
- a pipeline keeps nothing about a consumer: what it yields is a function of (plan, epoch, start, part), so any
  pipeline of the same plan can continue for any other;
- a ``Start`` is the progress of one rank: ``program.start(order, cut)`` at the beginning of an epoch, ``restore`` of a
  state, or the ``after`` of the last batch that the consumer got;
- what it yields is what ``ds.loader(rank, world)`` yields from that start, item by item, in order;
- runs may begin, be read and be closed in different threads. Together they hold at most the memory of one run
  (``on(memory=)``): each has an equal share of the blocks in progress, and at most ``MAX_READY_BLOCKS`` finished blocks
  wait for a consumer, as far as they fit into its share;
- closing a run cancels its blocks that no worker has begun; the pools work on for the others until ``close``.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engines.cursor import Start
from penstock.engines.lineage import POSITION
from penstock.engines.local.engine import PooledRun
from penstock.engines.meter import Meters
from penstock.engines.program import Program
from penstock.engines.run import DeliveryCallback, Run, start_pools
from penstock.errors import EngineError, PlanError
from penstock.order import I64, Order, UncountedOrder, WorkerOrder, tail, total
from penstock.plan import Plan, Recut, Scope, Skipped

ORDERS_KEPT = 4  # epochs whose order is kept: consumers are in the same epoch, or in the next
ALL_BATCHES = (0, 1)


@dataclass(frozen=True, slots=True)
class Served:
    """One item of a run, and the progress after it; the last one of a run has no item.

    Attributes:
        item: The item.
        after: Where a run starts that continues after the item.
        rows: The samples of the item, as tables (see ``engines.lineage``) with the number of items; if requested.
        skips: The samples that were skipped since the item before.
        ended: This is the end of the run, and there is no item.
    """

    item: Any
    after: Start
    rows: list[tuple[I64, int]] = field(default_factory=list)
    skips: list[Skipped] = field(default_factory=list)
    ended: bool = False


def split_problem(plan: Plan) -> str | None:
    """Return why the batches of a plan cannot be split among several pipelines; None if they can."""
    if plan.errors.action == "skip":
        return 'on_error("skip") may change the number of samples'
    if plan.changes_count:
        return f"{plan.unknown_count_cause or 'a stage'} changes the number of samples"
    groups = [stage for stage in plan.body if stage.scope is not Scope.EACH]
    fixed = [stage.recut is Recut.REGROUP and stage.group_size is not None for stage in groups]
    if not all(fixed):
        return f"{groups[fixed.index(False)].describe()} does not form batches of a fixed size"
    return None


class Pipeline:
    """Runs a plan for several consumers at the same time; thread-safe.

    Attributes:
        program: The plan with its sources open; it is not cut.
        meters: What the pools measure.
    """

    def __init__(self, plan: Plan) -> None:
        """Nothing is opened and no pool starts before the first run.

        Raises:
            PlanError: The plan is cut, or runs out of order.
        """
        if plan.cut is not None:
            raise PlanError("the dataset is cut by shard(): its consumers give their rank and world themselves")
        if not plan.engine.get("ordered", True):
            raise PlanError("on(ordered=False) yields another order in every run, so no server could continue another")
        self.program = Program(plan, shared=True, fetches_counts=False)  # consumers and servers agree on the order
        self.meters = Meters(engine=plan.engine.name, observer=plan.engine.get("observer"))
        self._lock = threading.RLock()
        self._orders: dict[int, Order] = {}
        self._pools: PooledRun | None = None
        self._runs = 0
        self._started = self._closed = False

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch.

        Raises:
            PlanError: The plan needs counts, and they are unknown, or the source is a stream.
        """
        with self._lock:
            if self.program.stream is not None:
                raise PlanError("a stream has no positions, so it cannot be served: store it first")
            if epoch not in self._orders:
                while len(self._orders) >= ORDERS_KEPT:
                    del self._orders[next(iter(self._orders))]
                self._orders[epoch] = self.program.order(epoch)
            return self._orders[epoch]

    @property
    def split_problem(self) -> str | None:
        """Why batches cannot be split among several pipelines, so that one runs them all; None if they can."""
        return split_problem(self.program.plan)

    def can_split(self, epoch: int, start: Start) -> bool:
        """Return whether the batches after ``start`` can be split among several pipelines."""
        midway = start.opens or start.groups or start.seen or any(piece[3] for piece in start.left)
        return self.split_problem is None and not midway and not isinstance(self.order(epoch), UncountedOrder)

    def batches(
        self, epoch: int, start: Start, *, part: tuple[int, int] = ALL_BATCHES, traced: bool = False
    ) -> Generator[Served, None, None]:
        """Yield the items after ``start``, each with the progress after it, then the end of the run.

        Args:
            epoch: The number of the epoch.
            start: Where to begin.
            part: Of the items number 0, 1, ... after ``start``, yield those with ``number % part[1] == part[0]``.
            traced: Also return which samples the items hold, for a ledger.

        Raises:
            PenstockError: A sample failed, after the items before it, or the plan cannot run.
        """
        rows: list[tuple[I64, int]] = []
        share = _Share(self, epoch, start, *part)
        on_delivered = (lambda table, items: rows.append((share.traced(table), items))) if traced else None
        seen = number = 0
        with closing(self.run(epoch, share.start, order=share.order, on_delivered=on_delivered)) as run:
            for number, item in enumerate(run, 1):
                run.report_delivered()
                skips = run.skips_so_far()
                yield Served(item, share.after(run, number), rows.copy(), skips[seen:])
                rows.clear()
                seen = len(skips)
            yield Served(None, start.after(None, None), rows, run.skips_so_far()[seen:], ended=True)

    def run(
        self, epoch: int, start: Start, *, order: Order | None = None, on_delivered: DeliveryCallback | None = None
    ) -> Run:
        """Return a run that uses the pools of this pipeline; close it, or iterate it to its end.

        Args:
            epoch: The number of the epoch.
            start: Where to begin.
            order: Replaces the order of the epoch.
            on_delivered: Called with the samples that are in the items, as for any run.

        Raises:
            EngineError: The engine cannot run the plan, or the pipeline is closed.
        """
        order = order or self.order(epoch)
        with self._lock:
            if self._closed:
                raise EngineError("the pipeline is closed")
            if not self._started:
                self._started, self._pools = True, start_pools(self.program, self.meters)
            program, self._runs = self.program.for_one_run(), self._runs + 1
        own = program is not self.program
        options: dict[str, Any] = {"tracked": True, "on_delivered": on_delivered, "pools": self._pools, "alone": own}
        return _PipelineRun(self._run_ended, program, order, epoch, start, **options)

    def _run_ended(self) -> None:
        with self._lock:
            self._runs -= 1
            if not self._runs:
                self.program.suspend()

    @property
    def runs(self) -> int:
        """The number of open runs."""
        return self._runs

    def close(self) -> None:
        """End all runs and the pools."""
        with self._lock:
            self._closed, pools, self._pools = True, self._pools, None
        if pools is not None:
            pools.close()
        if "opened" in self.program.__dict__:
            self.program.suspend()


class _PipelineRun(Run):
    """A run that tells its pipeline when it has ended."""

    def __init__(self, on_end: Any, *args: Any, **options: Any) -> None:
        self._on_end = on_end
        Run.__init__(self, *args, **options)

    def close(self) -> None:
        Run.close(self)
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class _Share:
    """What one of several pipelines runs of the items after a start: all of them, or every n-th."""

    def __init__(self, pipeline: Pipeline, epoch: int, start: Start, index: int, count: int) -> None:
        self._whole, self._index, self._count = start, index, count
        self.order, self.start = pipeline.order(epoch), start
        if count == 1:
            return
        if not pipeline.can_split(epoch, start):
            raise PlanError(
                "the batches of this plan cannot be split: " + (pipeline.split_problem or "a group is open")
            )
        self._samples = pipeline.program.plan.samples_per_item or 1
        pieces = [piece for part in start.parts() for piece in part.pieces]
        self._own_order = WorkerOrder(self.order, pieces, index, count, self._samples)
        self.order = self._own_order
        self.start = Start(self._own_order.whole())
        if (padding := start.padded_from()) < len(pieces):
            unpadded = self._own_order.count_before(total(pieces[:padding]))
            left = [[0, unpadded, 1, 0]] if unpadded else []
            self.start = Start(left, quota=self._own_order.size, pad=[unpadded, self._own_order.size, 1, 0])

    def after(self, run: Run, number: int) -> Start:
        """Return the progress of the whole stream after item ``number`` of this share, counted from 1."""
        if self._count == 1:
            return run.here()
        start, delivered = self._whole, ((number - 1) * self._count + self._index + 1) * self._samples
        quota = None if start.quota is None else max(0, start.quota - delivered)
        return replace(start, left=tail(start.left, delivered), quota=quota)

    def traced(self, table: I64) -> I64:
        """Return a table of samples with their positions in the order of the epoch."""
        if self._count > 1:
            table = table.copy()
            table[POSITION] = self._own_order.inner_positions(table[POSITION])
        return table
