"""State: where a reader stands, as small JSON.

    {"v": 1, "plan": "f00d", "seed": 0, "epoch": 3, "cut": "step", "rank": 5, "world": 8,
     "open": [], "left": [[805, 50000, 8, 0]]}

``left`` holds pieces [start, stop, step, sub], ``open`` half-delivered windows {of, n, done, sub} of a late
shuffle. ``tail`` and ``counted`` belong to the caller and are left out when empty. For an order without
counts ``"lazy": true`` stands beside them, and in every piece start and stop are pairs [window, offset] and
the step is 1, or [n, 0] for every n-th window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypedDict

from penstock.errors import StateError
from penstock.order.orders import Order
from penstock.order.pieces import CUTS, Piece, V

VERSION = 1
_NAMED = 20  # missing ranks that a message names: a damaged state may speak of any number


class OpenWindow(TypedDict):
    """A late window that was half delivered: ``n`` outputs of the pieces ``of``, ``done`` of them delivered.

    ``sub`` outputs of the next one are delivered too.
    """

    of: list[Piece]
    n: int
    done: int
    sub: int


@dataclass(frozen=True, slots=True)
class State:
    """Where one rank stands in one epoch of one plan."""

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
        """Give plain lists, dicts and numbers that ``json`` can write."""
        write = _write_pairs if self.lazy else list[Any]
        out: dict[str, Any] = {
            "v": self.v,
            "plan": self.plan,
            "seed": self.seed,
            "epoch": self.epoch,
            "cut": self.cut,
            "rank": self.rank,
            "world": self.world,
            "open": [{**window, "of": [write(piece) for piece in window["of"]]} for window in self.open],
            "left": [write(piece) for piece in self.left],
        }
        extras = {"tail": self.tail, "counted": self.counted, "lazy": self.lazy}
        return out | {name: value for name, value in extras.items() if value}

    @classmethod
    def from_json(cls, obj: Any) -> State:
        """Read what ``to_json`` gave; keys it does not know are ignored.

        Raises:
            StateError: something is missing, of a wrong type, or impossible.
        """
        if not isinstance(obj, Mapping):
            raise StateError(f"a state is a JSON object, not {_kind(obj)}")
        if (version := _get(obj, "v", int)) != VERSION:
            raise StateError(f"this state has version {version}; only version {VERSION} can be read")
        lazy = _get(obj, "lazy", bool, False)
        state = cls(
            plan=_get(obj, "plan", str),
            seed=_get(obj, "seed", int),
            epoch=_natural(obj, "epoch"),
            cut=_get(obj, "cut", str),
            rank=_natural(obj, "rank"),
            world=_natural(obj, "world"),
            open=[_window(window, lazy) for window in _get(obj, "open", list)],
            left=_pieces(_get(obj, "left", list), "left", lazy),
            tail=_get(obj, "tail", list, None),
            counted=_get(obj, "counted", dict, None),
            lazy=lazy,
        )
        if state.cut not in CUTS:
            raise StateError(f'the state\'s cut {state.cut!r} is not known: it is "range" or "step"')
        if state.rank >= state.world:
            raise StateError(f"the state is of rank {state.rank} in a world of {state.world}: there is no such rank")
        return state


def recut(
    states: Sequence[State], rank: int, world: int, how: str, order: Order, *, why_not: str | None = None
) -> State:
    """Share what the ranks of one world have left among the ranks of another.

    Args:
        states: The states of all ranks, in any order.
        rank: The rank to give a share to.
        world: The number of ranks from now on.
        how: The cut from now on, "range" or "step".
        order: The order of the states' epoch.
        why_not: Why a plan like this cannot be cut again, if it cannot.

    Raises:
        StateError: the plan cannot be cut again, or the states are not those of all ranks at one time.
        PlanError: the cut cannot be made of this order.
    """
    if why_not is not None:
        raise StateError(why_not)
    ordered = _complete(states)
    if held := [state.rank for state in ordered if state.tail]:
        raise StateError(
            f"rank {held[0]} holds samples of a group that is not finished: "
            "such a state can be taken up only by its own rank in the same world"
        )
    if any(not order.holds(piece) for state in ordered for piece in _all_pieces(state)):
        raise StateError("the state speaks of positions that this dataset does not have")
    first = ordered[0]
    windows = [window for state in ordered for window in state.open]
    merged = order.merge([piece for state in ordered for piece in state.left], first.world)
    left = order.cut(merged, rank, world, how)
    return replace(first, cut=how, rank=rank, world=world, open=windows[rank::world], left=left, counted=None)


def _complete(states: Sequence[State]) -> list[State]:
    """Sort the states by rank, after checking that they are one of each and belong together."""
    if not states:
        raise StateError("there is no state to restore: give those of all ranks")
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
        named = islice((rank for rank in range(first.world) if rank not in ranks), _NAMED)
        listed = _listed(named, missing)
        raise StateError(f"another world needs the states of all {first.world} ranks; missing: {listed}")
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise StateError(f"there is more than one state of these ranks: {_listed(twice[:_NAMED], len(twice))}")
    return sorted(states, key=lambda state: state.rank)


def _listed(first: Iterable[int], many: int) -> str:
    shown = ", ".join(map(str, first))
    return shown if many <= _NAMED else f"{shown} and {many - _NAMED} more"


def _all_pieces(state: State) -> Iterable[Piece]:
    yield from state.left
    for window in state.open:
        yield from window["of"]


def _write_pairs(piece: Piece) -> list[Any]:
    start, stop, step, sub = piece
    return [list(divmod(start, V)), list(divmod(stop, V)), 1 if step < V else [step // V, 0], sub]


_NEEDED: Any = object()


def _get(obj: Mapping[str, Any], name: str, kind: type, default: Any = _NEEDED) -> Any:
    """Take one entry of the given type; one with a default may be missing or null."""
    value = obj.get(name, _NEEDED)
    if value is _NEEDED or (value is None and default is not _NEEDED):
        if default is _NEEDED:
            raise StateError(f"the state has no {name!r}: it is not whole, or not a state")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StateError(f"the state's {name!r} is {_kind(value)}, not {_WORDS[kind]}")
    return value


_WORDS: dict[type, str] = {
    int: "an integer",
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}


def _kind(value: Any) -> str:
    return "null" if value is None else f"{value!r:.40} ({type(value).__name__})"


def _natural(obj: Mapping[str, Any], name: str) -> int:
    value: int = _get(obj, name, int)
    if value < 0:
        raise StateError(f"the state's {name!r} is {value}: it cannot be negative")
    return value


def _window(obj: Any, lazy: bool) -> OpenWindow:
    if not isinstance(obj, Mapping):
        raise StateError(f"an open window of the state is {_kind(obj)}, not an object")
    window = OpenWindow(
        of=_pieces(_get(obj, "of", list), "of", lazy),
        n=_natural(obj, "n"),
        done=_natural(obj, "done"),
        sub=_natural(obj, "sub"),
    )
    if window["done"] > window["n"]:
        raise StateError(f"an open window of the state has delivered {window['done']} of {window['n']} outputs")
    return window


def _pieces(values: list[Any], where: str, lazy: bool) -> list[Piece]:
    read: Callable[[list[Any]], list[Any]] = _read_pairs if lazy else list
    return [_piece(read(value) if isinstance(value, list) and len(value) == 4 else value, where) for value in values]


def _piece(value: Any, where: str) -> Piece:
    whole = isinstance(value, list) and len(value) == 4 and all(type(number) is int for number in value)
    if not whole:
        raise StateError(f"the state's {where!r} holds {value!r:.60}, not a piece [start, stop, step, sub]")
    start, stop, step, sub = value
    if start < 0 or stop < start or step < 1 or sub < 0:
        raise StateError(f"the state's {where!r} holds the piece {value}, which is impossible")
    return [start, stop, step, sub]


def _read_pairs(value: list[Any]) -> list[Any]:
    """Turn pairs back to positions; anything else stays as it is, and is refused as a piece."""
    start, stop, step, sub = value
    return [_unpair(start), _unpair(stop), step if step == 1 else _unpair(step), sub]


def _unpair(pair: Any) -> Any:
    natural = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
    return pair[0] * V + pair[1] if natural and pair[1] < V else pair if isinstance(pair, list) else [pair]
