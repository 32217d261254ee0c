"""The loader: an iterator over one rank's epochs that can say where it stands and go on from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engines import Meters, Part, Program, Run, Start, Stats, snapshot
from penstock.errors import PlanError, StateError
from penstock.order import Lazy, Order, Piece, Shards, Shuffled, State, recut, to_known, total
from penstock.plan import Cut, Plan, Skipped


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

    def __init__(self, plan: Plan, cut: Cut, epoch: int = 0) -> None:
        """Made by ``Dataset.loader``."""
        self.plan = plan if plan.cut is not None else plan.shard(cut)
        self.cut = cut
        self.epoch = epoch
        self.padded = self.dropped = 0
        self._program = Program(self.plan)
        self._skipped: list[Skipped] = []
        self._orders: tuple[int, Order] | None = None
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
        """The batches (or samples) still to come in this epoch."""
        self._pause()
        if self._rest is not None and self._rest[0] != self.epoch:
            self._rest = None  # the epoch before is over
        order = self._order(self.epoch)
        start = self._rest[1] if self._rest is not None else self._program.start(order, self.cut)
        run = self._run = Run(self._program, order, self.epoch, start, tracked=True)
        self._meters = run.meters
        return self._items(run)

    def _items(self, run: Run) -> Iterator[Any]:
        try:
            yield from run
        except BaseException:
            if run is self._run:
                self._pause()
            raise
        if run is self._run:
            self._pause()
            self.dropped += run.dropped
            self.padded += run.padded
            self.epoch += 1

    def _pause(self) -> None:
        """End the live iterator, remembering where it stood."""
        if self._run is not None:
            run, self._run = self._run, None
            self._rest = (self.epoch, run.here())
            self._skipped += run.passed()
            run.close()

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

    def _order(self, epoch: int) -> Order:
        if self._orders is None or self._orders[0] != epoch:
            if self._program.stream is not None:
                raise PlanError("a stream has no positions, so there is no loader for it; iterate it, or store it")
            self._orders = (epoch, self._program.order(epoch))
        return self._orders[1]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as small JSON; what was yielded so far counts as delivered.

        Raises:
            PlanError: the source cannot be taken up again.
        """
        epoch = self.epoch
        if self._run is not None:
            start = self._run.here()
        elif self._rest is not None:
            epoch, start = self._rest
        else:
            start = self._program.start(self._order(epoch), self.cut)
        lazy = isinstance(self._order(epoch), Lazy)
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
            counted=None if start.quota is None else {"quota": start.quota},
            lazy=lazy,
        ).to_json()

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
        self._pause()
        self.epoch, self._rest = epoch, (epoch, start)

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
        if not state.lazy or isinstance(order, Lazy):
            if isinstance(order, Lazy) and not state.lazy:
                raise StateError("the state counts samples, but the shards' counts are not known; run `penstock index`")
            return state
        assert isinstance(order, Shards | Shuffled)
        groups = order.groups()
        opens = [{**window, "of": to_known(window["of"], groups)} for window in state.open]
        return replace(state, left=to_known(state.left, groups), open=opens, lazy=False)  # type: ignore[arg-type]

    def _own(self, state: State) -> Start:
        rows = _tail(state)
        return Start(
            state.left,
            tuple(Part(window["of"], window["n"], window["done"], window["sub"]) for window in state.open),
            {level: (done, sub) for level, done, sub, _ in rows if done or sub},
            {level: seen for level, _, _, seen in rows if seen},
            self._quota(state),
            self._pad(),
        )

    def _quota(self, state: State) -> int | None:
        if self.cut.uneven == "keep":
            return None
        kept = (state.counted or {}).get("quota")
        return kept if isinstance(kept, int) else total(state.left)

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
        return self._program.start(self._order(self.epoch), self.cut).pad


def _pieces(state: State) -> list[Piece]:
    """All positions that a state speaks of."""
    return [*state.left, *(piece for window in state.open for piece in window["of"])]


def _tail(state: State) -> list[tuple[int, int, int, int]]:
    """The half-delivered groups of a state, level by level."""
    rows = state.tail or []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 4 and all(type(n) is int and n >= 0 for n in row)):
            raise StateError(f"the state's 'tail' holds {row!r:.60}, not [level, done, sub, seen]")
    return [(row[0], row[1], row[2], row[3]) for row in rows]
