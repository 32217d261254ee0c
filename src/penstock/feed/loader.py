"""The loader: iterates over the epochs of one rank, saves its progress as a state, and resumes from one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle

from penstock.codecs.markup import tag
from penstock.engines import Meters, Start, Stats, closed_at_exit, snapshot
from penstock.errors import PlanError, StageError, StateError, short_traceback
from penstock.feed.agreement import Agreement, Padding, make_agreement
from penstock.feed.backend import Backend, LocalBackend
from penstock.feed.batch_format import BatchFormat
from penstock.feed.delivery import Delivery
from penstock.feed.epochs import Epochs
from penstock.feed.ledger import LedgerWriter, ResumePoint, resume_point
from penstock.feed.torch_isinstance import torch_class
from penstock.feed.torch_stream import TorchStream
from penstock.feed.torch_workers import called_by_torch, this_worker
from penstock.feed.worker_split import WorkerShare
from penstock.order import Piece, total
from penstock.plan import Cut, Identity, Plan, Skipped, check_count


class Loader:
    """Feeds one rank, and can save and load its state.

    Iterating yields the rest of the current epoch. An epoch ends with its last item: from then on the loader is at the
    start of the next epoch, whether or not the consumer asks for another item. Where only a run can tell which item is
    the last, an iteration that finds nothing left of an epoch continues with the next one. There is one live iterator:
    a new one ends the one before and continues where that stopped. With ``ordered=False``, the state has gaps and a
    loader that resumes from it yields the rest in any order; a plan whose state cannot have gaps runs in order.

    Attributes:
        epoch: The current epoch.
        skipped: The samples that failed and were passed, with shard, key and stage.
        padded: The number of samples repeated so far so that ranks are equal (they have the field ``__pad__``).
        dropped: The number of samples left out so far so that ranks are equal.
    """

    def __init__(
        self,
        plan: Plan | None,
        cut: Cut,
        epoch: int = 0,
        *,
        format: BatchFormat | None = None,
        ledger: str | os.PathLike[str] | None = None,
        share: WorkerShare | None = None,
        one_epoch: bool = False,
        backend: Backend | None = None,
    ) -> None:
        """Use ``Dataset.loader`` or ``connect`` to create one.

        Args:
            plan: The plan; None if ``backend`` is given.
            cut: The rank, and how the order is cut.
            epoch: The first epoch.
            format: What items are converted to before they are delivered.
            ledger: The folder of the ledger.
            share: The share of a worker of a DataLoader.
            one_epoch: The loader stays at the end of its epoch, and so does its state: a DataLoader begins the next.
            backend: Runs the plan; by default it runs in this process.
        """
        self._ledger = None if ledger is None else LedgerWriter(ledger)
        self._resume_point: ResumePoint | None = None  # of the next session in the ledger, after a state was loaded
        self._ended: Any = None  # where the last epoch ended in the ledger; in states, until the next one is begun
        known = plan if plan is not None else backend
        assert known is not None
        self._agreement = make_agreement(known.unknown_count_cause, cut)
        if self._agreement is not None:  # each rank has its whole share, and the ranks agree where the epoch ends
            cut = replace(cut, uneven="keep")
        self._plan = None if plan is None else _cut_plan(plan, cut, share)
        self.cut = cut
        self._format, self._share, self._one_epoch = format, share, one_epoch
        self._epochs = Epochs(epoch)  # for workers only: the loader itself uses ``epoch``
        self._dropped: list[tuple[int, list[Piece]]] = []  # (epoch, positions)
        self._padded: list[tuple[int, list[Piece]]] = []  # (epoch, positions)
        self._padding: Padding | None = None
        self._padding_items = 0  # in this epoch so far
        self._backend = backend or LocalBackend(self.plan, cut, share, fetches_counts=ledger is not None)
        self._backend.cut = cut
        self.epoch = epoch if self._backend.fixed_epoch is None else self._backend.fixed_epoch
        self._skipped: list[Skipped] = []
        self._live: Delivery | None = None  # of the live iterator
        self._meters = Meters(begun=0.0, ended=0.0)
        self._rest: Start | None = None  # where to resume while no iterator is live; None: at the start of the epoch
        self._shares_rest = False  # several ranks share the rest: this one's part of it may be empty
        self._in_torch_pass = False  # a DataLoader without workers began the last iterator

    @property
    def plan(self) -> Plan:
        """The plan, cut for this rank.

        Raises:
            PlanError: The plan is not known here: servers run it.
        """
        if self._plan is None:
            raise PlanError("the plan of this loader is not known here: servers run it")
        return self._plan

    def _repr_html_(self) -> str:
        """Return the rank, the epoch and the plan for a notebook."""
        facts = [f"rank {self.cut.rank} of {self.cut.world}", f"epoch {self.epoch}"]
        with suppress(TypeError, PlanError):  # only a run can tell the number
            facts.append(f"{len(self):,} items per epoch")
        described = "" if self._plan is None else self._plan.describe()
        plan = "\n".join(line.strip() for line in described.splitlines())
        return tag("div", tag("b", "Loader"), f" {', '.join(facts)}", tag("pre", plan))

    def __len__(self) -> int:
        """Return the number of items of a whole epoch of this rank.

        Raises:
            TypeError: Only a run can tell the number.
        """
        known = self._backend.length()
        if known is None:
            raise TypeError("the length of this loader is not known without running it")
        return known

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of this epoch; in a DataLoader's worker, over its share of that.

        Raises:
            PlanError: The workers of a DataLoader cannot run this loader.
        """
        if self._share is None and (worker := this_worker(self.cut)) is not None:
            self._refuse_in_workers()
            return TorchStream(self.plan, self._epochs, worker, self._worker_loader)
        in_torch_pass = not self._one_epoch and called_by_torch()
        self._pause()
        if in_torch_pass and self._in_torch_pass and self._is_begun():
            # The pass before was left early: like workers, the DataLoader begins another one.
            self._go_to(self._following_epoch())
        self._in_torch_pass = in_torch_pass
        return self._items(self._start_run(), begun=self._is_begun() and not self._shares_rest)

    def _is_begun(self) -> bool:
        """Return whether something of the current epoch was delivered."""
        return self._padding_items > 0 or not (self._rest is None or self._backend.is_untouched(self.epoch, self._rest))

    def _start_run(self) -> Delivery:
        start = self._rest or self._backend.first_start(self.epoch)
        start_run = partial(self._backend.start_run, self.epoch, start)
        live = Delivery(start_run, format=self._format, ledger=self._ledger)
        self._live, self._meters = live, live.run.meters
        return live

    @closed_at_exit
    def _items(self, live: Delivery, begun: bool) -> Generator[Any, None, None]:
        """Yield the items of a run; if it has none, and its epoch was begun before, yield those of the next epoch."""
        delivered = False
        failure = StageError  # the interpreter clears the module's names before it closes the last iterators
        try:
            for item in self._epoch_items(live):
                delivered, self._shares_rest = True, False
                yield item
            if begun and not delivered and self._live is None and not self._one_epoch:
                yield from self._epoch_items(self._start_run())
        except failure as error:
            raise short_traceback(error) from error.__cause__

    def _epoch_items(self, live: Delivery) -> Iterator[Any]:
        """Yield the items of a run; the epoch has ended before its last item is yielded, if the number is known."""
        try:
            if self._ledger is not None and live is self._live:  # not before: an iterator may stay unused
                self._ensure_session(self._ledger, fresh=self._rest is None)
            items = iter(live)
            if self._agreement is not None:
                items, known = self._agreed_items(live, items, self._agreement), None
            else:
                known = None if self._one_epoch else self._backend.count_items(self.epoch, live.run.start)
            for item, is_last in _with_last(items, known):
                if is_last and live is self._live:
                    self._end_epoch(live)  # the consumer may not ask for another item
                yield item
        except BaseException:
            if live is self._live:
                self._pause()
            raise
        if live is self._live:
            self._end_epoch(live)

    def _end_epoch(self, live: Delivery) -> None:
        self._pause()
        start = live.run.start
        assert self._rest is not None
        if dropped := start.left_out(self._rest):
            self._dropped.append((self.epoch, dropped))
        if start.repeated():
            self._padded.append((self.epoch, start.repeated()))
        ended = None
        if self._ledger is not None:
            self._ledger.end(self._backend.dropped_rows(self.epoch, dropped))
            ended = [*self._ledger.position()]
        self._go_to(self._following_epoch())
        self._ended = ended
        if self._one_epoch:
            self._rest = start.after(None, None)

    def _following_epoch(self) -> int:
        return self.epoch if self._one_epoch or self._backend.fixed_epoch is not None else self.epoch + 1

    def _go_to(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self._rest, self._padding_items, self._shares_rest = epoch, None, 0, False
        self._resume_point = self._ended = None
        self._epochs.reach(epoch)

    def _agreed_items(self, live: Delivery, items: Iterator[Any], agreement: Agreement) -> Iterator[Any]:
        """Yield the items of as many steps as the ranks agree on."""
        while live is self._live:
            has_item, item = agreement.next_item(items)
            has_step = False
            try:
                has_step = agreement.has_step(has_item)
            finally:
                if has_item and not has_step:
                    live.hold_back()
                    self._resume_point = None if self._ledger is None else self._ledger.retract_step()
            if not has_step:
                return
            if not has_item:
                item = self._next_padding_item()
            yield item

    def _next_padding_item(self) -> Any:
        if self._padding is None:
            share = self._backend.first_start(self.epoch).left
            candidates = [*share[:1], *self._backend.whole(self.epoch)]
            self._padding = Padding(partial(self._backend.start_run, self.epoch), candidates)
            for _ in range(self._padding_items):
                self._padding.next_item()
        self._padding_items += 1
        item = self._padding.next_item()
        if self._ledger is not None:
            for rows, items in self._padding.delivered:
                self._ledger.record(rows, items)
        return item if self._format is None else self._format(item)

    def _pause(self) -> None:
        """End the live iterator, and remember where to resume."""
        if self._padding is not None:
            padding, self._padding = self._padding, None
            padding.close()  # its pieces are all of this epoch, including those from before an earlier pause
            before = [row for row in self._padded if row[0] != self.epoch]
            self._padded = [*before, (self.epoch, padding.pieces)]
        if self._live is not None:
            live, self._live = self._live, None
            self._rest = live.here()
            self._skipped += live.skips()
            if self._ledger is not None:
                self._ledger.flush()
            live.close()

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
        return [identity for epoch, pieces in by_epoch for identity in self._backend.identities(epoch, pieces)]

    @property
    def skipped(self) -> list[Skipped]:
        """The samples that failed and were passed."""
        return self._skipped + (self._live.skips() if self._live is not None else [])

    def stats(self) -> Stats:
        """Return what the current or last run did so far."""
        return snapshot(self._meters)

    def close(self) -> None:
        """End the live iterator; a new one continues where it stopped."""
        self._pause()
        if self._ledger is not None:
            self._ledger.close()

    def _ensure_session(self, ledger: LedgerWriter, fresh: bool = False) -> None:
        """Begin a session in the ledger unless the current one continues; ``fresh``: from the start of the epoch."""
        if (fresh and ledger.step > 0) or self._resume_point is not None or not ledger.has_session(self.epoch):
            resumed = self._resume_point or ResumePoint()
            ledger.begin(self._backend.session_dataset(self.epoch), self.epoch, self.cut, resumed)
            self._resume_point = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; in the current epoch, or if ``ds.epoch`` fixes the epoch, nothing changes.

        Raises:
            PlanError: The epoch is not a whole number of at least 0.
        """
        epoch = check_count("epoch", epoch)
        if self._backend.fixed_epoch is not None:
            return
        if epoch != self.epoch:
            self._pause()
            self._go_to(epoch)
        self._epochs.set(epoch)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """This class, which torch takes for one of its iterable datasets."""
        return torch_class(type(self), self._epochs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._backend.worker_problem is not None:
            raise PlanError(f"the loader cannot be sent to another process: {self._backend.worker_problem}")
        self._refuse_if_agreed("other processes")
        rest, resumed = self._here(), self._resume_point
        if self._ledger is not None and rest is not None and self._ledger.has_session(self.epoch):
            resumed = ResumePoint("own", (self._ledger.position(),))
        options = {"format": self._format, "ledger": None if self._ledger is None else self._ledger.folder}
        members = {"_rest": rest, "_epochs": self._epochs, "_resume_point": resumed, "_ended": self._ended}
        members |= {"_shares_rest": self._shares_rest}
        return _unpickle_loader, (cloudpickle.dumps((self.plan, self.cut, self.epoch, options)), members)

    def _here(self) -> Start | None:
        """Return where a new iterator would begin; None: at the start of the epoch."""
        return self._rest if self._live is None else self._live.here()

    def _refuse_in_workers(self) -> None:
        """Refuse to run in the workers of a DataLoader what only the process that trains can do.

        Raises:
            PlanError: Ranks agree where an epoch ends, or there is a ledger or a device.
        """
        if self._backend.worker_problem is not None:
            raise PlanError(f"{self._backend.worker_problem}: use num_workers=0")
        self._refuse_if_agreed("the workers of a DataLoader")
        if self._ledger is not None:
            raise PlanError("ledger= needs the loader in the process that trains: use num_workers=0")
        if self._format is not None and self._format.device is not None:
            raise PlanError("device= needs the loader in the process that trains: use num_workers=0")

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
        if self.epoch == epoch and share is not None:
            share = replace(share, rest=self._here())
        return Loader(self.plan, self.cut, epoch, format=self._format, share=share, one_epoch=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the loader as small JSON; every item that was yielded counts as delivered.

        Raises:
            PlanError: The source cannot be resumed.
        """
        start = self._here() or self._backend.first_start(self.epoch)
        counts: dict[str, Any] = {} if start.quota is None else {"quota": start.quota}
        if self._padding_items:
            counts = {"padded": self._padding_items}
        if self._ledger is not None:
            counts |= self._ledger_entries(self._ledger)
        return self._backend.state(self.epoch, start, counts)

    def _ledger_entries(self, ledger: LedgerWriter) -> dict[str, Any]:
        """Return the position in the ledger; at the untouched start of an epoch, where the one before it ended.

        After a restart, what is left of a begun epoch is not its start, even if it is the same positions.
        """
        resumed, here = self._resume_point, self._here()
        begun = ledger.has_begun(self.epoch) if resumed is None else bool(resumed.parents)
        begun = begun or self._padding_items > 0
        if here is None or (not begun and here == self._backend.first_start(self.epoch)):
            return {"ledger": []} | ({} if self._ended is None else {"ended": self._ended})
        self._ensure_session(ledger)
        return {"ledger": [*ledger.position()]}

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
        given = [state] if state is not None else states or []
        restored = self._backend.restore(given)
        resumed = None if self._ledger is None else resume_point(restored.states, restored.own)
        self._pause()
        self._go_to(restored.epoch)
        self._rest, self._resume_point, self._in_torch_pass = restored.start, resumed, False
        self._padding_items, self._shares_rest, self._ended = restored.padding_items, restored.shared, restored.ended
        if this_worker() is None:  # else it is the state of a pass that has been counted
            self._epochs.set(restored.epoch)


def _with_last(items: Iterator[Any], known: int | None) -> Iterator[tuple[Any, bool]]:
    """Yield the items, each with whether it is the last one; if their number is not known, none is said to be.

    The last of a known number is yielded after the iterator has ended, which may take the inputs that give no item.
    """
    for number, item in enumerate(items, 1):
        if number != known:
            yield item, False
            continue
        try:
            following = list(items)
        except Exception:
            yield item, False  # what came before an error is delivered first
            raise
        assert not following, "a stage yields more items than its length() says"
        yield item, True


def _cut_plan(plan: Plan, cut: Cut, share: WorkerShare | None) -> Plan:
    """Return the plan cut for a rank, with the engine limited to the share of a worker of a DataLoader."""
    plan = plan if plan.cut is not None else plan.shard(cut)
    return plan if share is None else replace(plan, engine=share.limit_engine(plan.engine))


def _unpickle_loader(arguments: bytes, members: dict[str, Any]) -> Loader:
    plan, cut, epoch, options = pickle.loads(arguments)
    loader = Loader(plan, cut, epoch, **options)
    for name, value in members.items():
        setattr(loader, name, value)
    return loader
