"""The split of an order among the workers of a DataLoader: in alternating runs of samples, independent of shards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.engines import Start
from penstock.feed.torch_workers import TorchWorker
from penstock.order import Order, UncountedOrder, WorkerOrder, total
from penstock.plan import EngineOptions, Plan, Scope

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
        samples = plan.samples_per_item
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


def _default_run_length(samples: int, workers: int) -> int:
    return max(1, min(_MAX_RUN_LENGTH, samples // (_MIN_RUNS * workers)))
