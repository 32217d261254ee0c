"""A loader's progress as a state, and back: checks that states fit, merges them, and cuts the rest among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.engines.cursor import Start, StartPart
from penstock.engines.program import Program
from penstock.errors import StateError
from penstock.order import (
    Order,
    Piece,
    ShardOrder,
    ShuffledOrder,
    State,
    UncountedOrder,
    is_state_number,
    recut,
    to_counted,
    total,
)
from penstock.plan import Cut


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a loader resumes.

    Attributes:
        epoch: The epoch.
        start: What is left of it for this rank.
        padding_items: How many items this rank repeated already so that ranks are equal.
        states: The states that were given, with positions of the epoch's order.
        own: Which of them is this rank's own; None if what the ranks had left was cut again.
    """

    epoch: int
    start: Start
    padding_items: int
    states: list[State]
    own: State | None

    @property
    def shared(self) -> bool:
        """Whether ranks share what others had left, so that the part of a rank may be empty."""
        return self.own is None and any(state.left or state.open for state in self.states)

    @property
    def ended(self) -> Any:
        """Where the epoch before ended in the ledger, if the state is at the untouched start of an epoch."""
        return None if self.own is None else (self.own.counted or {}).get("ended")


EpochStart = tuple[int, Order, Start]  # an epoch's number, its order, and where a loader starts in it


def make_state(program: Program, cut: Cut, start: Start, epoch_start: EpochStart, counts: dict[str, Any]) -> State:
    """Return the state of a loader that continues at ``start``.

    Args:
        program: The program of the loader.
        cut: Its rank, and how the order is cut.
        start: What is left of the epoch for this rank.
        epoch_start: The epoch.
        counts: The entry ``counted`` of the state.
    """
    epoch, order, _ = epoch_start
    lazy = isinstance(order, UncountedOrder)
    plan = program.identity(counts=not lazy)
    state = State(plan, program.seed, epoch, cut.kind, cut.rank, cut.world, [], [], counted=counts, lazy=lazy)
    return state_at(state, start)


def state_at(state: State, start: Start) -> State:
    """Return the state of the same loader at another position of its epoch."""
    levels = sorted(start.groups.keys() | start.seen.keys())
    return replace(
        state,
        open=[{"of": part.pieces, "n": part.n or 0, "done": part.done, "sub": part.sub} for part in start.opens],
        left=start.left,
        tail=[[level, *start.groups.get(level, (0, 0)), start.seen.get(level, 0)] for level in levels] or None,
    )


def restore(
    program: Program, cut: Cut, given: Sequence[Mapping[str, Any]], find_epoch_start: Callable[[int], EpochStart]
) -> Restored:
    """Return where a rank resumes, given its own state or the states of all ranks of any world.

    Args:
        program: The program of the loader.
        cut: Its rank, and how the order is cut.
        given: The states.
        find_epoch_start: Returns an epoch's number, its order, and where this loader starts in it.

    Raises:
        StateError: A state is damaged, of another dataset or plan, or states are missing or of different epochs.
    """
    states = [State.from_json(one) for one in given]
    if not states:
        raise StateError("states=[]: give the states of all ranks")
    for state in states:
        _check_counts(state, find_epoch_start(state.epoch)[1])
        _check_plan(program, state)
    states = [_with_known_positions(state, find_epoch_start(state.epoch)[1]) for state in states]
    own = next((state for state in states if (state.rank, state.world) == (cut.rank, cut.world)), None)
    if own is not None and own.cut != cut.kind and len({state.epoch for state in states}) > 1:
        own = None  # the ranks are at both sides of an epoch's end: they would cut the next epoch in two ways
    states = states if own is not None else _in_one_epoch(program, states)
    epoch, order, first = find_epoch_start(states[0].epoch if own is None else own.epoch)
    if program.plan.epoch not in (None, epoch):
        raise StateError(f"the state is of epoch {epoch}, but ds.epoch({program.plan.epoch}) fixes another one")
    if own is None:
        return Restored(epoch, _recut(program, cut, states, order, first), 0, states, None)
    if not all(map(order.holds, _all_pieces(own))):
        raise StateError("the state has positions that this dataset does not have")
    return Restored(epoch, _start_of(program, cut, own, first), _get_count(own, "padded") or 0, states, own)


def _check_counts(state: State, order: Order) -> None:
    if isinstance(order, UncountedOrder) and not state.lazy:
        raise StateError(
            "the state was taken when the samples of the shards were counted, and their counts are not known here; "
            "run `penstock index` on the shards, or give the manifest of the run that made the state"
        )


def _check_plan(program: Program, state: State) -> None:
    if state.plan != program.identity(counts=not state.lazy):
        raise StateError(
            "the state belongs to another dataset or plan: shards, their order, or stages that change the count "
            "are not the same"
        )
    if state.seed != program.seed:
        raise StateError(f"the state was made with seed {state.seed}, this dataset has seed {program.seed}")


def _with_known_positions(state: State, order: Order) -> State:
    """Return the state with positions of ``order``, if it was saved before the samples were counted."""
    if not state.lazy or isinstance(order, UncountedOrder):
        return state
    assert isinstance(order, ShardOrder | ShuffledOrder)
    groups = order.groups()
    opens = [{**window, "of": to_counted(window["of"], groups)} for window in state.open]
    return replace(state, left=to_counted(state.left, groups), open=opens, lazy=False)  # type: ignore[arg-type]


def _in_one_epoch(program: Program, states: list[State]) -> list[State]:
    """Return the states of the earliest epoch; a rank at the untouched start of the next one has nothing left of it.

    Raises:
        StateError: A rank is further than that.
    """
    epoch = min(state.epoch for state in states)
    return [state if state.epoch == epoch else _finished(program, state, epoch) for state in states]


def is_untouched(program: Program, cut: Cut, start: Start, epoch_start: EpochStart) -> bool:
    """Return whether nothing of an epoch was delivered before ``start``."""
    _, order, first = epoch_start
    if start.opens or start.groups or start.seen or start.quota != first.quota:
        return False
    return start.left == first.left or _is_whole_share(program, order, cut.rank, cut.world, cut.kind, start.left)


def _is_whole_share(program: Program, order: Order, rank: int, world: int, kind: str, left: list[Piece]) -> bool:
    """Return whether pieces are all that a rank has of an epoch; a state keeps its pieces when the cut changes.

    No pieces are a share only by the present cut: a rank that has delivered all of its share has none either.
    """
    cuts = (Cut(rank, world, "range"), Cut(rank, world, "step"))
    return any(program.start(order, cut).left == left for cut in cuts if left or cut.kind == kind)


def _finished(program: Program, state: State, epoch: int) -> State:
    order = program.order(state.epoch)
    untouched = _is_whole_share(program, order, state.rank, state.world, state.cut, state.left)
    if state.epoch != epoch + 1 or not untouched or state.open or state.tail:
        raise StateError(
            f"the states do not belong together: rank {state.rank} is in epoch {state.epoch}, another rank is still in "
            f"epoch {epoch}"
        )
    ended = (state.counted or {}).get("ended")  # where its epoch ended in the ledger
    return replace(state, epoch=epoch, left=[], counted=None if ended is None else {"ledger": ended})


def _start_of(program: Program, cut: Cut, state: State, first: Start) -> Start:
    rows = _parse_tail(state)
    if state.open and program.window_level is None:
        raise StateError("the state has open windows, but no stage of this plan has windows that could be open")
    if beyond := [level for level, *_ in rows if not 0 < level < len(program.levels)]:
        raise StateError(f"the state's 'tail' names level {beyond[0]}, which this plan does not have")
    return start_at(cut, state, first.pad)


def start_at(cut: Cut, state: State, pad: Piece | None) -> Start:
    """Return the start of a run that continues at a state of the same rank.

    Args:
        cut: The rank, and how the order is cut.
        state: The state.
        pad: The piece that is repeated as padding, if ranks are padded.

    Raises:
        StateError: An entry of the state is damaged.
    """
    rows = _parse_tail(state)
    return Start(
        state.left,
        tuple(StartPart(window["of"], window["n"], window["done"], window["sub"]) for window in state.open),
        {level: (done, sub) for level, done, sub, _ in rows if done or sub},
        {level: seen for level, _, _, seen in rows if seen},
        _quota(cut, state),
        pad if cut.uneven == "pad" else None,
    )


def _quota(cut: Cut, state: State) -> int | None:
    if cut.uneven == "keep":
        return None
    quota = _get_count(state, "quota")
    return total(state.left) if quota is None else quota


def _recut(program: Program, cut: Cut, states: list[State], order: Order, first: Start) -> Start:
    share = recut(states, cut.rank, cut.world, cut.kind, order, recut_problem=program.recut_problem)
    start = _start_of(program, cut, replace(share, counted=None), first)
    if cut.uneven == "keep":
        return start
    left = sum(total(state.left) for state in states)
    quota = left // cut.world if cut.uneven == "drop" else -(-left // cut.world)
    return replace(start, quota=quota)


def _all_pieces(state: State) -> list[Piece]:
    return [*state.left, *(piece for window in state.open for piece in window["of"])]


def _get_count(state: State, name: str) -> int | None:
    """Return a number of the state's entry ``counted``.

    Raises:
        StateError: It is not a whole number of at least 0.
    """
    value = (state.counted or {}).get(name)
    if value is not None and not is_state_number(value):
        raise StateError(f"the state's 'counted' holds {name}={value!r:.40}, not a whole number of at least 0")
    return value


def _parse_tail(state: State) -> list[tuple[int, int, int, int]]:
    """Return the partly delivered groups of a state, by level.

    Raises:
        StateError: An entry is not four whole numbers from 0.
    """
    rows = state.tail or []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 4 and all(map(is_state_number, row))):
            raise StateError(f"the state's 'tail' holds {row!r:.60}, not [level, done, sub, seen]")
    return [(row[0], row[1], row[2], row[3]) for row in rows]
