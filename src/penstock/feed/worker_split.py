"""How the workers of a DataLoader split an order: in alternating runs of samples, independent of shards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.engines import Start
from penstock.errors import PlanError
from penstock.feed.torch_workers import TorchWorker
from penstock.order import ENDLESS, I64, Order, Piece, Refs, Spans, UncountedOrder, total
from penstock.order import size as size_of
from penstock.plan import EngineOptions, Plan, Recut, Scope

# For plans whose items have no fixed number of samples.
_MAX_RUN_LENGTH = 256  # enough samples to read in one go
_MIN_RUNS = 16  # runs per worker, so that all workers end at about the same time


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The share of one worker: it takes a run of samples, skips the runs of the other workers, and so on.

    Attributes:
        id: The number of the worker, from 0.
        workers: The number of workers.
        run_length: The samples of a run; None: chosen by the size of the order.
        rest: What the workers share, if it is not the whole epoch.
    """

    id: int
    workers: int
    run_length: int | None = None
    rest: Start | None = None

    @classmethod
    def of(cls, worker: TorchWorker, plan: Plan, items_per_batch: int) -> WorkerShare:
        """Return the share of a worker whose DataLoader collates ``items_per_batch`` items: runs are whole batches."""
        samples = _samples_per_item(plan)
        return cls(worker.id, worker.workers, None if samples is None else samples * items_per_batch)

    def limit_engine(self, engine: EngineOptions) -> EngineOptions:
        """Return the engine with this worker's share of the machine."""
        return replace(engine, options=(*engine.options, ("sharers", self.workers)))

    def apply(self, plan: Plan, order: Order, start: Start) -> tuple[Order, Start]:
        """Return the order of this worker's samples, and where it starts."""
        start = self.rest or start
        is_within_group = start.opens or start.groups or start.seen or any(piece[3] for piece in start.left)
        if is_within_group or any(stage.scope is Scope.ALL for stage in plan.body):
            # A stage that sees the whole stream, or a group that is partly delivered, cannot be split.
            return order, start if self.id == 0 else Start([])
        if isinstance(order, UncountedOrder):
            workers = min(self.workers, order.group_count)
            return order, Start(order.cut(start.left, self.id, workers, "step") if self.id < workers else [])
        pieces = [piece for part in start.parts() for piece in part.pieces]
        run_length = self.run_length or _default_run_length(total(pieces), self.workers)
        own = WorkerOrder(order, pieces, self.id, self.workers, run_length)
        padding = start.padded_from()
        if padding < len(pieces):  # the padding is the end of a worker's share, too
            unpadded = own.count_before(total(pieces[:padding]))
            left = [[0, unpadded, 1, 0]] if unpadded else []
            return own, Start(left, quota=own.size, pad=[unpadded, own.size, 1, 0])
        return own, Start(own.whole())


def _samples_per_item(plan: Plan) -> int | None:
    """Return how many samples make one item of the plan; None if that differs from item to item."""
    samples = 1
    if plan.changes_count or plan.errors.action == "skip":
        return None
    for stage in plan.body:
        if stage.recut is Recut.REGROUP and stage.group_size is not None:
            samples *= stage.group_size
        elif stage.recut is Recut.NEVER:
            return None
    return samples


def _default_run_length(samples: int, workers: int) -> int:
    return max(1, min(_MAX_RUN_LENGTH, samples // (_MIN_RUNS * workers)))


class WorkerOrder(Order):
    """One worker's share of some pieces of an order."""

    stable = fixed = False

    def __init__(self, inner: Order, pieces: list[Piece], worker: int, workers: int, run_length: int) -> None:
        self._inner, self._worker, self._workers, self._run_length = inner, worker, workers, run_length
        self._pieces = np.array([piece[:3] for piece in pieces], np.int64).reshape(-1, 3)
        self._ends = np.cumsum([0, *map(size_of, pieces)])
        self.size = ENDLESS if self._ends[-1] >= ENDLESS else self.count_before(int(self._ends[-1]))

    def count_before(self, offset: int) -> int:
        """Return how many positions of this share are before an offset into the pieces."""
        rounds, over = divmod(offset, self._run_length * self._workers)
        return rounds * self._run_length + min(self._run_length, max(0, over - self._worker * self._run_length))

    def at(self, p: I64) -> Refs:
        round_, within = np.divmod(p, self._run_length)
        offset = (round_ * self._workers + self._worker) * self._run_length + within
        if len(self._pieces) == 1:
            start, _, step = self._pieces[0].tolist()
            return self._inner.at(start + step * offset)
        piece = np.searchsorted(self._ends, offset, "right") - 1
        return self._inner.at(self._pieces[piece, 0] + self._pieces[piece, 2] * (offset - self._ends[piece]))

    def _spans(self, stop: int) -> Spans:
        raise PlanError("a worker's share cannot be shuffled: it is the last change to an order")
