"""Backends of a loader, which yield its items: a plan that runs in this process, or servers that run it elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from penstock.engines import (
    DeliveryCallback,
    EpochStart,
    Meters,
    Program,
    Restored,
    Run,
    Start,
    is_untouched,
    make_state,
    restore,
)
from penstock.errors import PlanError
from penstock.feed.ledger import SessionDataset, dropped_rows, session_dataset
from penstock.feed.worker_split import WorkerShare
from penstock.order import I64, Piece
from penstock.plan import Cut, Identity, Plan, Skipped


class ItemRun(Protocol):
    """One run of an epoch, as ``engines.Run`` describes it."""

    start: Start
    meters: Meters

    def __iter__(self) -> Iterator[Any]: ...
    def report_delivered(self) -> None: ...
    def skips_so_far(self) -> list[Skipped]: ...
    def here(self) -> Start: ...
    def hold_back(self) -> None: ...
    def close(self) -> None: ...


class Backend(Protocol):
    """What a loader asks about its plan; positions are those of one rank.

    Attributes:
        cut: The rank, and how the order is cut.
        skips: Samples that fail are skipped.
        fixed_epoch: The only epoch, if the plan fixes it.
        unknown_count_cause: What makes the number of items unknown before a run; None if it is known.
        worker_problem: Why the workers of a DataLoader cannot run the loader; None if they can.
    """

    cut: Cut

    @property
    def skips(self) -> bool: ...

    @property
    def fixed_epoch(self) -> int | None: ...

    @property
    def unknown_count_cause(self) -> str | None: ...

    @property
    def worker_problem(self) -> str | None: ...

    def length(self) -> int | None:
        """Return the number of items of a whole epoch; None if only a run can tell."""

    def first_start(self, epoch: int) -> Start:
        """Return where an epoch starts."""

    def whole(self, epoch: int) -> list[Piece]:
        """Return the whole order of an epoch, of all ranks."""

    def is_untouched(self, epoch: int, start: Start) -> bool:
        """Return whether nothing of the epoch was delivered before ``start``."""

    def count_items(self, epoch: int, start: Start) -> int | None:
        """Return how many items follow ``start``; None if only a run can tell."""

    def start_run(self, epoch: int, start: Start, on_delivered: DeliveryCallback | None) -> ItemRun:
        """Start a run; ``on_delivered`` is called with the samples of its items."""

    def state(self, epoch: int, start: Start, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a loader that continues at ``start``; ``counts`` is its entry ``counted``."""

    def restore(self, given: Sequence[Mapping[str, Any]]) -> Restored:
        """Return where the loader continues, given its own state or those of all ranks."""

    def identities(self, epoch: int, pieces: Sequence[Piece]) -> Iterable[Identity]:
        """Return the identities of the samples at the positions of ``pieces``."""

    def session_dataset(self, epoch: int) -> SessionDataset:
        """Return what a ledger records about the dataset."""

    def dropped_rows(self, epoch: int, pieces: Sequence[Piece]) -> Iterable[I64]:
        """Return the samples at the positions of ``pieces`` as tables for a ledger: they are dropped."""


class LocalBackend:
    """Runs the plan of a loader in this process."""

    worker_problem = None

    def __init__(self, plan: Plan, cut: Cut, share: WorkerShare | None, *, fetches_counts: bool = False) -> None:
        """Open nothing yet.

        Args:
            plan: The plan.
            cut: The rank, and how the order is cut.
            share: The share of a worker of a DataLoader.
            fetches_counts: Remote shards whose counts are asked for, and are not known, are fetched for that.
        """
        self.cut = cut
        self.skips, self.fixed_epoch = plan.errors.action == "skip", plan.epoch
        self.unknown_count_cause = plan.unknown_count_cause
        self._plan, self._share = plan, share
        self._program = Program(plan, shared=share is not None, fetches_counts=fetches_counts)
        self._found: EpochStart | None = None  # the last result of ``_epoch_start``

    def _epoch_start(self, epoch: int) -> EpochStart:
        """Return the epoch, its order, and where this rank starts in it."""
        if self._found is None or self._found[0] != epoch:
            if self._program.stream is not None:
                raise PlanError("a stream has no positions, so it cannot have a loader: iterate it, or store it first")
            order = self._program.order(epoch)
            start = self._program.start(order, self.cut)
            if self._share is not None:
                order, start = self._share.apply(self._plan, order, start)
            self._found = (epoch, order, start)
        return self._found

    def length(self) -> int | None:
        return self._program.length(self.cut)

    def first_start(self, epoch: int) -> Start:
        return self._epoch_start(epoch)[2]

    def whole(self, epoch: int) -> list[Piece]:
        return self._epoch_start(epoch)[1].whole()

    def is_untouched(self, epoch: int, start: Start) -> bool:
        return is_untouched(self._program, self.cut, start, self._epoch_start(epoch))

    def count_items(self, epoch: int, start: Start) -> int | None:
        return None if self.skips else self._program.items_from(self._epoch_start(epoch)[1], start)

    def start_run(self, epoch: int, start: Start, on_delivered: DeliveryCallback | None) -> ItemRun:
        order = self._epoch_start(epoch)[1]
        return Run(self._program, order, epoch, start, tracked=True, on_delivered=on_delivered, cut=self.cut)

    def state(self, epoch: int, start: Start, counts: dict[str, Any]) -> dict[str, Any]:
        return make_state(self._program, self.cut, start, self._epoch_start(epoch), counts).to_json()

    def restore(self, given: Sequence[Mapping[str, Any]]) -> Restored:
        return restore(self._program, self.cut, given, self._epoch_start)

    def identities(self, epoch: int, pieces: Sequence[Piece]) -> Iterable[Identity]:
        return self._program.identities(self._program.order(epoch), pieces)

    def session_dataset(self, epoch: int) -> SessionDataset:
        return session_dataset(self._program, self._epoch_start(epoch)[1])

    def dropped_rows(self, epoch: int, pieces: Sequence[Piece]) -> Iterable[I64]:
        return dropped_rows(self._epoch_start(epoch)[1], pieces)
