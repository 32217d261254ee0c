"""The values of some fields as Arrow columns, from samples that are columns or dicts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.formats.tables import array_from, table_from
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import plain, shape_of, values_of
from penstock.plan import Columns, estimate_nbytes
from penstock.relations.database import StagedTable, one_type_needed

_ROWS, _BYTES = 1 << 17, 1 << 25  # the size of a chunk: what is added to a database at once
_DICT_BYTES = 300  # of a dict and the objects in it, without their data


def chunks(runs: Iterable[Sequence[Any]], memory: int) -> Iterator[Sequence[Any]]:
    """Yield runs of samples joined into larger chunks, to amortise the cost of a call per chunk."""
    held: list[Sequence[Any]] = []
    rows = size = 0
    for run in runs:
        held.append(run)
        rows, size = rows + len(run), size + size_of(run)
        if rows >= _ROWS or size > min(_BYTES, memory // 4):
            yield gathered(held)
            held, rows, size = [], 0, 0
    if held:
        yield gathered(held)


def size_of(items: Sequence[Any]) -> int:
    """Estimate the size of samples in memory; for a list, from some of the samples."""
    if isinstance(items, ArrowColumns):
        return int(items.nbytes) + 8 * len(items)
    if not len(items):
        return 0
    sampled = [items[i] for i in range(0, len(items), max(1, len(items) // 8))]
    item_bytes = sum(estimate_nbytes(item) + _DICT_BYTES for item in sampled) / len(sampled)
    return int(item_bytes * len(items))


def gathered(parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Join runs of samples: as columns in one piece of memory if all are columns of one schema, else as a list."""
    columns = [part for part in parts if isinstance(part, ArrowColumns)]
    if columns and len(columns) == len(parts) and all(map(columns[0].same_schema, columns)):
        import pyarrow as pa

        return columns_of(pa.Table.from_batches([part.batch() for part in columns]))
    return [sample for part in parts for sample in part]


def columns_of(table: Any) -> ArrowColumns:
    """Return a table as columns of samples."""
    import pyarrow as pa

    batches = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    row = np.concatenate([np.arange(batch.num_rows) for batch in batches])
    slot = np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches]) if len(batches) > 1 else None
    return ArrowColumns(batches, row, slot, row_bytes=table.nbytes / max(1, table.num_rows))


def value_of(sample: Any, field: str, verb: str) -> Any:
    """Return the value of a field of a sample.

    Raises:
        DataError: The sample does not have the field.
    """
    if not isinstance(sample, dict):
        raise DataError(f"{verb} needs samples with fields, not {type(sample).__name__}")
    if field not in sample:
        raise _no_field(field, sample, verb, sample.get("__url__"), sample.get("__key__"))
    return sample[field]


def hashable(value: Any) -> Hashable:
    """Return a form of a value that can be looked up: sequences and arrays become tuples, every NaN the same object.

    Raises:
        DataError: There is none.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return tuple((name, hashable(inner)) for name, inner in sorted(value.items()))
    if isinstance(value, float) and value != value:
        return math.nan
    if not isinstance(value, Hashable):
        raise DataError(f"values of type {type(value).__name__} cannot be compared; convert them first")
    return value


def _no_field(field: str, have: Any, verb: str, url: Any = None, key: Any = None) -> DataError:
    return DataError(f"{verb}: there is no field {field!r}, only {', '.join(sorted(map(repr, have)))}", url, key)


def values_at(items: Sequence[Any], field: str, verb: str) -> list[Any]:
    """Return the values of a field, sample by sample.

    Raises:
        DataError: A sample does not have the field.
    """
    if isinstance(items, ArrowColumns):
        _check_field(items, field, verb)
        batch = items.renamed({field: field}).batch()
        return values_of(batch.column(0), shape_of(batch.schema.field(0)))
    return [value_of(sample, field, verb) for sample in items]


def _check_field(items: Columns, field: str, verb: str) -> None:
    if field not in items.names:
        raise _no_field(field, items.names, verb)


def column_at(items: Sequence[Any], field: str, verb: str) -> Any:
    """Return the values of a field as an Arrow array; no value is converted, except integers among floats.

    Raises:
        DataError: A sample does not have the field.
        PlanError: Arrow has no one type for the values.
    """
    if isinstance(items, ArrowColumns):
        _check_field(items, field, verb)
        return plain(items.renamed({field: field}).batch().column(0))
    return array_of([value_of(sample, field, verb) for sample in items], field, verb)


def array_of(values: list[Any], field: str, verb: str) -> Any:
    """Return values as an Arrow array.

    Raises:
        PlanError: Arrow has no one type for the values.
    """
    import pyarrow as pa

    kinds = {*map(type, values)} - {type(None)}
    if len(kinds) > 1 and any(issubclass(kind, np.number | np.bool_) for kind in kinds):  # numpy's among Python's
        values = [value.item() if isinstance(value, np.number | np.bool_) else value for value in values]
        kinds = {*map(type, values)} - {type(None)}
    numbers = all(issubclass(kind, int | float | np.number) and kind is not bool for kind in kinds)
    names = " and ".join(sorted(kind.__name__ for kind in kinds)[:3])
    if not kinds.isdisjoint({tuple, set, frozenset}) or (len(kinds) > 1 and not numbers):
        raise one_type_needed(verb, field, names)
    try:
        if numbers or kinds <= {str, bytes, bool}:
            return array_from(values)
        return plain(table_from([{field: value} for value in values]).column(0).combine_chunks())
    except OverflowError as exc:
        raise one_type_needed(verb, field, "integers beyond 64 bits") from exc
    except (pa.ArrowException, DataError, TypeError, ValueError) as exc:
        beyond = "integers beyond 64 bits or floats" if numbers and int in kinds else names
        raise one_type_needed(verb, field, f"{beyond} ({str(exc).splitlines()[0]})") from exc


def key_table(items: Sequence[Any], fields: Sequence[str], verb: str, first: int | None = None) -> Any:
    """Return fields of samples as columns ``c0``, ``c1``, ...; with ``first``, also their positions from there on."""
    import pyarrow as pa

    arrays = {f"c{number}": column_at(items, field, verb) for number, field in enumerate(fields)}
    if first is not None:
        arrays["position"] = pa.array(np.arange(first, first + len(items)))
    return pa.table(arrays)


def staged(con: Any, runs: Iterable[Sequence[Any]], fields: Sequence[str], verb: str, memory: int) -> StagedTable:
    """Put fields of all samples, and their positions, into a table ``samples``."""
    table, seen = StagedTable(con, "samples", verb, fields, memory), 0
    for items in chunks(runs, memory):
        table.add(key_table(items, fields, verb, seen))
        seen += len(items)
    table.finish()
    return table


def ordering(table: StagedTable, columns: Sequence[str], descending: Sequence[bool]) -> str:
    """Return the terms of an ``order by``: missing values come last in both directions, ``None`` before NaN."""
    import pyarrow as pa

    terms = []
    for name, down in zip(columns, descending, strict=True):
        if pa.types.is_floating(table.schema.field(name).type):
            terms.append(f"case when {name} is null then 1 when isnan({name}) then 2 else 0 end")
        terms.append(f"{name} {'desc' if down else 'asc'} nulls last")
    return ", ".join(terms)
