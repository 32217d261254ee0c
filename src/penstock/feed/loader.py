"""The loader: an iterator over one rank's epochs that can say where it stands and go on from there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from penstock.engines import Meters, Program, Run, Start, StartPart, Stats, snapshot
from penstock.errors import PlanError, StateError
from penstock.feed.agreement import Agreement, Padding, agreement, identities
from penstock.feed.epochs import Epochs
from penstock.feed.ledger import Book, Lineage, lineage
from penstock.feed.torch_isinstance import torch_class
from penstock.feed.torch_stream import Stream
from penstock.feed.torch_workers import this_worker
from penstock.feed.worker_split import WorkerShare
from penstock.order import Order, Piece, ShardOrder, ShuffledOrder, State, UncountedOrder, recut, to_known, total
from penstock.plan import Cut, Identity, Plan, Skipped, check_count


class Loader:
    """Feeds one rank.

    Iterating gives what is still to come of the epoch at hand; running to the end moves on to the next. There is one
    live iterator: a new one ends the one before and goes on where it stood. With ``ordered=False`` the state has gaps,
    and what follows is the rest as a set; plans whose state cannot have gaps are run in order all the same.

    Attributes:
        epoch: The epoch at hand.
        skipped: The samples that failed and were passed, with shard, key and stage.
        padded: Samples repeated so far so that ranks are equal (they carry ``__pad__``).
        dropped: Samples left out so far so that ranks are equal.
    """

    def __init__(
        self,
        plan: Plan,
        cut: Cut,
        epoch: int = 0,
        *,
        deal: WorkerShare | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        """Made by ``Dataset.loader``; with ``deal`` it feeds one worker of a DataLoader for one epoch."""
        self._book = None if ledger is None else Book(ledger)
        self._before: Lineage | None = None  # what the ledger's next session goes on from, if from a state
        self._agreement = agreement(plan, cut)
        if self._agreement is not None:  # each rank has all of its share; where the epoch ends is seen as it runs
            cut = replace(cut, uneven="keep")
        plan = plan if plan.cut is not None else plan.shard(cut)
        self.plan = plan if deal is None else replace(plan, engine=deal.modest(plan.engine))
        self.cut = cut
        self._deal = deal
        self._epochs = Epochs(epoch)  # for workers only: the loader itself counts as it ends an epoch
        self.epoch = epoch
        self._lost: list[tuple[int, list[Piece]]] = []  # by epoch, positions left out
        self._repeated: list[tuple[int, list[Piece]]] = []  # and repeated
        self._padding: Padding | None = None
        self._pads = 0  # items of padding in this epoch so far
        self._program = Program(self.plan)
        self._skipped: list[Skipped] = []
        self._orders: tuple[int, Order, Start] | None = None
        self._run: Run | None = None
        self._meters = Meters()
        # Where it stands while no iterator is live: (epoch, start). None: at the beginning of the epoch.
        self._rest: tuple[int, Start] | None = None

    def __len__(self) -> int:
        """The items of a whole epoch of this rank.

        Raises:
            TypeError: only running it tells.
        """
        known = self._program.length(self.cut)
        if known is None:
            raise TypeError("the length of this loader is not known without running it")
        return known

    def __iter__(self) -> Iterator[Any]:
        """The batches (or samples) still to come in this epoch; in a DataLoader's worker its share of them."""
        if self._deal is None and (worker := this_worker(self.cut)) is not None:
            self._alone("the workers of a DataLoader")
            if self._book is not None:
                raise PlanError("ledger= needs the loader in the process that trains: use num_workers=0")
            return Stream(self.plan, self._epochs, worker, self._dealt)
        over = self._run is not None and not any(part.pieces for part in self._run.start.parts())
        over = over and self._agreement is None  # else this rank may have to go on with padding
        self._pause()
        self.epoch += over  # nobody needs to ask an iterator over nothing for more
        if self._rest is not None and self._rest[0] != self.epoch:
            self._rest = None  # the epoch before is over
        order = self._order(self.epoch)
        start = self._rest[1] if self._rest is not None else self._first(self.epoch)
        witness = None if self._book is None else self._book.note
        run = self._run = Run(self._program, order, self.epoch, start, tracked=True, witness=witness)
        self._meters = run.meters
        return self._items(run)

    def _items(self, run: Run) -> Iterator[Any]:
        try:
            if self._book is not None and run is self._run:  # an iterator that nobody asks for anything is no session
                self._at_work(self._book, self.epoch, anew=self._rest is None)
            yield from run if self._agreement is None else self._agreed(run, self._agreement)
        except BaseException:
            if run is self._run:
                self._pause()
            raise
        if run is self._run:
            self._pause()
            assert self._rest is not None
            if left := run.left_out(self._rest[1]):
                self._lost.append((self.epoch, left))
            if self._book is not None:
                self._book.end(self._order(self.epoch), left)
                self._before = None
            if run.repeated():
                self._repeated.append((self.epoch, run.repeated()))
            self._rest = (self.epoch, run.start.after(None, None))
            self._pads = 0
            self.epoch += 1

    def _agreed(self, run: Run, ranks: Agreement) -> Iterator[Any]:
        """The items of as many steps as the ranks agree on."""
        items = iter(run)
        while run is self._run:
            have, item = ranks.next(items)
            going = False
            try:
                going = ranks.go_on(have)
            finally:
                if have and not going:
                    run.tell()
                    run.hold_back()
                    self._before = None if self._book is None else self._book.take_back()
            if not going:
                return
            if not have:
                item = self._pad_item()
            yield item

    def _pad_item(self) -> Any:
        if self._padding is None:
            share = self._first(self.epoch).left
            self._padding = Padding(self._program, self._order(self.epoch), self.epoch, share)
            for _ in range(self._pads):
                self._padding.take()
        self._pads += 1
        item = self._padding.take()
        if self._book is not None:
            for rows, many in self._padding.told:
                self._book.note(rows, many)
        return item

    def _pause(self) -> None:
        """End the live iterator, remembering where it stood."""
        if self._padding is not None:
            padding, self._padding = self._padding, None
            padding.close()  # whose count begins at the beginning of its epoch, also after a pause
            before = [row for row in self._repeated if row[0] != self.epoch]
            self._repeated = [*before, (self.epoch, padding.pieces)]
        if self._run is not None:
            run, self._run = self._run, None
            run.tell()
            if self._book is not None:
                self._book.flush()
            self._rest = (self.epoch, run.here())
            self._skipped += run.passed()
            run.close()

    @property
    def dropped(self) -> int:
        """Samples left out so that ranks are equal, in the epochs that ended."""
        return sum(total(pieces) for _, pieces in self._lost)

    @property
    def padded(self) -> int:
        """Samples repeated so that ranks are equal."""
        return sum(total(pieces) for _, pieces in self._repeated)

    @property
    def dropped_samples(self) -> list[Identity]:
        """Which samples were left out."""
        return self._named(self._lost)

    @property
    def padded_samples(self) -> list[Identity]:
        """Which samples were repeated."""
        return self._named(self._repeated)

    def _named(self, by_epoch: list[tuple[int, list[Piece]]]) -> list[Identity]:
        program = self._program
        return [who for epoch, pieces in by_epoch for who in identities(program, program.order(epoch), pieces)]

    @property
    def skipped(self) -> list[Skipped]:
        """The samples that failed and were passed."""
        return self._skipped + (self._run.passed() if self._run is not None else [])

    def stats(self) -> Stats:
        """What the last epoch's run did, or does."""
        return snapshot(self._meters)

    def close(self) -> None:
        """End the live iterator."""
        self._pause()
        if self._book is not None:
            self._book.close()

    def _at_work(self, book: Book, epoch: int, anew: bool = False) -> Book:
        """The ledger, with a session at hand that goes on from where the loader stands, or begins ``anew``."""
        if (anew and book.step > 0) or self._before is not None or not book.goes_on(epoch):
            book.begin(self._program, self._order(epoch), epoch, self.cut, self._before or Lineage())
            self._before = None
        return book

    def _order(self, epoch: int) -> Order:
        return self._beginning(epoch)[1]

    def _first(self, epoch: int) -> Start:
        return self._beginning(epoch)[2]

    def _beginning(self, epoch: int) -> tuple[int, Order, Start]:
        """An epoch's order, and where this loader begins it."""
        if self._orders is None or self._orders[0] != epoch:
            if self._program.stream is not None:
                raise PlanError("a stream has no positions, so there is no loader for it; iterate it, or store it")
            order = self._program.order(epoch)
            start = self._program.start(order, self.cut)
            if self._deal is not None:
                order, start = self._deal.share(self.plan, order, start)
            self._orders = (epoch, order, start)
        return self._orders

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless this one is at hand.

        Raises:
            PlanError: not a whole number from 0.
        """
        epoch = check_count("epoch", epoch)
        if epoch != self.epoch:
            self._pause()
            self.epoch, self._rest, self._before = epoch, None, None
        self._epochs.set(epoch)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Its own class, which torch may take for one of its datasets."""
        return torch_class(type(self), self._epochs)

    def __reduce__(self) -> tuple[Any, ...]:
        self._alone("other processes")
        rest = self._rest if self._run is None else (self.epoch, self._run.here())
        book = None if self._book is None else (self._book.folder, self._copied(self._book, rest))
        return _revived, (cloudpickle.dumps(self.plan), self.cut, self.epoch, rest, self._epochs, book)

    def _copied(self, book: Book, rest: tuple[int, Start] | None) -> Lineage | None:
        """What the ledger of a copy goes on from."""
        if self._run is not None:
            self._run.tell()
        return Lineage("own", (book.here(),)) if rest is not None and book.goes_on(rest[0]) else self._before

    def _alone(self, who: str) -> None:
        """Refuse those who cannot speak for this rank where ranks agree."""
        if self._agreement is not None:
            raise PlanError(
                f"the ranks of this loader agree where an epoch ends, and {who} cannot: iterate the loader itself, "
                "or pass uneven='keep'"
            )

    def _dealt(self, epoch: int, deal: WorkerShare | None) -> Loader:
        """What feeds a worker of a DataLoader in one epoch."""
        if self._rest is not None and self._rest[0] == epoch and deal is not None:
            deal = replace(deal, rest=self._rest[1])
        return Loader(self.plan, self.cut, epoch, deal=deal)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as small JSON; what was yielded so far counts as delivered.

        Raises:
            PlanError: the source cannot be taken up again.
        """
        epoch = self.epoch
        if self._run is not None:
            self._run.tell()
            start = self._run.here()
        elif self._rest is not None:
            epoch, start = self._rest
        else:
            start = self._first(epoch)
        lazy = isinstance(self._order(epoch), UncountedOrder)
        levels = sorted(start.groups.keys() | start.seen.keys())
        return State(
            plan=self._program.identity(counts=not lazy),
            seed=self._program.seed,
            epoch=epoch,
            cut=self.cut.how,
            rank=self.cut.rank,
            world=self.cut.world,
            open=[{"of": p.pieces, "n": p.n or 0, "done": p.done, "sub": p.sub} for p in start.opens],
            left=start.left,
            tail=[[level, *start.groups.get(level, (0, 0)), start.seen.get(level, 0)] for level in levels] or None,
            counted=self._counts(start, epoch),
            lazy=lazy,
        ).to_json()

    def _counts(self, start: Start, epoch: int) -> dict[str, Any]:
        """What a state counts: where ranks are equal, padding or positions still due; steps in the ledger."""
        counts: dict[str, Any] = {} if start.quota is None else {"quota": start.quota}
        if self._pads:
            counts = {"padded": self._pads}
        if self._book is None:
            return counts
        book = self._at_work(self._book, epoch, anew=self._run is None and self._rest is None)
        return {**counts, "ledger": [*book.here()]}

    def load_state_dict(
        self, state: Mapping[str, Any] | None = None, *, states: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Go on where a saved state stood.

        Args:
            state: This rank's own state, of the same world: exactly the rest follows, in order.
            states: Those of all ranks, of any world: what they had left is shared out anew.

        Raises:
            StateError: the state is damaged, of another dataset or plan, or states are missing.
        """
        if (state is None) == (states is None):
            raise StateError("give one state, or states=[...] of all ranks")
        given = [State.from_json(obj) for obj in ([state] if state is not None else states or [])]
        if not given:
            raise StateError("states=[]: give the states of all ranks")
        for one in given:
            self._check(one)
        epoch = given[0].epoch
        order = self._order(epoch)
        given = [self._counted(one, order) for one in given]
        own = [s for s in given if s.rank == self.cut.rank and s.world == self.cut.world]
        if own and not all(map(order.holds, _pieces(own[0]))):
            raise StateError("the state speaks of positions that this dataset does not have")
        start = self._own(own[0]) if own else self._recut(given, order)
        pads = (_noted(own[0], "padded") if own else None) or 0
        before = None if self._book is None else lineage(given, own[0] if own else None)
        self._pause()
        self.epoch, self._rest, self._pads, self._before = epoch, (epoch, start), pads, before
        if this_worker() is None:  # else it is the state of a pass that has been counted
            self._epochs.set(epoch)

    def _check(self, state: State) -> None:
        if state.plan != self._program.identity(counts=not state.lazy):
            raise StateError(
                "the state belongs to another dataset or plan: shards, their order, or stages that change the count "
                "are not the same"
            )
        if state.seed != self._program.seed:
            raise StateError(f"the state was made with seed {state.seed}, this dataset has seed {self._program.seed}")

    def _counted(self, state: State, order: Order) -> State:
        """The state in this order's kind of positions."""
        if not state.lazy or isinstance(order, UncountedOrder):
            if isinstance(order, UncountedOrder) and not state.lazy:
                raise StateError("the state counts samples, but the shards' counts are not known; run `penstock index`")
            return state
        assert isinstance(order, ShardOrder | ShuffledOrder)
        groups = order.groups()
        opens = [{**window, "of": to_known(window["of"], groups)} for window in state.open]
        return replace(state, left=to_known(state.left, groups), open=opens, lazy=False)  # type: ignore[arg-type]

    def _own(self, state: State) -> Start:
        rows = _tail(state)
        if state.open and self._program.window_level is None:
            raise StateError("the state has open windows, but no stage of this plan has windows that could be open")
        if beyond := [level for level, *_ in rows if not 0 < level < len(self._program.levels)]:
            raise StateError(f"the state's 'tail' speaks of level {beyond[0]}, which this plan does not have")
        return Start(
            state.left,
            tuple(StartPart(window["of"], window["n"], window["done"], window["sub"]) for window in state.open),
            {level: (done, sub) for level, done, sub, _ in rows if done or sub},
            {level: seen for level, _, _, seen in rows if seen},
            self._quota(state),
            self._pad(),
        )

    def _quota(self, state: State) -> int | None:
        if self.cut.uneven == "keep":
            return None
        kept = _noted(state, "quota")
        return total(state.left) if kept is None else kept

    def _recut(self, states: list[State], order: Order) -> Start:
        mine = recut(states, self.cut.rank, self.cut.world, self.cut.how, order, why_not=self._program.recut_problem)
        start = self._own(replace(mine, counted=None))
        if self.cut.uneven == "keep":
            return start
        whole = sum(total(state.left) for state in states)
        share = whole // self.cut.world if self.cut.uneven == "drop" else -(-whole // self.cut.world)
        return replace(start, quota=share)

    def _pad(self) -> Piece | None:
        if self.cut.uneven != "pad":
            return None
        return self._first(self.epoch).pad


def _revived(
    plan: bytes,
    cut: Cut,
    epoch: int,
    rest: tuple[int, Start] | None,
    epochs: Epochs,
    book: tuple[Path, Lineage | None] | None,
) -> Loader:
    loader = Loader(pickle.loads(plan), cut, epoch, ledger=None if book is None else book[0])
    loader._rest, loader._epochs, loader._before = rest, epochs, None if book is None else book[1]
    return loader


def _pieces(state: State) -> list[Piece]:
    """All positions that a state speaks of."""
    return [*state.left, *(piece for window in state.open for piece in window["of"])]


def _noted(state: State, name: str) -> int | None:
    """A number that a state holds beside its positions."""
    value = (state.counted or {}).get(name)
    if value is not None and not (type(value) is int and value >= 0):
        raise StateError(f"the state's 'counted' holds {name}={value!r:.40}, not a number from 0")
    return value


def _tail(state: State) -> list[tuple[int, int, int, int]]:
    """The half-delivered groups of a state, level by level."""
    rows = state.tail or []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 4 and all(type(n) is int and n >= 0 for n in row)):
            raise StateError(f"the state's 'tail' holds {row!r:.60}, not [level, done, sub, seen]")
    return [(row[0], row[1], row[2], row[3]) for row in rows]
