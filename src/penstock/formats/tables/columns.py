"""Samples as rows of Arrow record batches: picking and shuffling moves row numbers, never values.

Conditions and expressions are evaluated by Arrow on whole columns where Arrow gives what Python gives; otherwise
``mask`` and ``computed`` return ``None``, and the caller evaluates them sample by sample.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from penstock.formats.tables.values import column_of, is_number, plain, shape_of, values_of
from penstock.order import I64
from penstock.plan import Columns, Condition
from penstock.plan.expressions import Arithmetic, Both, Column, Compare, Constant, Either, Expression, IsIn, IsNull, Not

if TYPE_CHECKING:
    import pyarrow as pa

ABSENT = -1  # the number of a row that has no values
_MAX_RUNS = 8  # up to this many runs of consecutive rows are sliced and joined; above it, rows are taken one by one
_MAX_EXACT_INT = 1 << 53  # integers up to here are exact in 64-bit floating point
_COMPARISONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_ARITHMETIC = {"+": "add_checked", "-": "subtract_checked", "*": "multiply_checked"}  # raise on overflow


class ArrowColumns(Columns):
    """Rows of record batches that have one schema.

    Args:
        batches: The batches that hold the rows.
        row: For each row, its number in its batch; ``ABSENT`` for a row without values.
        slot: For each row, the number of its batch; ``None`` if all rows are in the first batch.
        fields: Maps the name of each field to its name in the batches; ``None`` for all fields under their own names.
        row_bytes: The estimated size of a row.
    """

    __slots__ = ("_batches", "_fields", "_row", "_row_bytes", "_runs", "_slot", "_views")

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        row: I64,
        slot: I64 | None = None,
        fields: Mapping[str, str] | None = None,
        row_bytes: float = 0,
    ) -> None:
        self._batches, self._row, self._slot, self._row_bytes = batches, row, slot, row_bytes
        self._runs: list[tuple[int, int, int]] | None = None
        self._views: dict[tuple[int, str], Any] = {}  # of whole columns; shared with all slices of these rows
        self._fields = {name: name for name in batches[0].schema.names} if fields is None else fields

    def __reduce__(self) -> tuple[Any, ...]:
        import pyarrow as pa

        present = self.present()
        sink = pa.BufferOutputStream()
        batch = (self if present is None else self.pick(present)).batch()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        row = None if present is None else np.full(len(self), ABSENT, np.int64)
        if row is not None:
            row[present] = np.arange(len(row[present]))
        return _unpickle, (sink.getvalue(), row, self._row_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._fields)

    @property
    def nbytes(self) -> int:
        return int(self._row_bytes * len(self._row))

    def __len__(self) -> int:
        return len(self._row)

    @overload
    def __getitem__(self, which: int) -> Any: ...

    @overload
    def __getitem__(self, which: slice) -> ArrowColumns: ...

    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return self._with_rows(self._row[which], None if self._slot is None else self._slot[which])
        number = operator.index(which)
        return next(iter(self.pick(np.array([number if number >= 0 else number + len(self)], np.int64))))

    def __iter__(self) -> Iterator[Any]:
        present = self.present()
        if present is not None:
            rows = iter(self.pick(present))
            return iter([next(rows) if number >= 0 else None for number in self._row.tolist()])
        if not self._fields or not len(self):
            return iter([{} for _ in self._row])
        names = tuple(self._fields)
        columns = [values_of(*self._column(name)) for name in names]
        return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))

    def pick(self, which: I64) -> ArrowColumns:
        return self._with_rows(self._row[which], None if self._slot is None else self._slot[which])

    def renamed(self, names: Mapping[str, str]) -> ArrowColumns:
        fields = {new: self._fields[old] for new, old in names.items()}
        return ArrowColumns(self._batches, self._row, self._slot, fields, self._row_bytes)

    def _with_rows(self, row: I64, slot: I64 | None) -> ArrowColumns:
        columns = ArrowColumns(self._batches, row, slot, self._fields, self._row_bytes)
        columns._views = self._views
        return columns

    def joined(self, others: Sequence[Columns]) -> ArrowColumns | None:
        parts = [self, *(other for other in others if isinstance(other, ArrowColumns))]
        if len(parts) <= len(others) or any(not self.same_schema(part) for part in parts):
            return None
        row = np.concatenate([part._row for part in parts])
        first = self._batches[0]
        if all(part._slot is None and part._batches[0] is first for part in parts):
            return self._with_rows(row, None)
        batches: list[pa.RecordBatch] = []
        slots: list[I64] = []
        numbers: dict[int, int] = {}  # by the id of a batch: several parts may hold the same one
        for part in parts:
            new = np.array([numbers.setdefault(id(batch), len(numbers)) for batch in part._batches], np.int64)
            batches += [batch for number, batch in zip(new, part._batches, strict=True) if number >= len(batches)]
            slots.append(np.full(len(part), new[0]) if part._slot is None else new[part._slot])
        return ArrowColumns(batches, row, np.concatenate(slots), self._fields, self._row_bytes)

    def same_schema(self, other: ArrowColumns) -> bool:
        """Return whether the other rows have the same fields of the same types."""
        schema, other_schema = self._batches[0].schema, other._batches[0].schema
        return self._fields == other._fields and (schema is other_schema or schema.equals(other_schema))

    def present(self) -> I64 | None:
        return np.flatnonzero(self._row >= 0) if len(self._row) and int(self._row.min()) < 0 else None

    def collate(self) -> dict[str, Any]:
        runs, parts = self._consecutive_runs(), self._rows_by_batch()
        out: dict[str, Any] = {}
        for name, old in self._fields.items():
            column = None
            if len(runs) == 1:
                number, first, count = runs[0]
                view = self._view(number, old)
                column = None if view is None else view[first : first + count]
            elif parts:
                column = _gather([self._view(number, old) for number, _ in parts], self._row, parts)
            out[name] = column_of(*self._column(name)) if column is None else column
        return out

    def _view(self, number: int, name: str) -> Any:
        """Return a numpy view of a whole column of a batch, or ``None`` where numpy would have to copy it."""
        key = (number, name)
        if key not in self._views:
            shape = shape_of(self._batches[0].schema.field(name))
            self._views[key] = _numpy_view(self._batches[number].column(name), shape)
        return self._views[key]

    def _consecutive_runs(self) -> list[tuple[int, int, int]]:
        """Return the rows as runs (batch, first row, count); an empty list if that takes more than ``_MAX_RUNS``."""
        if self._runs is None:
            breaks = self._row[1:] - self._row[:-1] != 1
            if self._slot is not None:
                breaks |= self._slot[1:] != self._slot[:-1]
            cuts = breaks.nonzero()[0] + 1
            edges = [0, *cuts.tolist(), len(self._row)] if len(cuts) < _MAX_RUNS and len(self._row) else []
            slot = self._slot if self._slot is not None else np.zeros(len(self._row), np.int8)
            self._runs = [(int(slot[low]), int(self._row[low]), high - low) for low, high in pairwise(edges)]
        return self._runs

    def _rows_by_batch(self) -> list[tuple[int, I64]]:
        """Return each batch with the positions of its rows; an empty list for one batch or consecutive runs."""
        if self._slot is None or not len(self._row) or self._consecutive_runs():
            return []
        order = np.argsort(self._slot, kind="stable")
        cuts = np.flatnonzero(np.diff(self._slot[order])) + 1
        return [(int(self._slot[positions[0]]), positions) for positions in np.split(order, cuts)]

    @property
    def _has_all_fields(self) -> bool:
        """Whether the fields are those of the batches, under their own names and in their order."""
        names: list[str] = self._batches[0].schema.names
        return list(self._fields) == names and list(self._fields.values()) == names

    def batch(self) -> pa.RecordBatch:
        """Return the rows as one record batch, with the metadata of the schema and its fields."""
        import pyarrow as pa

        schema, runs = self._batches[0].schema, self._consecutive_runs()
        if len(runs) == 1 and self._has_all_fields:
            number, first, count = runs[0]
            return self._batches[number].slice(first, count)
        fields = [schema.field(old).with_name(new) for new, old in self._fields.items()]
        arrays = [self._array(old) for old in self._fields.values()]
        typed = [field.with_type(array.type) for field, array in zip(fields, arrays, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(typed, metadata=schema.metadata))

    def mask(self, where: Condition) -> NDArray[np.bool_] | None:
        import pyarrow as pa

        if not where.fields() <= self._fields.keys():
            return None
        arrays = {name: plain(self._array(self._fields[name])) for name in where.fields()}
        try:
            found = _evaluate_condition(where, arrays)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):  # what Arrow does not compare; Python may
            return None
        mask: NDArray[np.bool_] = found.fill_null(False).to_numpy(zero_copy_only=False)
        return mask

    def computed(self, named: Mapping[str, Expression]) -> ArrowColumns | None:
        import pyarrow as pa

        needed = frozenset(name for expression in named.values() for name in expression.fields())
        if not needed <= self._fields.keys() or not len(self):
            return None
        arrays = {name: plain(self._array(self._fields[name])) for name in needed}
        new = {name: _evaluate_rows(expression, arrays, len(self)) for name, expression in named.items()}
        if any(array is None for array in new.values()):
            return None
        batch = self.batch()
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True)) | new
        fields = [pa.field(name, new[name].type) if name in new else batch.schema.field(name) for name in arrays]
        schema = pa.schema(fields, metadata=batch.schema.metadata)
        extended = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
        return ArrowColumns([extended], np.arange(len(self)), None, None, extended.nbytes / len(self))

    def _column(self, name: str) -> tuple[pa.Array, tuple[int, ...] | None]:
        old = self._fields[name]
        return self._array(old), shape_of(self._batches[0].schema.field(old))

    def _array(self, name: str) -> pa.Array:
        """Return the values of one column of the batches: slices of consecutive rows, else rows taken one by one."""
        import pyarrow as pa

        column = [batch.column(name) for batch in self._batches]
        if runs := self._consecutive_runs():
            return _concat([column[number].slice(first, count) for number, first, count in runs])
        if not (parts := self._rows_by_batch()):
            return column[0].take(pa.array(self._row))
        inverse = np.empty_like(self._row)
        inverse[np.concatenate([positions for _, positions in parts])] = np.arange(len(inverse))
        by_batch = [column[number].take(pa.array(self._row[positions])) for number, positions in parts]
        return _concat(by_batch).take(pa.array(inverse))


def _gather(views: list[Any], row: I64, parts: list[tuple[int, I64]]) -> Any:
    """Return a column of rows from several batches in one copy, or ``None`` if a batch has no fitting view."""
    first = views[0]
    if any(view is None or view.shape[1:] != first.shape[1:] for view in views):
        return None
    out = np.empty((len(row), *first.shape[1:]), first.dtype)
    for view, (_, positions) in zip(views, parts, strict=True):
        out[positions] = view[row[positions]]
    return out


def _numpy_view(array: pa.Array, shape: tuple[int, ...] | None) -> Any:
    import pyarrow as pa

    kind, size = array.type, 1
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        kind, size = kind.value_type, kind.list_size
        array = array.values.slice(array.offset * size, len(array) * size)
        shape = shape if shape is not None and np.prod(shape) == size else (size,)
    elif shape is not None:
        return None
    if not is_number(kind) or pa.types.is_boolean(kind) or array.null_count:
        return None
    return array.to_numpy().reshape(len(array) // max(1, size), *(shape or ()))


def _concat(arrays: list[pa.Array]) -> pa.Array:
    import pyarrow as pa

    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _unpickle(buffer: Any, row: I64 | None, row_bytes: float) -> ArrowColumns:
    import pyarrow as pa

    batch = pa.ipc.open_stream(buffer).read_next_batch()
    return ArrowColumns([batch], np.arange(batch.num_rows) if row is None else row, row_bytes=row_bytes)


def _evaluate_condition(where: Condition, arrays: Mapping[str, pa.Array]) -> pa.Array:
    """Return true, false or null for each row: what ``Condition.holds`` returns for it.

    Raises:
        TypeError: Arrow does not compare the values as Python does.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(where, Compare):
        array = arrays[where.field]
        return getattr(pc, _COMPARISONS[where.op])(array, _scalar(where.value, array.type))
    if isinstance(where, IsIn):
        array = arrays[where.field]
        array = array.cast(pa.float64()) if pa.types.is_float32(array.type) else array  # as Python compares them
        wanted = pa.array([_scalar(value, array.type).as_py() for value in where.values], array.type)
        if pa.types.is_float64(array.type):
            array, wanted = pc.add(array, 0.0), pc.add(wanted, 0.0)  # -0.0 is 0.0
        return pc.if_else(array.is_valid(), pc.is_in(array, wanted), None)
    if isinstance(where, IsNull):
        return arrays[where.field].is_null()
    if isinstance(where, Both):
        return pc.and_kleene(_evaluate_condition(where.left, arrays), _evaluate_condition(where.right, arrays))
    if isinstance(where, Either):
        return pc.or_kleene(_evaluate_condition(where.left, arrays), _evaluate_condition(where.right, arrays))
    if isinstance(where, Not):
        return pc.invert(_evaluate_condition(where.inner, arrays))
    raise TypeError(f"{where} has no Arrow equivalent")


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return the value as an Arrow scalar if it fits the type of its column.

    Raises:
        TypeError: The value is of another type, which Arrow compares differently than Python does.
    """
    import pyarrow as pa

    types = pa.types
    if isinstance(value, np.generic) and value.dtype.kind not in "mM":
        value = value.item()
    fits = (
        (isinstance(value, bool) and types.is_boolean(kind))
        or (type(value) is int and (types.is_integer(kind) or types.is_floating(kind)))
        or (isinstance(value, float) and types.is_floating(kind))
        or (isinstance(value, str) and (types.is_string(kind) or types.is_large_string(kind)))
        or (isinstance(value, bytes) and (types.is_binary(kind) or types.is_large_binary(kind)))
    )
    if not fits:
        raise TypeError(f"{value!r} is not a value of type {kind}")
    return pa.scalar(value, kind if types.is_uint64(kind) else None)  # Arrow has no common type of int64 and uint64


class _PythonOnlyError(Exception):
    """Arrow would compute something else than Python."""


def _evaluate_rows(expression: Expression, arrays: Mapping[str, Any], rows: int) -> Any:
    """Return one value of an expression per row as an Arrow array; ``None`` if only Python can compute it."""
    import pyarrow as pa

    if isinstance(expression, Column):
        (name,) = expression.fields()
        return arrays[name]
    try:
        found = _evaluate(expression, arrays)
    except (pa.ArrowException, _PythonOnlyError, OverflowError):
        return None
    if isinstance(found, pa.Scalar):
        return pa.array([found.as_py()], found.type).take(pa.array([0] * rows))
    return found


def _evaluate(expression: Expression, arrays: Mapping[str, Any]) -> Any:
    """Return the values of an expression as an Arrow array, or as a scalar if they are constant.

    Raises:
        _PythonOnlyError: Only Python can compute them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(expression, Column):
        (name,) = expression.fields()
        return _widened(arrays[name])
    if isinstance(expression, Constant):
        if type(expression.value) in (int, float, str, bytes, bool):
            return pa.scalar(expression.value)
        raise _PythonOnlyError
    if not isinstance(expression, Arithmetic):
        raise _PythonOnlyError
    left, right = (_widened(_evaluate(side, arrays)) for side in (expression.left, expression.right))
    floating = any(pa.types.is_floating(side.type) for side in (left, right))
    if expression.op == "/" or floating:
        left, right = _as_float(left), _as_float(right)
    if expression.op == "/":
        if pc.any(pc.equal(right, 0.0)).as_py():  # Python raises, and the error belongs to single samples
            raise _PythonOnlyError
        return pc.divide(left, right)
    if expression.op not in _ARITHMETIC:
        raise _PythonOnlyError
    return getattr(pc, _ARITHMETIC[expression.op])(left, right)


def _widened(value: Any) -> Any:
    """Return integers and floating-point numbers in 64 bits, as Python computes with them."""
    import pyarrow as pa

    kind = value.type
    if pa.types.is_integer(kind):
        return value.cast(pa.int64())
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return value.cast(pa.float64())
    raise _PythonOnlyError


def _as_float(value: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(value.type):
        return value
    largest = pc.abs(value) if isinstance(value, pa.Scalar) else pc.max(pc.abs_checked(value))
    if (largest.as_py() or 0) > _MAX_EXACT_INT:
        raise _PythonOnlyError
    return value.cast(pa.float64())
