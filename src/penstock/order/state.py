"""State: the progress of one rank through an epoch, as small JSON.

    {"v": 1, "plan": "f00d", "seed": 0, "epoch": 3, "cut": "step", "rank": 5, "world": 8,
     "open": [], "left": [[805, 50000, 8, 0]]}

``left`` lists the pieces [start, stop, step, sub] still to be delivered, ``open`` the partly delivered windows
{of, n, done, sub} of a late shuffle. ``tail`` and ``counted`` belong to the caller and are omitted when empty. No
number has more than 63 bits. The state of an order without counts has ``"lazy": true``; the start and stop of its
pieces are pairs [group, offset], and the step is 1, or [n, 0] for every n-th group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypedDict

from penstock.errors import StateError
from penstock.order.orders import Order
from penstock.order.pieces import CUTS, GROUP_STRIDE, Piece

VERSION = 1
_MAX_NUMBER = (1 << 63) - 1  # positions are computed in 64 bits
_MAX_LISTED = 20  # ranks in a message: a damaged state may claim any number of ranks


class OpenWindow(TypedDict):
    """A window of a late shuffle that is partly delivered.

    The window holds ``n`` outputs, computed from the pieces ``of``. ``done`` of its outputs are delivered, and ``sub``
    of the outputs that later stages make of the next one.
    """

    of: list[Piece]
    n: int
    done: int
    sub: int


@dataclass(frozen=True, slots=True)
class State:
    """The progress of one rank in one epoch of one plan."""

    plan: str
    seed: int
    epoch: int
    cut: str
    rank: int
    world: int
    open: list[OpenWindow]
    left: list[Piece]
    tail: list[Any] | None = None
    counted: dict[str, Any] | None = None
    lazy: bool = False
    v: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts and numbers that ``json`` can write."""
        convert = _to_pairs if self.lazy else list[Any]
        out: dict[str, Any] = {
            "v": self.v,
            "plan": self.plan,
            "seed": self.seed,
            "epoch": self.epoch,
            "cut": self.cut,
            "rank": self.rank,
            "world": self.world,
            "open": [{**window, "of": [convert(piece) for piece in window["of"]]} for window in self.open],
            "left": [convert(piece) for piece in self.left],
        }
        extras = {"tail": self.tail, "counted": self.counted, "lazy": self.lazy}
        return out | {name: value for name, value in extras.items() if value}

    @classmethod
    def from_json(cls, obj: Any) -> State:
        """Parse the result of ``to_json``; unknown keys are ignored.

        Raises:
            StateError: An entry is missing, of the wrong type, or impossible.
        """
        if not isinstance(obj, Mapping):
            raise StateError(f"a state must be a JSON object, not {_shown(obj)}")
        if (version := _get(obj, "v", int)) != VERSION:
            raise StateError(f"the state has version {version}; this release of penstock reads version {VERSION} only")
        lazy = _get(obj, "lazy", bool, False)
        state = cls(
            plan=_get(obj, "plan", str),
            seed=_get(obj, "seed", int),
            epoch=_get_natural(obj, "epoch"),
            cut=_get(obj, "cut", str),
            rank=_get_natural(obj, "rank"),
            world=_get_natural(obj, "world"),
            open=[_parse_window(window, lazy) for window in _get(obj, "open", list)],
            left=_parse_pieces(_get(obj, "left", list), "left", lazy),
            tail=_get(obj, "tail", list, None),
            counted=_get(obj, "counted", dict, None),
            lazy=lazy,
        )
        if state.cut not in CUTS:
            raise StateError(f'the state\'s cut {state.cut!r} is not supported: expected "range" or "step"')
        if state.rank >= state.world:
            raise StateError(
                f"the state belongs to rank {state.rank} in a world of {state.world}: there is no such rank"
            )
        return state


def recut(
    states: Sequence[State], rank: int, world: int, kind: str, order: Order, *, recut_problem: str | None = None
) -> State:
    """Return one rank's share of the positions that the ranks of another world have not delivered.

    Args:
        states: The states of all old ranks, in any order.
        rank: The new rank.
        world: The new number of ranks.
        kind: The new cut, "range" or "step".
        order: The order of the states' epoch.
        recut_problem: Why this plan cannot be cut again; None if it can.

    Raises:
        StateError: The plan cannot be cut again, there is not exactly one state per rank, or the states are from
            different epochs.
        PlanError: This order cannot be cut that way.
    """
    if recut_problem is not None:
        raise StateError(recut_problem)
    ordered = _sorted_by_rank(states)
    if unfinished := [state.rank for state in ordered if state.tail]:
        raise StateError(
            f"rank {unfinished[0]} stopped in the middle of a group of samples: "
            "its state can be restored only by the same rank in the same world"
        )
    if any(not order.holds(piece) for state in ordered for piece in _all_pieces(state)):
        raise StateError(
            "the state refers to positions that this dataset does not have: it was saved with another dataset or plan"
        )
    first = ordered[0]
    windows = [window for state in ordered for window in state.open]
    merged = order.merge([piece for state in ordered for piece in state.left], first.world)
    left = order.cut(merged, rank, world, kind)
    return replace(first, cut=kind, rank=rank, world=world, open=windows[rank::world], left=left, counted=None)


def _sorted_by_rank(states: Sequence[State]) -> list[State]:
    """Return the states sorted by rank, after checking that there is one of each rank and that they belong together."""
    if not states:
        raise StateError("there is no state to restore: pass the states of all ranks")
    first = states[0]
    for name in ("plan", "seed", "epoch", "world", "lazy"):
        other = next((s for s in states if getattr(s, name) != getattr(first, name)), None)
        if other is not None:
            raise StateError(
                f"the states do not belong together: {name} is {getattr(first, name)!r} for rank "
                f"{first.rank} and {getattr(other, name)!r} for rank {other.rank}"
            )
    ranks = [state.rank for state in states]
    if missing := first.world - len(set(ranks)):
        first_missing = islice((rank for rank in range(first.world) if rank not in ranks), _MAX_LISTED)
        listed = _rank_list(first_missing, missing)
        raise StateError(
            f"restoring under another world needs the states of all {first.world} ranks; missing: {listed}"
        )
    if repeated := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        listed = _rank_list(repeated[:_MAX_LISTED], len(repeated))
        raise StateError(f"there is more than one state for these ranks: {listed}")
    return sorted(states, key=lambda state: state.rank)


def _rank_list(ranks: Iterable[int], count: int) -> str:
    shown = ", ".join(map(str, ranks))
    return shown if count <= _MAX_LISTED else f"{shown} and {count - _MAX_LISTED} more"


def _all_pieces(state: State) -> Iterable[Piece]:
    yield from state.left
    for window in state.open:
        yield from window["of"]


def _to_pairs(piece: Piece) -> list[Any]:
    start, stop, step, sub = piece
    return [
        list(divmod(start, GROUP_STRIDE)),
        list(divmod(stop, GROUP_STRIDE)),
        1 if step < GROUP_STRIDE else [step // GROUP_STRIDE, 0],
        sub,
    ]


_REQUIRED: Any = object()


def _get(obj: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """Return one entry of the given type; an entry with a default may be missing or null."""
    value = obj.get(name, _REQUIRED)
    if value is _REQUIRED or (value is None and default is not _REQUIRED):
        if default is _REQUIRED:
            raise StateError(f"the state has no {name!r}: it is incomplete, or not a state")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StateError(f"the state's {name!r} is {_shown(value)}, not {_TYPE_NAMES[kind]}")
    return value


_TYPE_NAMES: dict[type, str] = {
    int: "an integer",
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r:.40} ({type(value).__name__})"


def is_state_number(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0 that fits into 63 bits."""
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _get_natural(obj: Mapping[str, Any], name: str) -> int:
    value: int = _get(obj, name, int)
    if not is_state_number(value):
        raise StateError(f"the state's {name!r} is {value}: it must not be negative, nor have more than 63 bits")
    return value


def _parse_window(obj: Any, lazy: bool) -> OpenWindow:
    if not isinstance(obj, Mapping):
        raise StateError(f"an open window of the state is {_shown(obj)}, not an object")
    window = OpenWindow(
        of=_parse_pieces(_get(obj, "of", list), "of", lazy),
        n=_get_natural(obj, "n"),
        done=_get_natural(obj, "done"),
        sub=_get_natural(obj, "sub"),
    )
    if window["done"] > window["n"]:
        raise StateError(
            f"an open window of the state claims to have delivered {window['done']} of {window['n']} outputs"
        )
    return window


def _parse_pieces(values: list[Any], entry: str, lazy: bool) -> list[Piece]:
    convert: Callable[[list[Any]], list[Any]] = _from_pairs if lazy else list
    return [
        _parse_piece(convert(value) if isinstance(value, list) and len(value) == 4 else value, entry)
        for value in values
    ]


def _parse_piece(value: Any, entry: str) -> Piece:
    well_formed = isinstance(value, list) and len(value) == 4 and all(type(number) is int for number in value)
    if not well_formed:
        raise StateError(f"the state's {entry!r} contains {value!r:.60}, which is not a piece [start, stop, step, sub]")
    start, stop, step, sub = value
    if start < 0 or stop < start or step < 1 or sub < 0 or max(value) > _MAX_NUMBER:
        raise StateError(
            f"the state's {entry!r} contains the piece {value}, which is impossible: "
            "it must have 0 <= start <= stop, step >= 1 and sub >= 0, in 63 bits"
        )
    return [start, stop, step, sub]


def _from_pairs(value: list[Any]) -> list[Any]:
    """Convert pairs to positions; anything else is returned unchanged, to be refused as a piece."""
    start, stop, step, sub = value
    return [_position(start), _position(stop), step if step == 1 else _position(step), sub]


def _position(pair: Any) -> Any:
    valid = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
    return (
        pair[0] * GROUP_STRIDE + pair[1]
        if valid and pair[1] < GROUP_STRIDE
        else pair
        if isinstance(pair, list)
        else [pair]
    )
