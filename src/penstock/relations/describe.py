"""``describe()``: a summary of each field in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import values_of
from penstock.plan import Columns, Plan, pick_rows
from penstock.relations.aggregates import aggregated
from penstock.relations.database import StagedTable, database, memory_of
from penstock.relations.keys import array_of, chunks, column_at, values_at
from penstock.relations.source import Rows

_OF_NUMBERS = ("mean", "std", "min", "max")
_OF_TEXT = ("min", "max")


@dataclass(slots=True)
class _FieldSummary:
    """The running summary of one field, with a table of its values if they are numbers or text."""

    name: str
    table: StagedTable | None
    type: str | None = None
    count: int = 0
    missing: int = 0

    def add(self, items: Sequence[Any]) -> None:
        values = _array(items, self.name) if self.table is not None else None
        if values is None or not _is_summarised(values.type):
            self.table = None  # what was added before is of another type
            values = None
        listed = _values(items, self.name) if values is None else []
        if self.type is None:
            if values is not None:  # of whose values one is enough
                listed = _values(pick_rows(items, np.flatnonzero(values.is_valid())[:1]), self.name)
            first = next((value for value in listed if value is not None), None)
            self.type = None if first is None else type_of(first)
        missing = sum(value is None for value in listed) if values is None else values.null_count
        self.missing, self.count = self.missing + missing, self.count + len(items) - missing
        if values is not None and self.table is not None:
            import pyarrow as pa

            try:
                self.table.add(pa.table({"v": values}))
            except PlanError:
                self.table = None

    def row(self, con: Any) -> dict[str, Any]:
        results: dict[str, Any] = dict.fromkeys(_OF_NUMBERS)
        if self.table is not None and self.count:
            self.table.finish()
            text = _is_text(self.table.schema.field("v").type)
            for how in _OF_TEXT if text else _OF_NUMBERS:
                column = con.sql(aggregated(con, self.table, [], how, ["v"])).to_arrow_table().column(0)
                kept = self.table.decoded(column, "v") if how in _OF_TEXT else column
                (value,) = values_of(kept.combine_chunks())
                results[how] = float(value) if isinstance(value, Decimal) else value
        return {"field": self.name, "type": self.type, "count": self.count, "missing": self.missing, **results}


def _array(items: Sequence[Any], name: str) -> Any:
    """Return a field as an Arrow array, or ``None`` if its values have no one type."""
    try:
        if isinstance(items, ArrowColumns) and name in items.names:
            return column_at(items, name, "describe")
        return array_of(_values(items, name), name, "describe")
    except PlanError:
        return None


def _values(items: Sequence[Any], name: str) -> list[Any]:
    if isinstance(items, Columns):
        return values_at(items, name, "describe") if name in items.names else [None] * len(items)
    return [sample.get(name) for sample in items]


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_summarised(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    decimals = types.is_decimal(kind) and not types.is_decimal256(kind)
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or decimals
    return bool(numbers or types.is_null(kind) or _is_text(kind))


@dataclass(frozen=True, slots=True)
class Described:
    """A row for each field: type, number of values, number of missing values, mean, deviation, minimum, maximum."""

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        summaries: dict[str, _FieldSummary] = {}
        seen = 0
        with database(plan, "describe") as con:
            for items in chunks(runs, memory_of(plan)):
                for name in _names(items):
                    if name not in summaries:
                        table = StagedTable(con, f"f{len(summaries)}", "describe", (name,), memory_of(plan) // 8)
                        summaries[name] = _FieldSummary(name, table, missing=seen)
                for summary in summaries.values():
                    summary.add(items)
                seen += len(items)
            rows = [summary.row(con) for summary in summaries.values()]
        for how in _OF_TEXT:  # one type, so that the rows are a table: text, if a field has text
            if any(isinstance(row[how], str) for row in rows):
                for row in rows:
                    row[how] = None if row[how] is None else str(row[how])
        return rows, None

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return "describe()"


def type_of(value: Any) -> str:
    """Return the type of a value as text; an array has its dtype and shape in it."""
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        kind = "tensor" if type(value).__module__.startswith("torch") else "array"
        return f"{kind}<{str(dtype).removeprefix('torch.')}>[{', '.join(map(str, shape))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {type_of(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"list<{type_of(value[0])}>" if value else "list"
    return type(value).__name__


def _names(items: Sequence[Any]) -> list[str]:
    if isinstance(items, Columns):
        return [name for name in items.names if not name.startswith("__")]
    names: dict[str, None] = {}
    for item in items:
        if not isinstance(item, dict):
            raise DataError(f"describe needs samples with fields, not {type(item).__name__}")
        names.update(dict.fromkeys(name for name in item if not name.startswith("__")))
    return list(names)
