"""``groupby``: aggregates samples as they are read; groups beyond the memory limit are spilled to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.dataset.relations.aggregates import AGGREGATES, Aggregate, as_list
from penstock.dataset.relations.key_values import (
    arrow_column,
    columns_of,
    compacted,
    gathered,
    has_arrow,
    hashable,
    order_of,
    values_at,
)
from penstock.dataset.relations.keys import UNKNOWN_KEY, Numbering, dictionary_encoded
from penstock.dataset.relations.sort import SampleBuffer, piece_bytes, sort, write_pieces
from penstock.dataset.relations.source import select_fields, summarized
from penstock.dataset.relations.spill import SpillFile, size_of
from penstock.errors import PlanError
from penstock.order import I64
from penstock.plan import Plan, pick_rows

_Of = TypeVar("_Of")
MAX_SPILL_DEPTH = 8  # levels of spilling, each 16 times finer: 4 billion partitions
_PARTITIONS = 16  # of spilled samples, by hash; each may be partitioned again
_ROWS, _BYTES = 1 << 17, 1 << 25  # the minimum size of a chunk
_GROWTH = 4  # rows in a chunk per known group, at least: every call costs time for all groups


def chunks(runs: Iterable[Sequence[Any]], known: Numbering | None, memory: int) -> Iterator[Sequence[Any]]:
    """Yield runs joined into larger chunks, to amortise the cost of a call per chunk."""
    held: list[Sequence[Any]] = []
    rows = size = 0
    for run in runs:
        held.append(run)
        rows, size = rows + len(run), size + size_of(run)
        groups, key_bytes = (len(known), known.nbytes) if known is not None else (0, 0)
        if rows >= max(_ROWS, _GROWTH * groups) or size > min(max(_BYTES, _GROWTH * key_bytes), memory // 4):
            yield gathered(held)
            held, rows, size = [], 0, 0
    if held:
        yield gathered(held)


@dataclass(slots=True)
class SpillPartitions:
    """Spilled samples, partitioned by a hash of their values."""

    memory: int
    file: SpillFile = field(default_factory=SpillFile)
    numbers: list[list[int]] = field(default_factory=lambda: [[] for _ in range(_PARTITIONS)])
    held: list[list[Sequence[Any]]] = field(default_factory=lambda: [[] for _ in range(_PARTITIONS)])

    def add(self, items: Sequence[Any], hashes: I64) -> None:
        """Spill samples to the partitions of their hashes."""
        for part in range(_PARTITIONS):
            rows = np.flatnonzero(hashes % _PARTITIONS == part)
            if len(rows):
                held = self.held[part]
                held.append(compacted(pick_rows(items, rows)))
                if sum(map(size_of, held)) > piece_bytes(self.memory):
                    self._write(part)

    def _write(self, part: int) -> None:
        if self.held[part]:
            self.numbers[part] += write_pieces(self.file, gathered(self.held[part]), piece_bytes(self.memory))
            self.held[part] = []

    def each(self) -> Iterator[Iterator[Sequence[Any]]]:
        """Yield the samples of each partition in the order they were added."""
        for part in range(_PARTITIONS):
            self._write(part)
        for numbers in self.numbers:
            if numbers:
                yield (self.file[number] for number in numbers)


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A row for each value of some fields, sorted by them: a count, or aggregates of other fields."""

    fields: tuple[str, ...]
    how: str
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        results = ["count"] if self.how == "count" else [f"{name}_{self.how}" for name in self.of]
        if clash := [name for name in results if name in self.fields]:
            raise PlanError(
                f"{self.describe()} adds a field {clash[0]!r}, which it also groups by; rename that field first"
            )

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        if self.how == "list":
            return self._lists(runs, memory)
        return sort(self._rows(runs, memory, 0), self._order, memory)

    def _order(self, items: Sequence[Any]) -> I64:
        return order_of(items, self.fields, (False,) * len(self.fields), "groupby")

    def _rows(self, runs: Iterable[Sequence[Any]], memory: int, depth: int) -> Iterator[Sequence[Any]]:
        """Yield the rows, unsorted."""
        known = Numbering(self.fields, "groupby")
        aggregates = [AGGREGATES[self.how](name) for name in self.of]
        counts = np.zeros(0, np.int64)
        spilled: SpillPartitions | None = None
        for items in chunks(runs, known, memory):
            numbers = known.of(items, spilled is None)
            if spilled is not None:
                items, numbers = _spill_unknown(spilled, items, numbers, known, depth)
            counts = _grown(counts, len(known)) + np.bincount(numbers, minlength=len(known))
            for aggregate in aggregates:
                aggregate.add(numbers, len(known), _values(items, aggregate.field, self.how))
            nbytes = known.nbytes + sum(aggregate.nbytes for aggregate in aggregates)
            if spilled is None and nbytes > memory // 4 and depth < MAX_SPILL_DEPTH:
                spilled = SpillPartitions(memory)
        if len(known):
            yield self._table(known.values(), counts, aggregates)
        for partition in spilled.each() if spilled is not None else ():
            yield from self._rows(partition, memory, depth + 1)

    def _table(self, keys: list[Any], counts: I64, aggregates: Sequence[Aggregate]) -> Sequence[Any]:
        named: dict[str, Any] = dict(zip(self.fields, keys, strict=True))
        if self.how == "count":
            named["count"] = counts if not has_arrow() else _int_array(counts)
        for aggregate in aggregates:
            named[f"{aggregate.field}_{self.how}"] = aggregate.result()
        return as_rows(named)

    def _lists(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        """Return rows with the values of each group in a list; a single group must fit into memory."""
        buffer = SampleBuffer(memory)
        open_group: Sequence[Any] = []
        for piece in sort(runs, self._order, memory):
            items = gathered([open_group, piece]) if len(open_group) else piece
            begin = self._begins(items)
            last = int(begin[-1])  # the last group may continue in the next piece
            buffer.add(self._list_rows(items[:last], begin[:-1]))
            open_group = compacted(items[last:])
        if len(open_group):
            buffer.add(self._list_rows(open_group, np.zeros(1, np.int64)))
        return buffer.pieces()

    def _begins(self, items: Sequence[Any]) -> I64:
        """Return the positions at which groups begin among sorted samples."""
        new = np.ones(len(items), bool)
        columns = [arrow_column(items, name, "groupby") for name in self.fields]
        if all(array is not None for array in columns):
            codes = [dictionary_encoded(array)[0] for array in columns]
            new[1:] = np.logical_or.reduce([code[1:] != code[:-1] for code in codes])
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
        return {name: feature for name, feature in features.items() if name in self.fields}

    def describe(self) -> str:
        return f"groupby({', '.join(map(repr, self.fields))}).{self.how}({', '.join(map(repr, self.of))})"


def _spill_unknown(
    partitions: SpillPartitions, items: Sequence[Any], numbers: I64, known: Numbering, depth: int
) -> tuple[Sequence[Any], I64]:
    """Spill the samples of unknown groups, and return the others with their group numbers."""
    unknown = np.flatnonzero(numbers == UNKNOWN_KEY)
    if len(unknown):
        spilled = pick_rows(items, unknown)
        partitions.add(spilled, known.hashes(spilled, depth))
        rest = np.flatnonzero(numbers != UNKNOWN_KEY)
        return pick_rows(items, rest), numbers[rest]
    return items, numbers


def _values(items: Sequence[Any], name: str, verb: str) -> Any:
    found = arrow_column(items, name, verb)
    return values_at(items, name, verb) if found is None else found


def _grown(counts: I64, groups: int) -> I64:
    return np.concatenate([counts, np.zeros(groups - len(counts), np.int64)])


def _int_array(values: I64) -> Any:
    import pyarrow as pa

    return pa.array(values)


def as_rows(named: dict[str, Any]) -> Sequence[Any]:
    """Return named columns as samples: as columns if all are Arrow arrays, else as dicts."""
    if any(isinstance(array, list | np.ndarray) for array in named.values()):
        lists = [array.tolist() if isinstance(array, np.ndarray) else as_list(array) for array in named.values()]
        return [dict(zip(named, row, strict=True)) for row in zip(*lists, strict=True)]
    import pyarrow as pa

    return columns_of(pa.table(named))


@dataclass(frozen=True, slots=True)
class Groups(Generic[_Of]):
    """Samples grouped by fields; each method returns a dataset of one row per group, sorted by these fields."""

    plan: Plan
    make_dataset: Callable[[Plan], _Of]
    fields: tuple[str, ...]

    def count(self) -> _Of:
        """Return rows of ``{field: value, "count": n}``."""
        return self._rows("count")

    def sum(self, *fields: str) -> _Of:
        """Return rows of ``{field: value, "x_sum": ...}``, with a sum for each of ``fields``."""
        return self._rows("sum", fields)

    def mean(self, *fields: str) -> _Of:
        """Return rows of ``{field: value, "x_mean": ...}``."""
        return self._rows("mean", fields)

    def min(self, *fields: str) -> _Of:
        """Return rows of ``{field: value, "x_min": ...}``; NaN only if a group has no other value."""
        return self._rows("min", fields)

    def max(self, *fields: str) -> _Of:
        """Return rows of ``{field: value, "x_max": ...}``; NaN only if a group has no other value."""
        return self._rows("max", fields)

    def std(self, *fields: str) -> _Of:
        """Return rows of ``{field: value, "x_std": ...}``: the sample standard deviation (n - 1), NaN of one value."""
        return self._rows("std", fields)

    def list(self, *fields: str) -> _Of:
        """Return rows of ``{field: value, "x_list": [...]}``, with the values in the order of the samples."""
        return self._rows("list", fields)

    def _rows(self, how: str, fields: tuple[str, ...] = ()) -> _Of:
        if how != "count" and not fields:
            raise PlanError(f"{how}() needs field names, as in groupby({self.fields[0]!r}).{how}('x')")
        read = select_fields(self.plan, *self.fields, *fields)
        return self.make_dataset(summarized(read, Aggregated(self.fields, how, fields)))
