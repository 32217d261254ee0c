"""Samples as rows of decoded row groups: numbers of rows are moved, never the values."""

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

_RUNS = 8  # so many runs of neighbours are put together as they are; more are taken row by row
ABSENT = -1  # the number of a row whose values are not there


class ArrowColumns(Columns):
    """Rows of some record batches of one schema.

    Args:
        batches: Where the rows lie.
        row: The number of each row in its batch; ``ABSENT`` where it has no values.
        slot: Which batch each row is in; ``None``: all in the first.
        fields: New name -> the one it has in the batches; ``None``: as they are.
        row_bytes: About how many bytes a row holds.
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
        self._views: dict[tuple[int, str], Any] = {}  # of whole columns, shared by all that are cut from this
        self._fields = {name: name for name in batches[0].schema.names} if fields is None else fields

    def __reduce__(self) -> tuple[Any, ...]:
        import pyarrow as pa

        there = self.present()
        sink = pa.BufferOutputStream()
        batch = (self if there is None else self.pick(there)).batch()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        row = None if there is None else np.full(len(self), ABSENT, np.int64)
        if row is not None:
            row[there] = np.arange(len(row[there]))
        return _unpickled, (sink.getvalue(), row, self._row_bytes)

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
            return self._with(self._row[which], None if self._slot is None else self._slot[which])
        at = operator.index(which)
        return next(iter(self.pick(np.array([at if at >= 0 else at + len(self)], np.int64))))

    def __iter__(self) -> Iterator[Any]:
        there = self.present()
        if there is not None:
            rows = iter(self.pick(there))
            return iter([next(rows) if number >= 0 else None for number in self._row.tolist()])
        if not self._fields or not len(self):
            return iter([{} for _ in self._row])
        names = tuple(self._fields)
        columns = [values_of(*self._column(name)) for name in names]
        return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))

    def pick(self, which: I64) -> ArrowColumns:
        return self._with(self._row[which], None if self._slot is None else self._slot[which])

    def renamed(self, names: Mapping[str, str]) -> ArrowColumns:
        fields = {new: self._fields[old] for new, old in names.items()}
        return ArrowColumns(self._batches, self._row, self._slot, fields, self._row_bytes)

    def _with(self, row: I64, slot: I64 | None) -> ArrowColumns:
        made = ArrowColumns(self._batches, row, slot, self._fields, self._row_bytes)
        made._views = self._views
        return made

    def joined(self, others: Sequence[Columns]) -> ArrowColumns | None:
        parts = [self, *(other for other in others if isinstance(other, ArrowColumns))]
        if len(parts) <= len(others) or any(not self.fits(part) for part in parts):
            return None
        row = np.concatenate([part._row for part in parts])
        first = self._batches[0]
        if all(part._slot is None and part._batches[0] is first for part in parts):
            return self._with(row, None)
        batches: list[pa.RecordBatch] = []
        slots: list[I64] = []
        known: dict[int, int] = {}
        for part in parts:
            new = np.array([known.setdefault(id(batch), len(known)) for batch in part._batches], np.int64)
            batches += [batch for number, batch in zip(new, part._batches, strict=True) if number >= len(batches)]
            slots.append(np.full(len(part), new[0]) if part._slot is None else new[part._slot])
        return ArrowColumns(batches, row, np.concatenate(slots), self._fields, self._row_bytes)

    def fits(self, other: ArrowColumns) -> bool:
        """Whether the other has the same fields of the same types."""
        mine, its = self._batches[0].schema, other._batches[0].schema
        return self._fields == other._fields and (mine is its or mine.equals(its))

    def present(self) -> I64 | None:
        return np.flatnonzero(self._row >= 0) if len(self._row) and int(self._row.min()) < 0 else None

    def collate(self) -> dict[str, Any]:
        runs, parts = self._neighbours(), self._scattered()
        out: dict[str, Any] = {}
        for name, old in self._fields.items():
            found = None
            if len(runs) == 1:
                which, first, many = runs[0]
                view = self._view(which, old)
                found = None if view is None else view[first : first + many]
            elif parts:
                found = _gathered([self._view(which, old) for which, _ in parts], self._row, parts)
            out[name] = column_of(*self._column(name)) if found is None else found
        return out

    def _view(self, which: int, name: str) -> Any:
        """The numbers of a batch's whole column without copying them; ``None`` where that cannot be."""
        key = (which, name)
        if key not in self._views:
            self._views[key] = _view(self._batches[which].column(name), shape_of(self._batches[0].schema.field(name)))
        return self._views[key]

    def _neighbours(self) -> list[tuple[int, int, int]]:
        """The rows as runs of neighbours (batch, first row, how many); none at all where these would be many."""
        if self._runs is None:
            apart = np.diff(self._row) != 1
            if self._slot is not None:
                apart |= np.diff(self._slot) != 0
            cuts = np.flatnonzero(apart) + 1
            edges = [0, *cuts.tolist(), len(self._row)] if len(cuts) < _RUNS and len(self._row) else []
            which = self._slot if self._slot is not None else np.zeros(len(self._row), np.int8)
            self._runs = [(int(which[low]), int(self._row[low]), high - low) for low, high in pairwise(edges)]
        return self._runs

    def _scattered(self) -> list[tuple[int, I64]]:
        """The places of the rows of each batch, where rows of several are mixed; none where neighbours are together."""
        if self._slot is None or not len(self._row) or self._neighbours():
            return []
        order = np.argsort(self._slot, kind="stable")
        cuts = np.flatnonzero(np.diff(self._slot[order])) + 1
        return [(int(self._slot[some[0]]), some) for some in np.split(order, cuts)]

    def batch(self) -> pa.RecordBatch:
        """The rows as one record batch, with the metadata of fields."""
        import pyarrow as pa

        schema = self._batches[0].schema
        fields = [schema.field(old).with_name(new) for new, old in self._fields.items()]
        arrays = [self._array(old) for old in self._fields.values()]
        made = [field.with_type(array.type) for field, array in zip(fields, arrays, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(made, metadata=schema.metadata))

    def mask(self, where: Condition) -> NDArray[np.bool_] | None:
        import pyarrow as pa

        if not where.fields() <= self._fields.keys():
            return None
        arrays = {name: plain(self._array(self._fields[name])) for name in where.fields()}
        try:
            found = _truth(where, arrays)
        except (pa.ArrowException, TypeError, ValueError):  # types that Arrow does not compare; Python may
            return None
        answer: NDArray[np.bool_] = found.fill_null(False).to_numpy(zero_copy_only=False)
        return answer

    def computed(self, named: Mapping[str, Expression]) -> ArrowColumns | None:
        import pyarrow as pa

        looked = frozenset(name for one in named.values() for name in one.fields())
        if not looked <= self._fields.keys() or not len(self):
            return None
        arrays = {name: plain(self._array(self._fields[name])) for name in looked}
        made = {name: calculated(one, arrays, len(self)) for name, one in named.items()}
        if any(array is None for array in made.values()):
            return None
        batch = self.batch()
        fields = [own for own in batch.schema if own.name not in made]
        columns = [batch.column(own.name) for own in fields] + list(made.values())
        fields += [pa.field(name, array.type) for name, array in made.items()]
        whole = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, metadata=batch.schema.metadata))
        return ArrowColumns([whole], np.arange(len(self)), None, None, whole.nbytes / len(self))

    def _column(self, name: str) -> tuple[pa.Array, tuple[int, ...] | None]:
        old = self._fields[name]
        return self._array(old), shape_of(self._batches[0].schema.field(old))

    def _array(self, name: str) -> pa.Array:
        """The values of one column: a slice where rows are neighbours, else taken row by row."""
        import pyarrow as pa

        column = [batch.column(name) for batch in self._batches]
        if runs := self._neighbours():
            return _together([column[which].slice(first, many) for which, first, many in runs])
        if not (parts := self._scattered()):
            return column[0].take(pa.array(self._row))
        back = np.empty_like(self._row)
        back[np.concatenate([some for _, some in parts])] = np.arange(len(back))
        taken = [column[which].take(pa.array(self._row[some])) for which, some in parts]
        return _together(taken).take(pa.array(back))


def _gathered(views: list[Any], row: I64, parts: list[tuple[int, I64]]) -> Any:
    """A column of mixed rows in one step, where each of its batches has a view: what ``column_of`` gives."""
    first = views[0]
    if any(view is None or view.shape[1:] != first.shape[1:] for view in views):
        return None
    out = np.empty((len(row), *first.shape[1:]), first.dtype)
    for view, (_, some) in zip(views, parts, strict=True):
        out[some] = view[row[some]]
    return out


def _view(array: pa.Array, shape: tuple[int, ...] | None) -> Any:
    import pyarrow as pa

    kind, each = array.type, 1
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        kind, each = kind.value_type, kind.list_size
        array = array.values.slice(array.offset * each, len(array) * each)
        shape = shape if shape is not None and np.prod(shape) == each else (each,)
    elif shape is not None:
        return None
    if not is_number(kind) or pa.types.is_boolean(kind) or array.null_count:
        return None
    return array.to_numpy().reshape(len(array) // max(1, each), *(shape or ()))


def _together(arrays: list[pa.Array]) -> pa.Array:
    import pyarrow as pa

    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _unpickled(buffer: Any, row: I64 | None, row_bytes: float) -> ArrowColumns:
    import pyarrow as pa

    batch = pa.ipc.open_stream(buffer).read_next_batch()
    return ArrowColumns([batch], np.arange(batch.num_rows) if row is None else row, row_bytes=row_bytes)


_NAMES = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


def _truth(where: Condition, arrays: Mapping[str, pa.Array]) -> pa.Array:
    """True, false or null for each row: what ``Condition.holds`` says of it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(where, Compare):
        return getattr(pc, _NAMES[where.how])(arrays[where.field], _scalar(where.value, arrays[where.field].type))
    if isinstance(where, IsIn):
        array = arrays[where.field]
        wanted = pa.array([_scalar(value, array.type).as_py() for value in where.values], array.type)
        return pc.if_else(array.is_valid(), pc.is_in(array, wanted), None)
    if isinstance(where, IsNull):
        return arrays[where.field].is_null()
    if isinstance(where, Both):
        return pc.and_kleene(_truth(where.left, arrays), _truth(where.right, arrays))
    if isinstance(where, Either):
        return pc.or_kleene(_truth(where.left, arrays), _truth(where.right, arrays))
    if isinstance(where, Not):
        return pc.invert(_truth(where.inner, arrays))
    raise TypeError(f"Arrow has no word for {where}")


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """The value as Arrow has it, where it is of the kind of its column.

    Raises:
        TypeError: it is of another kind, which Arrow would compare otherwise than Python does.
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
        raise TypeError(f"{value!r} beside {kind}")
    return pa.scalar(value)


_EXACT = 1 << 53  # whole numbers up to here are exact in floating point
_CHECKED = {"+": "add_checked", "-": "subtract_checked", "*": "multiply_checked"}


def calculated(given: Expression, arrays: Mapping[str, Any], rows: int) -> Any:
    """The values of an expression for every row as an Arrow array; ``None``: only Python can tell."""
    import pyarrow as pa

    if isinstance(given, Column):
        (name,) = given.fields()
        return arrays[name]
    try:
        found = _value(given, arrays)
    except (pa.ArrowException, _Other):
        return None
    if isinstance(found, pa.Scalar):
        return pa.array([found.as_py()], found.type).take(pa.array([0] * rows))
    return found


class _Other(Exception):
    """What Arrow does otherwise than Python."""


def _value(given: Expression, arrays: Mapping[str, Any]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(given, Column):
        (name,) = given.fields()
        return _number(arrays[name])
    if isinstance(given, Constant):
        if type(given.value) in (int, float):
            return pa.scalar(given.value)
        if type(given.value) in (str, bytes, bool):
            return pa.scalar(given.value)
        raise _Other
    if not isinstance(given, Arithmetic):
        raise _Other
    left, right = _number(_value(given.left, arrays)), _number(_value(given.right, arrays))
    floating = any(pa.types.is_floating(one.type) for one in (left, right))
    if given.how == "/" or floating:
        left, right = _as_float(left), _as_float(right)
    if given.how == "/":
        if pc.any(pc.equal(right, 0.0)).as_py():  # an error, of the rows that have it
            raise _Other
        return pc.divide(left, right)
    if given.how not in _CHECKED:
        raise _Other
    return getattr(pc, _CHECKED[given.how])(left, right)


def _number(value: Any) -> Any:
    """Numbers as Python has them: of 64 bits."""
    import pyarrow as pa

    kind = value.type
    if pa.types.is_integer(kind):
        return value.cast(pa.int64())
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return value.cast(pa.float64())
    raise _Other


def _as_float(value: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(value.type):
        return value
    ends = [pc.abs(value)] if isinstance(value, pa.Scalar) else [pc.max(pc.abs_checked(value))]
    if any((one.as_py() or 0) > _EXACT for one in ends):
        raise _Other
    return value.cast(pa.float64())
