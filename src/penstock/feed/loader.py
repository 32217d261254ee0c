"""The loader: iterates over the epochs of one rank, saves its progress as a state, and resumes from one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from penstock.engines import Meters, Program, Run, Start, StartPart, Stats, closed_at_exit, snapshot
from penstock.errors import PlanError, StateError
from penstock.feed.agreement import Agreement, Padding, identities, make_agreement
from penstock.feed.epochs import Epochs
from penstock.feed.ledger import LedgerWriter, ResumePoint, resume_point
from penstock.feed.torch_isinstance import torch_class
from penstock.feed.torch_stream import TorchStream
from penstock.feed.torch_workers import this_worker
from penstock.feed.worker_split import WorkerShare
from penstock.order import Order, Piece, ShardOrder, ShuffledOrder, State, UncountedOrder, recut, to_counted, total
from penstock.plan import Cut, Identity, Plan, Skipped, check_count


class Loader:
    """Feeds one rank, and can save and load its state.

    Iterating yields the rest of the current epoch; at its end, the loader moves on to the next epoch. There is one live
    iterator: a new one ends the one before and continues where that stopped. With ``ordered=False``, the state has gaps
    and a loader that resumes from it yields the rest in any order; a plan whose state cannot have gaps runs in order.

    Attributes:
        epoch: The current epoch.
        skipped: The samples that failed and were passed, with shard, key and stage.
        padded: The number of samples repeated so far so that ranks are equal (they have the field ``__pad__``).
        dropped: The number of samples left out so far so that ranks are equal.
    """

    def __init__(
        self,
        plan: Plan,
        cut: Cut,
        epoch: int = 0,
        *,
        share: WorkerShare | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        """Use ``Dataset.loader`` to create one; with ``share``, it feeds a worker of a DataLoader for one epoch."""
        self._ledger = None if ledger is None else LedgerWriter(ledger)
        self._resume_point: ResumePoint | None = None  # of the next session in the ledger, after a state was loaded
        self._agreement = make_agreement(plan, cut)
        if self._agreement is not None:  # each rank has its whole share, and the ranks agree where the epoch ends
            cut = replace(cut, uneven="keep")
        plan = plan if plan.cut is not None else plan.shard(cut)
        self.plan = plan if share is None else replace(plan, engine=share.limit_engine(plan.engine))
        self.cut = cut
        self._share = share
        self._epochs = Epochs(epoch)  # for workers only: the loader itself uses ``epoch``
        self.epoch = epoch
        self._dropped: list[tuple[int, list[Piece]]] = []  # (epoch, positions)
        self._padded: list[tuple[int, list[Piece]]] = []  # (epoch, positions)
        self._padding: Padding | None = None
        self._padding_items = 0  # in this epoch so far
        self._program = Program(self.plan)
        self._skipped: list[Skipped] = []
        self._epoch_start: tuple[int, Order, Start] | None = None  # the last result of ``_find_epoch_start``
        self._run: Run | None = None
        self._meters = Meters()
        # The (epoch, start) to resume from while no iterator is live; None: the start of the epoch.
        self._rest: tuple[int, Start] | None = None

    def __len__(self) -> int:
        """Return the number of items of a whole epoch of this rank.

        Raises:
            TypeError: Only a run can tell the number.
        """
        known = self._program.length(self.cut)
        if known is None:
            raise TypeError("the length of this loader is not known without running it")
        return known

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of this epoch; in a DataLoader's worker, over its share of that.

        Raises:
            PlanError: The workers of a DataLoader cannot run this loader.
        """
        if self._share is None and (worker := this_worker(self.cut)) is not None:
            self._refuse_if_agreed("the workers of a DataLoader")
            if self._ledger is not None:
                raise PlanError("ledger= needs the loader in the process that trains: use num_workers=0")
            return TorchStream(self.plan, self._epochs, worker, self._worker_loader)
        over = self._run is not None and not any(part.pieces for part in self._run.start.parts())
        over = over and self._agreement is None  # else this rank may have to continue with padding
        self._pause()
        self.epoch += over  # the iterator before had nothing to yield, so it may not have been run to its end
        if self._rest is not None and self._rest[0] != self.epoch:
            self._rest = None  # of an epoch that is over
        order = self._order(self.epoch)
        start = self._rest[1] if self._rest is not None else self._first_start(self.epoch)
        on_delivered = None if self._ledger is None else self._ledger.record
        run = self._run = Run(self._program, order, self.epoch, start, tracked=True, on_delivered=on_delivered)
        self._meters = run.meters
        return self._items(run)

    @closed_at_exit
    def _items(self, run: Run) -> Generator[Any, None, None]:
        try:
            if self._ledger is not None and run is self._run:  # not before: an iterator may stay unused
                self._ensure_session(self._ledger, self.epoch, fresh=self._rest is None)
            yield from run if self._agreement is None else self._agreed_items(run, self._agreement)
        except BaseException:
            if run is self._run:
                self._pause()
            raise
        if run is self._run:
            self._pause()
            assert self._rest is not None
            if dropped := run.left_out(self._rest[1]):
                self._dropped.append((self.epoch, dropped))
            if self._ledger is not None:
                self._ledger.end(self._order(self.epoch), dropped)
                self._resume_point = None
            if run.repeated():
                self._padded.append((self.epoch, run.repeated()))
            self._rest = (self.epoch, run.start.after(None, None))
            self._padding_items = 0
            self.epoch += 1

    def _agreed_items(self, run: Run, agreement: Agreement) -> Iterator[Any]:
        """Yield the items of as many steps as the ranks agree on."""
        items = iter(run)
        while run is self._run:
            has_item, item = agreement.next_item(items)
            has_step = False
            try:
                has_step = agreement.has_step(has_item)
            finally:
                if has_item and not has_step:
                    run.report_delivered()
                    run.hold_back()
                    self._resume_point = None if self._ledger is None else self._ledger.retract_step()
            if not has_step:
                return
            if not has_item:
                item = self._next_padding_item()
            yield item

    def _next_padding_item(self) -> Any:
        if self._padding is None:
            share = self._first_start(self.epoch).left
            self._padding = Padding(self._program, self._order(self.epoch), self.epoch, share)
            for _ in range(self._padding_items):
                self._padding.next_item()
        self._padding_items += 1
        item = self._padding.next_item()
        if self._ledger is not None:
            for rows, items in self._padding.delivered:
                self._ledger.record(rows, items)
        return item

    def _pause(self) -> None:
        """End the live iterator, and remember where to resume."""
        if self._padding is not None:
            padding, self._padding = self._padding, None
            padding.close()  # its pieces are all of this epoch, including those from before an earlier pause
            before = [row for row in self._padded if row[0] != self.epoch]
            self._padded = [*before, (self.epoch, padding.pieces)]
        if self._run is not None:
            run, self._run = self._run, None
            run.report_delivered()
            if self._ledger is not None:
                self._ledger.flush()
            self._rest = (self.epoch, run.here())
            self._skipped += run.skips_so_far()
            run.close()

    @property
    def dropped(self) -> int:
        """The number of samples left out so that ranks are equal, in the epochs that ended."""
        return sum(total(pieces) for _, pieces in self._dropped)

    @property
    def padded(self) -> int:
        """The number of samples repeated so that ranks are equal."""
        return sum(total(pieces) for _, pieces in self._padded)

    @property
    def dropped_samples(self) -> list[Identity]:
        """The samples that were left out."""
        return self._identities(self._dropped)

    @property
    def padded_samples(self) -> list[Identity]:
        """The samples that were repeated."""
        return self._identities(self._padded)

    def _identities(self, by_epoch: list[tuple[int, list[Piece]]]) -> list[Identity]:
        program = self._program
        return [
            identity for epoch, pieces in by_epoch for identity in identities(program, program.order(epoch), pieces)
        ]

    @property
    def skipped(self) -> list[Skipped]:
        """The samples that failed and were passed."""
        return self._skipped + (self._run.skips_so_far() if self._run is not None else [])

    def stats(self) -> Stats:
        """Return what the current or last run did so far."""
        return snapshot(self._meters)

    def close(self) -> None:
        """End the live iterator; a new one continues where it stopped."""
        self._pause()
        if self._ledger is not None:
            self._ledger.close()

    def _ensure_session(self, ledger: LedgerWriter, epoch: int, fresh: bool = False) -> None:
        """Begin a session in the ledger unless the current one continues; ``fresh``: from the start of the epoch."""
        if (fresh and ledger.step > 0) or self._resume_point is not None or not ledger.has_session(epoch):
            ledger.begin(self._program, self._order(epoch), epoch, self.cut, self._resume_point or ResumePoint())
            self._resume_point = None

    def _order(self, epoch: int) -> Order:
        return self._find_epoch_start(epoch)[1]

    def _first_start(self, epoch: int) -> Start:
        return self._find_epoch_start(epoch)[2]

    def _find_epoch_start(self, epoch: int) -> tuple[int, Order, Start]:
        """Return the epoch, its order, and where this loader starts in it."""
        if self._epoch_start is None or self._epoch_start[0] != epoch:
            if self._program.stream is not None:
                raise PlanError("a stream has no positions, so it cannot have a loader: iterate it, or store it first")
            order = self._program.order(epoch)
            start = self._program.start(order, self.cut)
            if self._share is not None:
                order, start = self._share.apply(self.plan, order, start)
            self._epoch_start = (epoch, order, start)
        return self._epoch_start

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; in the current epoch, nothing changes.

        Raises:
            PlanError: The epoch is not a whole number from 0.
        """
        epoch = check_count("epoch", epoch)
        if epoch != self.epoch:
            self._pause()
            self.epoch, self._rest, self._resume_point = epoch, None, None
        self._epochs.set(epoch)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """This class, which torch takes for one of its iterable datasets."""
        return torch_class(type(self), self._epochs)

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse_if_agreed("other processes")
        rest = self._rest if self._run is None else (self.epoch, self._run.here())
        ledger = None if self._ledger is None else (self._ledger.folder, self._resume_point_of_copy(self._ledger, rest))
        return _unpickle_loader, (cloudpickle.dumps(self.plan), self.cut, self.epoch, rest, self._epochs, ledger)

    def _resume_point_of_copy(self, ledger: LedgerWriter, rest: tuple[int, Start] | None) -> ResumePoint | None:
        if self._run is not None:
            self._run.report_delivered()
        if rest is not None and ledger.has_session(rest[0]):
            return ResumePoint("own", (ledger.position(),))
        return self._resume_point

    def _refuse_if_agreed(self, users: str) -> None:
        """Refuse users that cannot agree with the other ranks, if this loader has to.

        Raises:
            PlanError: The ranks of this loader agree where an epoch ends.
        """
        if self._agreement is not None:
            raise PlanError(
                f"the ranks of this loader agree where an epoch ends, and {users} cannot: iterate the loader itself, "
                "or pass uneven='keep'"
            )

    def _worker_loader(self, epoch: int, share: WorkerShare | None) -> Loader:
        """Return a loader for one epoch of a worker of a DataLoader."""
        if self._rest is not None and self._rest[0] == epoch and share is not None:
            share = replace(share, rest=self._rest[1])
        return Loader(self.plan, self.cut, epoch, share=share)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the loader as small JSON; every item that was yielded counts as delivered.

        Raises:
            PlanError: The source cannot be resumed.
        """
        epoch = self.epoch
        if self._run is not None:
            self._run.report_delivered()
            start = self._run.here()
        elif self._rest is not None:
            epoch, start = self._rest
        else:
            start = self._first_start(epoch)
        lazy = isinstance(self._order(epoch), UncountedOrder)
        levels = sorted(start.groups.keys() | start.seen.keys())
        return State(
            plan=self._program.identity(counts=not lazy),
            seed=self._program.seed,
            epoch=epoch,
            cut=self.cut.kind,
            rank=self.cut.rank,
            world=self.cut.world,
            open=[{"of": p.pieces, "n": p.n or 0, "done": p.done, "sub": p.sub} for p in start.opens],
            left=start.left,
            tail=[[level, *start.groups.get(level, (0, 0)), start.seen.get(level, 0)] for level in levels] or None,
            counted=self._state_counts(start, epoch),
            lazy=lazy,
        ).to_json()

    def _state_counts(self, start: Start, epoch: int) -> dict[str, Any]:
        """Return the counts of a state: positions still due, or padding; the position in the ledger."""
        counts: dict[str, Any] = {} if start.quota is None else {"quota": start.quota}
        if self._padding_items:
            counts = {"padded": self._padding_items}
        if self._ledger is None:
            return counts
        self._ensure_session(self._ledger, epoch, fresh=self._run is None and self._rest is None)
        return {**counts, "ledger": [*self._ledger.position()]}

    def load_state_dict(
        self, state: Mapping[str, Any] | None = None, *, states: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Resume from a saved state.

        Args:
            state: This rank's own state, of the same world: exactly the rest follows, in order.
            states: The states of all ranks, of any world: what they have left is cut again for the ranks of this world.

        Raises:
            StateError: The state is damaged, of another dataset or plan, or states are missing.
        """
        if (state is None) == (states is None):
            raise StateError("give one state, or states=[...] of all ranks")
        given = [State.from_json(obj) for obj in ([state] if state is not None else states or [])]
        if not given:
            raise StateError("states=[]: give the states of all ranks")
        for one in given:
            self._check_plan(one)
        epoch = given[0].epoch
        order = self._order(epoch)
        given = [_with_known_positions(one, order) for one in given]
        own = next((s for s in given if s.rank == self.cut.rank and s.world == self.cut.world), None)
        if own is not None and not all(map(order.holds, _all_pieces(own))):
            raise StateError("the state has positions that this dataset does not have")
        start = self._recut(given, order) if own is None else self._start_of(own)
        padding_items = 0 if own is None else _get_count(own, "padded") or 0
        resumed = None if self._ledger is None else resume_point(given, own)
        self._pause()
        self.epoch, self._rest = epoch, (epoch, start)
        self._padding_items, self._resume_point = padding_items, resumed
        if this_worker() is None:  # else it is the state of a pass that has been counted
            self._epochs.set(epoch)

    def _check_plan(self, state: State) -> None:
        if state.plan != self._program.identity(counts=not state.lazy):
            raise StateError(
                "the state belongs to another dataset or plan: shards, their order, or stages that change the count "
                "are not the same"
            )
        if state.seed != self._program.seed:
            raise StateError(f"the state was made with seed {state.seed}, this dataset has seed {self._program.seed}")

    def _start_of(self, state: State) -> Start:
        rows = _parse_tail(state)
        if state.open and self._program.window_level is None:
            raise StateError("the state has open windows, but no stage of this plan has windows that could be open")
        if beyond := [level for level, *_ in rows if not 0 < level < len(self._program.levels)]:
            raise StateError(f"the state's 'tail' names level {beyond[0]}, which this plan does not have")
        return Start(
            state.left,
            tuple(StartPart(window["of"], window["n"], window["done"], window["sub"]) for window in state.open),
            {level: (done, sub) for level, done, sub, _ in rows if done or sub},
            {level: seen for level, _, _, seen in rows if seen},
            self._quota(state),
            self._first_start(self.epoch).pad if self.cut.uneven == "pad" else None,
        )

    def _quota(self, state: State) -> int | None:
        if self.cut.uneven == "keep":
            return None
        quota = _get_count(state, "quota")
        return total(state.left) if quota is None else quota

    def _recut(self, states: list[State], order: Order) -> Start:
        problem = self._program.recut_problem
        own = recut(states, self.cut.rank, self.cut.world, self.cut.kind, order, recut_problem=problem)
        start = self._start_of(replace(own, counted=None))
        if self.cut.uneven == "keep":
            return start
        left = sum(total(state.left) for state in states)
        quota = left // self.cut.world if self.cut.uneven == "drop" else -(-left // self.cut.world)
        return replace(start, quota=quota)


def _unpickle_loader(
    plan: bytes,
    cut: Cut,
    epoch: int,
    rest: tuple[int, Start] | None,
    epochs: Epochs,
    ledger: tuple[Path, ResumePoint | None] | None,
) -> Loader:
    loader = Loader(pickle.loads(plan), cut, epoch, ledger=None if ledger is None else ledger[0])
    loader._rest, loader._epochs, loader._resume_point = rest, epochs, None if ledger is None else ledger[1]
    return loader


def _with_known_positions(state: State, order: Order) -> State:
    """Return the state with positions of ``order``, if it was saved before the samples were counted.

    Raises:
        StateError: The state has counted positions, but the order does not know the counts.
    """
    if not state.lazy or isinstance(order, UncountedOrder):
        if isinstance(order, UncountedOrder) and not state.lazy:
            raise StateError("the state counts samples, but the shards' counts are not known; run `penstock index`")
        return state
    assert isinstance(order, ShardOrder | ShuffledOrder)
    groups = order.groups()
    opens = [{**window, "of": to_counted(window["of"], groups)} for window in state.open]
    return replace(state, left=to_counted(state.left, groups), open=opens, lazy=False)  # type: ignore[arg-type]


def _all_pieces(state: State) -> list[Piece]:
    return [*state.left, *(piece for window in state.open for piece in window["of"])]


def _get_count(state: State, name: str) -> int | None:
    """Return a number of the state's entry ``counted``.

    Raises:
        StateError: It is not a whole number from 0.
    """
    value = (state.counted or {}).get(name)
    if value is not None and not (type(value) is int and value >= 0):
        raise StateError(f"the state's 'counted' holds {name}={value!r:.40}, not a number from 0")
    return value


def _parse_tail(state: State) -> list[tuple[int, int, int, int]]:
    """Return the partly delivered groups of a state, by level.

    Raises:
        StateError: An entry is not four whole numbers from 0.
    """
    rows = state.tail or []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 4 and all(type(n) is int and n >= 0 for n in row)):
            raise StateError(f"the state's 'tail' holds {row!r:.60}, not [level, done, sub, seen]")
    return [(row[0], row[1], row[2], row[3]) for row in rows]
