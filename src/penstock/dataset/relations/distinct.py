"""``unique`` and ``distinct``: the distinct values of a field, and the first sample of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.relations.aggregates import as_list
from penstock.dataset.relations.groups import MAX_SPILL_DEPTH, SpillPartitions, chunks
from penstock.dataset.relations.key_values import columns_of, compacted, order_of
from penstock.dataset.relations.keys import UNKNOWN_KEY, Numbering
from penstock.dataset.relations.sort import SampleBuffer, sort
from penstock.errors import DataError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import Columns, pick_rows


def unique(runs: Iterable[Sequence[Any]], field: str, memory: int) -> list[Any]:
    """Return the distinct values of a field in the order of their first occurrence."""
    known = Numbering((field,), "unique")
    for items in chunks(runs, known, memory):
        known.of(items)
    return as_list(known.values()[0]) if len(known) else []


@dataclass(frozen=True, slots=True)
class Distinct:
    """The first sample of each value of some fields, or of all fields if none are named; the order is kept."""

    fields: tuple[str, ...] = ()

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        buffer = SampleBuffer(memory)
        deferred: list[SpillPartitions] = []
        for items in self._firsts(runs, memory, 0, deferred):
            buffer.add(items)
        if deferred:  # their positions are after those of all samples in the buffer
            for piece in sort(self._deferred(deferred[0], memory, 1), _by_position, memory):
                buffer.add(_without_position(piece))
        return buffer.pieces()

    def _deferred(self, partitions: SpillPartitions, memory: int, depth: int) -> Iterator[Sequence[Any]]:
        for partition in partitions.each():
            deferred: list[SpillPartitions] = []
            yield from self._firsts(partition, memory, depth, deferred)
            if deferred:
                yield from self._deferred(deferred[0], memory, depth + 1)

    def _firsts(
        self, runs: Iterable[Sequence[Any]], memory: int, depth: int, deferred: list[SpillPartitions]
    ) -> Iterator[Sequence[Any]]:
        """Yield the first sample of each value; once the values fill the memory, add unknown ones to ``deferred``."""
        known = Numbering(self.fields, "distinct")
        seen = 0
        for items in chunks(runs, known, memory):
            if not self.fields:
                known.fields = known.fields or _names(items)
                _check_names(items, known.fields)
            before = len(known)
            numbers = known.of(items, not deferred)
            if not deferred:
                yield compacted(pick_rows(items, _firsts(numbers, before, len(known))))
                if known.nbytes > memory // 3 and depth < MAX_SPILL_DEPTH:
                    deferred.append(SpillPartitions(memory))
            elif len(unknown := np.flatnonzero(numbers == UNKNOWN_KEY)):
                rest = pick_rows(items, unknown)
                positioned = rest if depth else _with_position(rest, seen + unknown)
                deferred[0].add(positioned, known.hashes(rest, depth))
            seen += len(items)

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return features

    def describe(self) -> str:
        return f"distinct({', '.join(map(repr, self.fields))})"


_POSITION = "__place__"  # the field with the position of a deferred sample


def _with_position(items: Sequence[Any], positions: I64) -> Sequence[Any]:
    if isinstance(items, ArrowColumns):
        import pyarrow as pa

        return columns_of(pa.Table.from_batches([items.batch()]).append_column(_POSITION, pa.array(positions)))
    return [{**item, _POSITION: position} for item, position in zip(items, positions.tolist(), strict=True)]


def _without_position(items: Sequence[Any]) -> Sequence[Any]:
    if isinstance(items, Columns):
        return items.renamed({name: name for name in items.names if name != _POSITION})
    return [{name: value for name, value in item.items() if name != _POSITION} for item in items]


def _by_position(items: Sequence[Any]) -> I64:
    return order_of(items, (_POSITION,), (False,), "distinct")


def _firsts(numbers: I64, low: int, high: int) -> I64:
    """Return the first position of each number from ``low`` to ``high``, all of which occur, in ascending order."""
    first = np.empty(high, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last assignment wins: the first position
    return np.sort(first[low:])


def _names(items: Sequence[Any]) -> tuple[str, ...]:
    """Return the fields of the first sample, without those like ``__key__``."""
    first = items.names if isinstance(items, Columns) else items[0]
    if not isinstance(first, dict | tuple) or not first:
        raise DataError(f"distinct needs samples with fields, not {type(first).__name__}")
    return tuple(name for name in first if not name.startswith("__"))


def _check_names(items: Sequence[Any], names: tuple[str, ...]) -> None:
    """Check that all samples have these fields.

    Raises:
        DataError: A sample has different fields.
    """
    for fields in [items.names] if isinstance(items, Columns) else items:
        if not {*names} <= {*fields} or any(name not in names and not name.startswith("__") for name in fields):
            raise DataError(
                f"distinct: samples differ in their fields ({', '.join(map(repr, names))}); name the fields to compare"
            )
