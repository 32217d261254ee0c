"""``groupby``: a row for each value of some fields, computed by DuckDB from the columns that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.errors import PlanError
from penstock.order import I64
from penstock.plan import Plan, pick_rows
from penstock.plan.values import check_names
from penstock.relations.aggregates import aggregated, check_numbers
from penstock.relations.database import StagedTable, database, memory_of
from penstock.relations.keys import chunks, columns_of, gathered, key_table, ordering, staged, values_at
from penstock.relations.memory_groups import MemoryGroups
from penstock.relations.source import Rows, select_fields, summarized
from penstock.relations.store import LazyRows, SampleStore

_Of = TypeVar("_Of")
_RESULT_ROWS = 1 << 17  # of a result that are fetched at a time


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A row for each value of some fields, sorted by them: a count, or aggregates of other fields."""

    fields: tuple[str, ...]
    how: str
    of: tuple[str, ...] = ()
    frequent_first: bool = False  # sorted by the count, then by the fields

    def __post_init__(self) -> None:
        results = ["count"] if self.how == "count" else [f"{name}_{self.how}" for name in self.of]
        if clash := [name for name in results if name in self.fields]:
            raise PlanError(
                f"{self.describe()} adds a field {clash[0]!r}, which it also groups by; rename that field first"
            )

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        with database(plan, self._verb) as con:
            if self.how == "list":
                return self._lists(con, runs, plan), None
            return self._rows(con, runs, plan), None

    @property
    def _verb(self) -> str:
        return "value_counts" if self.frequent_first else "groupby"

    def _rows(self, con: Any, runs: Iterator[Sequence[Any]], plan: Plan) -> Sequence[Any]:
        import pyarrow as pa

        columns = dict(zip(dict.fromkeys([*self.fields, *self.of]), (f"c{n}" for n in range(99999)), strict=False))
        table = staged(con, runs, list(columns), self._verb, memory_of(plan))
        if table.schema is None:
            return []
        keys = [columns[name] for name in self.fields]
        of = [columns[name] for name in self.of]
        check_numbers(table, self.how, of)
        store = SampleStore(memory_of(plan))
        groups = MemoryGroups.of(table, keys)
        if groups is not None and (found := groups.aggregated(self.how, of, self.frequent_first)) is not None:
            store.add(self._result_rows(found, table, keys, of))
            return store.items()
        query = aggregated(con, table, keys, self.how, of)
        frequent = "r0 desc, " if self.frequent_first else ""
        query += f" order by {frequent}{ordering(table, keys, [False] * len(keys))}"
        for batch in con.sql(query).to_arrow_reader(_RESULT_ROWS):
            store.add(self._result_rows(pa.Table.from_batches([batch]), table, keys, of))
        return store.items()

    def _result_rows(self, found: Any, table: StagedTable, keys: Sequence[str], of: Sequence[str]) -> Sequence[Any]:
        import pyarrow as pa

        named = {name: table.decoded(found.column(key), key) for name, key in zip(self.fields, keys, strict=True)}
        if self.how == "count":
            named["count"] = found.column("r0")
        for number, (name, column) in enumerate(zip(self.of, of, strict=True)):
            values = found.column(f"r{number}")
            kept = self.how in ("min", "max")
            named[f"{name}_{self.how}"] = table.decoded(values, column) if kept else values
        added = {
            f"{name}_sum" for name, c in zip(self.of, of, strict=True) if not is_decimal(table.schema.field(c).type)
        }
        return rows_of(pa.table(named), added if self.how == "sum" else ())

    def _lists(self, con: Any, runs: Iterator[Sequence[Any]], plan: Plan) -> Sequence[Any]:
        """Return rows with the values of each group in a list, which are built when they are read."""
        memory = memory_of(plan)
        samples = SampleStore(memory)
        table, seen = StagedTable(con, "samples", "groupby", self.fields, memory), 0
        for items in chunks(runs, memory):
            table.add(key_table(items, self.fields, "groupby", seen))
            samples.add(items)
            seen += len(items)
        table.finish()
        if table.schema is None:
            return []
        keys = [f"c{n}" for n in range(len(self.fields))]
        items = samples.items() if samples.has_spilled else gathered([samples.items()])
        if (groups := MemoryGroups.of(table, keys)) is not None:
            return ListRows(self.fields, self.of, items, groups.order, groups.edges)
        sorted_by = ordering(table, keys, [False] * len(keys))
        order = numbers_of(con, f"select position from samples order by {sorted_by}, position")
        counts = numbers_of(con, f"select count(*) from samples group by {', '.join(keys)} order by {sorted_by}")
        return ListRows(self.fields, self.of, items, order, np.concatenate([[0], np.cumsum(counts)]))

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return {name: feature for name, feature in features.items() if name in self.fields}

    def describe(self) -> str:
        if self.frequent_first:
            return f"value_counts({self.fields[0]!r})"
        return f"groupby({', '.join(map(repr, self.fields))}).{self.how}({', '.join(map(repr, self.of))})"


@dataclass(frozen=True, slots=True)
class ListRows(LazyRows):
    """A row for each group, with the values of its samples in lists; a single group must fit into memory."""

    fields: tuple[str, ...]
    of: tuple[str, ...]
    items: Sequence[Any]
    order: I64  # the samples, sorted by group
    edges: I64  # where each group begins in ``order``

    def __len__(self) -> int:
        return len(self.edges) - 1

    def rows(self, index: I64) -> list[dict[str, Any]]:
        begins, counts = self.edges[index], self.edges[index + 1] - self.edges[index]
        edges = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(edges[-1]) + np.repeat(begins - edges[:-1], counts)
        items = pick_rows(self.items, self.order[positions])
        named = {name: values_at(pick_rows(items, edges[:-1]), name, "groupby") for name in self.fields}
        bounds = edges.tolist()
        for name in self.of:
            values = values_at(items, name, "list")
            named[f"{name}_list"] = [values[low:high] for low, high in pairwise(bounds)]
        return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]


def numbers_of(con: Any, query: str) -> I64:
    """Return the one column of a query's result, which has integers."""
    (column,) = con.sql(query).to_arrow_table().columns
    return column.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def is_decimal(kind: Any) -> bool:
    """Return whether an Arrow type is a decimal type."""
    import pyarrow as pa

    return bool(pa.types.is_decimal(kind))


def rows_of(table: Any, integers: Collection[str]) -> Sequence[Any]:
    """Return a result of DuckDB as samples.

    The columns ``integers`` become integers of 64 bits, or ``int`` in dicts, if they have 128 bits: decimals in Arrow.
    """
    import pyarrow as pa

    for number, field in enumerate(table.schema):
        if field.name in integers and is_decimal(field.type):
            try:
                table = table.set_column(number, field.name, table.column(number).cast(pa.int64()))
            except pa.ArrowInvalid:
                rows = table.to_pylist()
                for row in rows:
                    row[field.name] = None if row[field.name] is None else int(row[field.name])
                return rows  # type: ignore[no-any-return]
    return columns_of(table)


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
        if how != "count":
            if not fields:
                raise PlanError(f"{how}() needs field names, as in groupby({self.fields[0]!r}).{how}('x')")
            check_names(how, fields)
        read = select_fields(self.plan, "groupby", *self.fields, *fields)
        return self.make_dataset(summarized(read, Aggregated(self.fields, how, fields)))
