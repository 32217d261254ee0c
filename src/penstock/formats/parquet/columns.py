"""Samples as rows of decoded row groups: numbers of rows are moved, never the values."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from penstock.formats.parquet.calculating import calculated
from penstock.formats.parquet.values import column_of, is_number, plain, shape_of, values_of
from penstock.order import I64
from penstock.plan import Columns, Condition, Expression
from penstock.plan.where import Both, Compare, Either, IsIn, IsNull, Not

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

    __slots__ = ("_batches", "_fields", "_row", "_row_bytes", "_slot")

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        row: I64,
        slot: I64 | None = None,
        fields: Mapping[str, str] | None = None,
        row_bytes: float = 0,
    ) -> None:
        self._batches, self._row, self._slot, self._row_bytes = batches, row, slot, row_bytes
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
        return ArrowColumns(self._batches, row, slot, self._fields, self._row_bytes)

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
        parts = self._scattered()
        out: dict[str, Any] = {}
        for name, old in self._fields.items():
            found = None
            if parts is not None and shape_of(self._batches[0].schema.field(old)) is None:
                found = _gathered([batch.column(old) for batch in self._batches], self._row, parts)
            out[name] = column_of(*self._column(name)) if found is None else found
        return out

    def _scattered(self) -> list[tuple[int, I64]] | None:
        """The places of the rows of each batch, where rows of several are mixed; ``None``: neighbours are together."""
        row, slot = self._row, self._slot
        if slot is None or not len(row) or np.count_nonzero((np.diff(slot) != 0) | (np.diff(row) != 1)) < _RUNS:
            return None
        order = np.argsort(slot, kind="stable")
        cuts = np.flatnonzero(np.diff(slot[order])) + 1
        return [(int(slot[some[0]]), some) for some in np.split(order, cuts)]

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

        row, slot = self._row, self._slot
        if slot is None or not len(row):
            return _rows_of(self._batches[0].column(name), row)
        column = [batch.column(name) for batch in self._batches]
        parts = self._scattered()
        if parts is None:
            breaks = np.flatnonzero((np.diff(slot) != 0) | (np.diff(row) != 1)) + 1
            edges = [0, *breaks.tolist(), len(row)]
            runs = [(int(row[low]), high - low, int(slot[low])) for low, high in pairwise(edges)]
            return _together([column[which].slice(first, many) for first, many, which in runs])
        back = np.empty_like(row)
        back[np.concatenate([some for _, some in parts])] = np.arange(len(row))
        return _together([column[which].take(pa.array(row[some])) for which, some in parts]).take(pa.array(back))


def _rows_of(array: pa.Array, row: I64) -> pa.Array:
    import pyarrow as pa

    many = len(row)
    if many and int(row[-1]) - int(row[0]) == many - 1 and bool((np.diff(row) == 1).all()):
        return array.slice(int(row[0]), many)
    return array.take(pa.array(row))


def _gathered(columns: list[pa.Array], row: I64, parts: list[tuple[int, I64]]) -> Any:
    """A column of mixed rows in one step, where it holds numbers, or lists of so many: what ``column_of`` gives."""
    views = {which: _view(columns[which]) for which, _ in parts}
    first = views[parts[0][0]]
    if first is None or any(view is None or view.shape[1:] != first.shape[1:] for view in views.values()):
        return None
    out = np.empty((len(row), *first.shape[1:]), first.dtype)
    for which, some in parts:
        out[some] = views[which][row[some]]
    return out


def _view(array: pa.Array) -> Any:
    """The numbers of a column without copying them; ``None`` where that cannot be."""
    import pyarrow as pa

    kind = array.type
    if array.null_count or pa.types.is_boolean(kind):
        return None
    if is_number(kind):
        return array.to_numpy()
    if not (pa.types.is_fixed_size_list(kind) and is_number(kind.value_type)) or pa.types.is_boolean(kind.value_type):
        return None
    inner = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
    return None if inner.null_count else inner.to_numpy().reshape(len(array), kind.list_size)


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
