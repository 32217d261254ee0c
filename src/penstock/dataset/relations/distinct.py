"""Each value once: values, and the samples that have them first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.relations.aggregates import values_list
from penstock.dataset.relations.groups import DEPTH, Parts, lots
from penstock.dataset.relations.key_values import apart, columns_of, order_of
from penstock.dataset.relations.keys import UNKNOWN, Numbering
from penstock.dataset.relations.sort import Kept, sort
from penstock.errors import DataError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import Columns, pick_rows


def unique(runs: Iterable[Sequence[Any]], field: str, memory: int) -> list[Any]:
    """The values of a field, each once, as they come."""
    known = Numbering((field,), "unique")
    for items in lots(runs, known, memory):
        known.of(items)
    return values_list(known.values()[0]) if len(known) else []


@dataclass(frozen=True, slots=True)
class Distinct:
    """The first sample of each value of some fields (of all that it has, if none are named), as they come."""

    fields: tuple[str, ...] = ()

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        kept = Kept(memory)
        later: list[Parts] = []
        for items in self._firsts(runs, memory, 0, later):
            kept.add(items)
        if later:  # all of these came behind those that were kept at once
            for piece in sort(self._put_off(later[0], memory, 1), _by_place, memory):
                kept.add(_without_place(piece))
        return kept.pieces()

    def _put_off(self, parts: Parts, memory: int, depth: int) -> Iterator[Sequence[Any]]:
        for part in parts.each():
            later: list[Parts] = []
            yield from self._firsts(part, memory, depth, later)
            if later:
                yield from self._put_off(later[0], memory, depth + 1)

    def _firsts(
        self, runs: Iterable[Sequence[Any]], memory: int, depth: int, later: list[Parts]
    ) -> Iterator[Sequence[Any]]:
        """The samples that are the first of their value, as long as values fit; the others are put off in ``later``."""
        known = Numbering(self.fields, "distinct")
        seen = 0
        for items in lots(runs, known, memory):
            if not self.fields:
                known.fields = known.fields or _names(items)
                _check_names(items, known.fields)
            before = len(known)
            numbers = known.of(items, not later)
            if not later:
                yield apart(pick_rows(items, _firsts(numbers, before, len(known))))
                if known.nbytes > memory // 3 and depth < DEPTH:
                    later.append(Parts(memory))
            elif len(unknown := np.flatnonzero(numbers == UNKNOWN)):
                rest = pick_rows(items, unknown)
                placed = rest if depth else _with_place(rest, seen + unknown)
                later[0].add(placed, known.hashes(rest, depth))
            seen += len(items)

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return features

    def describe(self) -> str:
        return f"distinct({', '.join(map(repr, self.fields))})"


_PLACE = "__place__"  # of a sample, while it is put off


def _with_place(items: Sequence[Any], places: I64) -> Sequence[Any]:
    if isinstance(items, ArrowColumns):
        import pyarrow as pa

        return columns_of(pa.Table.from_batches([items.batch()]).append_column(_PLACE, pa.array(places)))
    return [{**item, _PLACE: place} for item, place in zip(items, places.tolist(), strict=True)]


def _without_place(items: Sequence[Any]) -> Sequence[Any]:
    if isinstance(items, Columns):
        return items.renamed({name: name for name in items.names if name != _PLACE})
    return [{name: value for name, value in item.items() if name != _PLACE} for item in items]


def _by_place(items: Sequence[Any]) -> I64:
    return order_of(items, (_PLACE,), (False,), "distinct")


def _firsts(numbers: I64, low: int, high: int) -> I64:
    """The first place of each number from ``low`` up to ``high``, all of which are there; in order."""
    place = np.empty(high, np.int64)
    place[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last that is written is the first that came
    return np.sort(place[low:])


def _names(items: Sequence[Any]) -> tuple[str, ...]:
    """The fields of the first sample, but for those that say where it comes from."""
    first = items.names if isinstance(items, Columns) else items[0]
    if not isinstance(first, dict | tuple) or not first:
        raise DataError(f"distinct needs samples with fields, not {type(first).__name__}")
    return tuple(name for name in first if not name.startswith("__"))


def _check_names(items: Sequence[Any], names: tuple[str, ...]) -> None:
    """Samples that are compared by all of their fields must have the same ones."""
    found = [items.names] if isinstance(items, Columns) else items
    for one in found:
        if not {*names} <= {*one} or any(name not in names and not name.startswith("__") for name in one):
            raise DataError(f"distinct: samples have other fields than {', '.join(map(repr, names))}; name some")
