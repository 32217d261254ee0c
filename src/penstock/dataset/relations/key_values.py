"""Compare values of fields: equality and sort order, by Arrow for columns, one by one for other values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import plain, shape_of, values_of
from penstock.order import I64
from penstock.plan import Columns


@cache
def has_arrow() -> bool:
    """Return whether pyarrow is installed; without it, values are processed one by one."""
    try:
        import pyarrow.compute
    except ImportError:
        return False
    del pyarrow
    return True


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


def _no_field(field: str, have: Any, verb: str, url: Any = None, key: Any = None) -> DataError:
    return DataError(f"{verb}: there is no field {field!r}, only {', '.join(sorted(map(repr, have)))}", url, key)


def values_at(items: Sequence[Any], field: str, verb: str) -> list[Any]:
    """Return the values of a field, sample by sample.

    Raises:
        DataError: A sample does not have the field.
    """
    if isinstance(items, Columns):
        check_field(items, field, verb)
        column = items.renamed({field: field})
        if isinstance(column, ArrowColumns) and column.present() is None:
            batch = column.batch()
            return values_of(batch.column(0), shape_of(batch.schema.field(0)))
        return [sample[field] for sample in column]
    return [value_of(sample, field, verb) for sample in items]


def check_field(items: Columns, field: str, verb: str) -> None:
    """Check that columns have a field.

    Raises:
        DataError: The field does not exist.
    """
    if field not in items.names:
        raise _no_field(field, items.names, verb)


def hashable(value: Any) -> Hashable:
    """Return a hashable form of a value: sequences, arrays and dicts become tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return tuple((name, hashable(inner)) for name, inner in sorted(value.items()))
    if isinstance(value, float) and value != value:
        return math.nan  # one object, so that all NaN form one group
    assert isinstance(value, Hashable)
    return value


def sort_key(value: Any) -> tuple[Any, ...]:
    """Return the sort key of a value: numbers first, then other values by type, then ``None`` and NaN."""
    plain_value = hashable(value)
    if plain_value is None or plain_value is math.nan:
        return (2, str(plain_value), 0)
    if isinstance(plain_value, bool | int | float):
        return (0, "", plain_value)
    return (
        1,
        type(plain_value).__name__,
        tuple(map(sort_key, plain_value)) if isinstance(plain_value, tuple) else plain_value,
    )


_ARROW_TYPES: dict[type, str] = {bool: "bool_", int: "int64", float: "float64", str: "string", bytes: "binary"}


def arrow_column(items: Sequence[Any], field: str, verb: str) -> Any:
    """Return a field as an Arrow array of numbers, text, bytes or times, if all values are of one such type.

    No value is converted. Returns ``None`` for other values, which must be compared one by one.

    Raises:
        DataError: A sample does not have the field.
    """
    if isinstance(items, ArrowColumns):
        check_field(items, field, verb)
        array = plain(items.renamed({field: field}).batch().column(0))
        return array if _is_simple(array.type) else None
    if not has_arrow() or not len(items):
        return None
    import pyarrow as pa

    values = values_at(items, field, verb)
    kinds = {*map(type, values)} - {type(None)}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind not in _ARROW_TYPES:
        return None
    try:
        return pa.array(values, getattr(pa, _ARROW_TYPES[kind])())
    except (pa.ArrowException, OverflowError, UnicodeError):  # integers beyond 64 bits, text with lone surrogates
        return None


def _is_simple(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    times = types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    numbers = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind) or types.is_boolean(kind)
    return bool(times or text or numbers)


def order_of(items: Sequence[Any], fields: Sequence[str], descending: Sequence[bool], verb: str) -> I64:
    """Return the positions of samples sorted by some fields; equal samples keep their order."""
    columns = [arrow_column(items, field, verb) for field in fields]
    if all(array is not None for array in columns):
        return _order_of_columns(columns, descending)
    order = list(range(len(items)))
    for field, down in reversed(list(zip(fields, descending, strict=True))):
        keys = [sort_key(value) for value in values_at(items, field, verb)]
        order.sort(key=keys.__getitem__, reverse=down)
    return np.array(order, np.int64)


def _order_of_columns(columns: Sequence[Any], descending: Sequence[bool]) -> I64:
    import pyarrow as pa
    import pyarrow.compute as pc

    keys: dict[str, Any] = {}
    directions: list[tuple[str, str]] = []
    for number, (array, down) in enumerate(zip(columns, descending, strict=True)):
        direction = "descending" if down else "ascending"
        kind = _missing(array)
        for name, key in ((f"kind {number}", kind), (f"value {number}", array)):
            if key is not None:
                keys[name] = key
                directions.append((name, direction))
    found = pc.sort_indices(pa.table(keys), sort_keys=directions)
    return found.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def _missing(array: Any) -> Any:
    """Return 0 for a value, 1 for null and 2 for NaN; ``None`` if there are only values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = array.is_null().to_numpy(zero_copy_only=False).astype(np.int8) if array.null_count else None
    if pa.types.is_floating(array.type):
        nan = pc.is_nan(array).fill_null(False).to_numpy(zero_copy_only=False)
        if nan.any():
            kinds = np.zeros(len(array), np.int8) if kinds is None else kinds
            kinds[nan] = 2
    return None if kinds is None else pa.array(kinds)


def columns_of(table: Any) -> ArrowColumns:
    """Return a table as columns of samples."""
    import pyarrow as pa

    batches = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    row = np.concatenate([np.arange(batch.num_rows) for batch in batches])
    slot = np.repeat(np.arange(len(batches)), [batch.num_rows for batch in batches]) if len(batches) > 1 else None
    return ArrowColumns(batches, row, slot, row_bytes=table.nbytes / max(1, table.num_rows))


def compacted(items: Sequence[Any]) -> Sequence[Any]:
    """Return the samples in separate memory: columns no longer refer to batches with other rows."""
    return gathered([items]) if isinstance(items, ArrowColumns) and len(items) else list(items)


def gathered(parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Join runs of samples: as columns in one piece of memory if all are columns of one schema, else as a list."""
    columns = [part for part in parts if isinstance(part, ArrowColumns)]
    if columns and len(columns) == len(parts) and all(map(columns[0].same_schema, columns)):
        import pyarrow as pa

        return columns_of(pa.Table.from_batches([part.batch() for part in columns]))
    return [sample for part in parts for sample in part]
