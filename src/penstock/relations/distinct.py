"""``unique`` and ``distinct``: the distinct values of a field, and the first sample of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.order import I64
from penstock.plan import Columns, Plan, pick_rows
from penstock.relations.database import StagedTable, database, memory_of
from penstock.relations.groups import numbers_of
from penstock.relations.keys import chunks, gathered, key_table, values_at
from penstock.relations.memory_groups import MemoryGroups
from penstock.relations.source import Rows
from penstock.relations.store import SampleStore

_CHECKED = 8  # where few samples of a chunk repeat a value, only every 8th chunk is reduced to its first samples


def unique(runs: Iterator[Sequence[Any]], field: str, plan: Plan) -> list[Any]:
    """Return the distinct values of a field in the order of their first occurrence."""
    items, order = Distinct((field,), "unique")(runs, plan)
    return values_at(items if order is None else pick_rows(items, order), field, "unique") if len(items) else []


@dataclass(frozen=True, slots=True)
class Distinct:
    """The first sample of each value of some fields, or of all fields if none are named; the order is kept."""

    fields: tuple[str, ...] = ()
    verb: str = "distinct"

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        memory, fields, seen = memory_of(plan), self.fields, 0
        store, share = SampleStore(memory), 0.0
        with database(plan, self.verb) as con:
            found: StagedTable | None = None
            for number, items in enumerate(chunks((run for run in runs if len(run)), memory)):
                if not self.fields:
                    fields = fields or _names(items)
                    _check_names(items, fields)
                found = found or StagedTable(con, "samples", self.verb, fields, memory)
                kept = items
                if share < 0.5 or number % _CHECKED == 0:
                    kept = gathered([pick_rows(items, _firsts_of_chunk(con, items, fields, self.verb))])
                    share = len(kept) / len(items)
                found.add(key_table(kept, fields, self.verb, seen))
                store.add(kept)
                seen += len(kept)
            if found is None:
                return [], None
            found.finish()
            order = _firsts(con, found)
        return store.items(), order

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return features

    def describe(self) -> str:
        return f"distinct({', '.join(map(repr, self.fields))})"


def _firsts_of_chunk(con: Any, items: Sequence[Any], fields: Sequence[str], verb: str) -> I64:
    """Return the numbers of the first sample of each value among ``items``: few of them may have to be stored."""
    chunk = StagedTable(con, "chunk_samples", verb, fields, 1 << 60)
    chunk.add(key_table(items, fields, verb, 0))
    chunk.finish()
    firsts = _firsts(con, chunk)
    con.unregister("chunk_samples")
    return firsts


def _firsts(con: Any, table: StagedTable) -> I64:
    """Return the position of the first row of each value, ascending."""
    import pyarrow as pa

    columns = [name for name in table.schema.names if name != "position"]
    if (groups := MemoryGroups.of(table, columns)) is not None:
        first = np.zeros(table.rows.num_rows, np.bool_)
        first[groups.firsts] = True
        return np.flatnonzero(first)
    if len(columns) == 1 and table.rows is not None and not pa.types.is_floating(table.rows.schema.field(0).type):
        with suppress(pa.ArrowNotImplementedError):  # of lists and other nested values
            found = table.rows.column(0).dictionary_encode("encode")
            # Codes are given in the order of first occurrence: a value is new where they reach a new maximum.
            codes = np.concatenate([np.zeros(0, np.int64), *(chunk.indices.to_numpy() for chunk in found.chunks)])
            return np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
    return np.sort(numbers_of(con, f"select min(position) from {table.name} group by {', '.join(columns)}"))


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
