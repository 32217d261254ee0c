"""Groups of samples: numbered by their values, summed up as they come; those that do not fit are put off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.dataset.relations.aggregates import STATES, State, values_list
from penstock.dataset.relations.key_values import (
    apart,
    column,
    columns_of,
    gathered,
    has_arrow,
    hashable,
    order_of,
    values_at,
)
from penstock.dataset.relations.keys import UNKNOWN, Numbering, encoded
from penstock.dataset.relations.sort import Kept, piece_bytes, sort, spill
from penstock.dataset.relations.source import fields_of, whole
from penstock.dataset.relations.spill import SpillFile, size_of
from penstock.errors import PlanError
from penstock.order import I64
from penstock.plan import Plan, pick_rows

_Of = TypeVar("_Of")
DEPTH = 8  # how often what does not fit is put off: whoever has that many values has a larger disk than there is
_PARTS = 16  # by which groups that do not fit are put off: each may be put off again
_ROWS, _BYTES = 1 << 17, 1 << 25  # what is gathered before it is summed up
_MORE = 4  # so many times the groups there are: each time costs them all


def lots(runs: Iterable[Sequence[Any]], known: Numbering | None, memory: int) -> Iterator[Sequence[Any]]:
    """Runs put together until they are worth the work."""
    held: list[Sequence[Any]] = []
    rows = size = 0
    for run in runs:
        held.append(run)
        rows, size = rows + len(run), size + size_of(run)
        groups, taken = (len(known), known.nbytes) if known is not None else (0, 0)
        if rows >= max(_ROWS, _MORE * groups) or size > min(max(_BYTES, _MORE * taken), memory // 4):
            yield gathered(held)
            held, rows, size = [], 0, 0
    if held:
        yield gathered(held)


@dataclass(slots=True)
class Parts:
    """Samples of groups that are put off, by a hash of their values."""

    memory: int
    spool: SpillFile = field(default_factory=SpillFile)
    numbers: list[list[int]] = field(default_factory=lambda: [[] for _ in range(_PARTS)])
    held: list[list[Sequence[Any]]] = field(default_factory=lambda: [[] for _ in range(_PARTS)])

    def add(self, items: Sequence[Any], hashes: I64) -> None:
        """Put samples off."""
        for part in range(_PARTS):
            own = np.flatnonzero(hashes % _PARTS == part)
            if len(own):
                held = self.held[part]
                held.append(apart(pick_rows(items, own)))
                if sum(map(size_of, held)) > piece_bytes(self.memory):
                    self._write(part)

    def _write(self, part: int) -> None:
        if self.held[part]:
            self.numbers[part] += spill(self.spool, gathered(self.held[part]), piece_bytes(self.memory))
            self.held[part] = []

    def each(self) -> Iterator[Iterator[Sequence[Any]]]:
        """The samples of each part, as they came."""
        for part in range(_PARTS):
            self._write(part)
        for numbers in self.numbers:
            if numbers:
                yield (self.spool[number] for number in numbers)


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A row for each value of fields, in their order: how many samples have it, or what other fields amount to."""

    fields: tuple[str, ...]
    how: str
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        made = ["count"] if self.how == "count" else [f"{name}_{self.how}" for name in self.of]
        if twice := [name for name in made if name in self.fields]:
            raise PlanError(
                f"{self.describe()} makes a field {twice[0]!r}, which is one it groups by: rename that first"
            )

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        if self.how == "list":
            return self._lists(runs, memory)
        return sort(self._rows(runs, memory, 0), self._order, memory)

    def _order(self, items: Sequence[Any]) -> I64:
        return order_of(items, self.fields, (False,) * len(self.fields), "groupby")

    def _rows(self, runs: Iterable[Sequence[Any]], memory: int, depth: int) -> Iterator[Sequence[Any]]:
        """The rows, in no order."""
        known = Numbering(self.fields, "groupby")
        states = [STATES[self.how](name) for name in self.of]
        counts = np.zeros(0, np.int64)
        parts: Parts | None = None
        for items in lots(runs, known, memory):
            numbers = known.of(items, parts is None)
            if parts is not None:
                items, numbers = _put_off(parts, items, numbers, known, depth)
            counts = _grown(counts, len(known)) + np.bincount(numbers, minlength=len(known))
            for state in states:
                state.add(numbers, len(known), _values(items, state.field, self.how))
            if parts is None and known.nbytes + sum(state.nbytes for state in states) > memory // 4 and depth < DEPTH:
                parts = Parts(memory)
        if len(known):
            yield self._table(known.values(), counts, states)
        for part in parts.each() if parts is not None else ():
            yield from self._rows(part, memory, depth + 1)

    def _table(self, keys: list[Any], counts: I64, states: Sequence[State]) -> Sequence[Any]:
        named: dict[str, Any] = dict(zip(self.fields, keys, strict=True))
        if self.how == "count":
            named["count"] = counts if not has_arrow() else _int_array(counts)
        for state in states:
            named[f"{state.field}_{self.how}"] = state.result()
        return as_rows(named)

    def _lists(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        """All samples in the order of their groups; a group alone must fit into memory."""
        kept = Kept(memory)
        open_group: Sequence[Any] = []
        for piece in sort(runs, self._order, memory):
            items = gathered([open_group, piece]) if len(open_group) else piece
            begin = self._begins(items)
            last = int(begin[-1])  # more of this group may come
            kept.add(self._list_rows(items[:last], begin[:-1]))
            open_group = apart(items[last:])
        if len(open_group):
            kept.add(self._list_rows(open_group, np.zeros(1, np.int64)))
        return kept.pieces()

    def _begins(self, items: Sequence[Any]) -> I64:
        """Where groups begin among samples in order."""
        new = np.ones(len(items), bool)
        columns = [column(items, name, "groupby") for name in self.fields]
        if all(array is not None for array in columns):
            codes = [encoded(array)[0] for array in columns]
            new[1:] = np.logical_or.reduce([own[1:] != own[:-1] for own in codes])
        else:
            keys = zip(*(map(hashable, values_at(items, name, "groupby")) for name in self.fields), strict=True)
            new[1:] = [key != before for before, key in pairwise(keys)]
        return np.flatnonzero(new)

    def _list_rows(self, items: Sequence[Any], begin: I64) -> list[dict[str, Any]]:
        firsts = pick_rows(items, begin)
        named = {name: values_at(firsts, name, "groupby") for name in self.fields}
        edges = [*begin.tolist(), len(items)]
        for name in self.of:
            values = values_at(items, name, self.how)
            named[f"{name}_list"] = [values[low:high] for low, high in pairwise(edges)]
        return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return {name: what for name, what in features.items() if name in self.fields}

    def describe(self) -> str:
        return f"groupby({', '.join(map(repr, self.fields))}).{self.how}({', '.join(map(repr, self.of))})"


def _put_off(
    parts: Parts, items: Sequence[Any], numbers: I64, known: Numbering, depth: int
) -> tuple[Sequence[Any], I64]:
    """Put off the samples of groups that are not known; the others."""
    later = np.flatnonzero(numbers == UNKNOWN)
    if len(later):
        off = pick_rows(items, later)
        parts.add(off, known.hashes(off, depth))
        now = np.flatnonzero(numbers != UNKNOWN)
        return pick_rows(items, now), numbers[now]
    return items, numbers


def _values(items: Sequence[Any], name: str, verb: str) -> Any:
    found = column(items, name, verb)
    return values_at(items, name, verb) if found is None else found


def _grown(counts: I64, groups: int) -> I64:
    return np.concatenate([counts, np.zeros(groups - len(counts), np.int64)])


def _int_array(values: I64) -> Any:
    import pyarrow as pa

    return pa.array(values)


def as_rows(named: dict[str, Any]) -> Sequence[Any]:
    """Rows of columns: columns still, where all of them are Arrow's."""
    if any(isinstance(one, list | np.ndarray) for one in named.values()):
        values = [one.tolist() if isinstance(one, np.ndarray) else values_list(one) for one in named.values()]
        return [dict(zip(named, row, strict=True)) for row in zip(*values, strict=True)]
    import pyarrow as pa

    return columns_of(pa.table(named))


@dataclass(frozen=True, slots=True)
class Groups(Generic[_Of]):
    """Samples by the values of fields; each method gives a dataset of one row for each value, in its order."""

    plan: Plan
    made: Callable[[Plan], _Of]  # a dataset of a plan
    fields: tuple[str, ...]

    def count(self) -> _Of:
        """``{field: value, "count": n}``."""
        return self._rows("count")

    def sum(self, *fields: str) -> _Of:
        """``{field: value, "x_sum": ...}`` for each of ``fields``."""
        return self._rows("sum", fields)

    def mean(self, *fields: str) -> _Of:
        """``{field: value, "x_mean": ...}``."""
        return self._rows("mean", fields)

    def min(self, *fields: str) -> _Of:
        """``{field: value, "x_min": ...}``; NaN only where there is no other value."""
        return self._rows("min", fields)

    def max(self, *fields: str) -> _Of:
        """``{field: value, "x_max": ...}``; NaN only where there is no other value."""
        return self._rows("max", fields)

    def std(self, *fields: str) -> _Of:
        """``{field: value, "x_std": ...}``: of a sample (n - 1); NaN of a single value."""
        return self._rows("std", fields)

    def list(self, *fields: str) -> _Of:
        """``{field: value, "x_list": [...]}``, in the order of the samples."""
        return self._rows("list", fields)

    def _rows(self, how: str, fields: tuple[str, ...] = ()) -> _Of:
        if how != "count" and not fields:
            raise PlanError(f"{how}() needs the names of fields, as in groupby({self.fields[0]!r}).{how}('x')")
        read = fields_of(self.plan, *self.fields, *fields)
        return self.made(whole(read, Aggregated(self.fields, how, fields)))
