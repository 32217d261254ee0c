"""Keys as numbers: one integer for each row, which sorts as the row's values of some columns do.

Integers are counted from the lowest. A text is a number with a digit for each of its bytes, in the base of how many
bytes occur at that place: numbered names such as ``"key 000123"`` become small numbers. The numbers of several columns
are digits of one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order import I64, U64
from penstock.relations.database import StagedTable

DENSE = 4  # codes in a range, for each row, up to which a table with an entry for every code pays
_LARGEST_SPAN = (1 << 64) - 1  # which a 64-bit integer holds, too
_LONGEST = 64  # bytes of a text
_TRIED = 1024  # texts that tell quickly whether all are too different for 64 bits
_SLICE = 1 << 14  # texts that are converted at a time, in arrays that fit into the cache
_DIGIT_BITS = 16  # which numpy's stable sort counts instead of comparing

_Digits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KeyCodes:
    """One integer for each row, below ``span``."""

    values: U64
    span: int


def key_codes(table: StagedTable, columns: Sequence[str], descending: Sequence[bool] = ()) -> KeyCodes | None:
    """Return the keys of a table's rows as numbers.

    ``None`` if a column has other values than integers and texts, missing values, or too many different ones for 64
    bits, and if the rows are not in memory: DuckDB is to compare them.
    """
    if table.rows is None:
        return None
    arrays = [table.rows.column(name) for name in columns]
    coder = KeyCoder.of(arrays, descending)
    return None if coder is None else KeyCodes(coder.codes(arrays), coder.span)


def sorted_rows(codes: KeyCodes) -> I64:
    """Return the numbers of the rows in the order of their codes; equal rows keep their order."""
    order: I64 | None = None
    for shift in range(0, max(1, (codes.span - 1).bit_length()), _DIGIT_BITS):
        digits = (codes.values >> np.uint64(shift)).astype(np.uint16)
        order = np.argsort(digits, kind="stable") if order is None else order[np.argsort(digits[order], kind="stable")]
    assert order is not None
    return order


def integers_of(array: Any) -> I64 | None:
    """Return an Arrow array as 64-bit integers; ``None`` for other types, and for missing values."""
    import pyarrow as pa

    if not pa.types.is_integer(array.type) or pa.types.is_uint64(array.type) or array.null_count:
        return None
    return array.to_numpy().astype(np.int64, copy=False)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class KeyCoder:
    """Turns keys into numbers below ``span``, and keys that are not within the range of some rows into ``span``."""

    columns: Sequence[_Integers | _Texts]
    descending: Sequence[bool]
    span: int

    @staticmethod
    def of(arrays: Sequence[Any], descending: Sequence[bool] = ()) -> KeyCoder | None:
        """Return a coder for the range of the rows of Arrow arrays.

        ``None`` if there are no rows, other values than integers and texts, missing values, or too many different ones.
        """
        columns: list[_Integers | _Texts] = []
        for array in arrays:
            column = (_Integers.of(array) or _Texts.of(array)) if len(array) else None
            if column is None:
                return None
            columns.append(column)
        span = prod(column.span for column in columns)
        return KeyCoder(columns, descending or [False] * len(columns), span) if span <= _LARGEST_SPAN else None

    def codes(self, arrays: Sequence[Any]) -> U64:
        """Return the number of each row of columns of the same types."""
        found = np.zeros(len(arrays[0]), np.uint64)
        outside = np.zeros(len(found), np.bool_)
        for column, array, down in zip(self.columns, arrays, self.descending, strict=True):
            codes = column.codes(array)
            outside |= codes == column.span
            found *= np.uint64(column.span)
            found += np.uint64(column.span - 1) - codes if down else codes
        found[outside] = self.span
        return found


@dataclass(frozen=True, slots=True)
class _Integers:
    low: np.int64
    span: int

    @staticmethod
    def of(array: Any) -> _Integers | None:
        values = integers_of(array)
        return None if values is None else _Integers(values.min(), int(values.max()) - int(values.min()) + 1)

    def codes(self, array: Any) -> U64:
        values = integers_of(array)
        assert values is not None
        return np.minimum((values - self.low).view(np.uint64), np.uint64(self.span))


@dataclass(frozen=True, slots=True)
class _Texts:
    """The range of texts: of the digit at each place, which is a byte and 1, or 0 after the end of a text."""

    low: _Digits
    high: _Digits
    span: int

    @staticmethod
    def of(array: Any) -> _Texts | None:
        import pyarrow as pa
        import pyarrow.compute as pc

        if array.null_count or not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            return None
        if len(array) > _TRIED and _Texts.of(array.slice(0, _TRIED)) is None:
            return None
        width = pc.max(pc.binary_length(array)).as_py()
        if width > _LONGEST:
            return None
        bounds = [(digits.min(axis=1), digits.max(axis=1)) for digits in _digits(array, width)]
        low, high = np.min([low for low, _ in bounds], axis=0), np.max([high for _, high in bounds], axis=0)
        span = prod(int(size) + 1 for size in high - low)
        return _Texts(low, high, span) if span <= _LARGEST_SPAN else None

    def codes(self, array: Any) -> U64:
        import pyarrow.compute as pc

        lengths = pc.binary_length(array)
        if len(array) and pc.max(lengths).as_py() > len(self.low):
            codes = np.full(len(array), self.span, np.uint64)
            fits = pc.less_equal(lengths, len(self.low))
            codes[fits.to_numpy(zero_copy_only=False)] = self.codes(array.filter(fits))
            return codes
        codes = np.empty(len(array), np.uint64)
        begin = 0
        for digits in _digits(array, len(self.low)):
            part = codes[begin : begin + digits.shape[1]]
            part[:] = 0
            for place in np.flatnonzero(self.high - self.low):
                part *= np.uint64(self.high[place] - self.low[place]) + np.uint64(1)
                part += digits[place] - self.low[place]
            if (digits.min(axis=1) < self.low).any() or (digits.max(axis=1) > self.high).any():
                part[((digits < self.low[:, None]) | (digits > self.high[:, None])).any(axis=0)] = self.span
            begin += len(part)
        return codes


def _digits(array: Any, width: int) -> Iterator[_Digits]:
    """Yield the digits of ``_SLICE`` texts at a time, of at most ``width`` bytes each: an array for each place."""
    import pyarrow as pa

    whole = array.cast(pa.large_string())
    column = whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole
    _, offsets, data = column.buffers()
    edges = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    for begin in range(0, len(column), _SLICE):
        part = edges[begin : begin + _SLICE + 1]
        lengths, digits = np.diff(part), content[part[0] : part[-1]] + np.uint8(1)  # no text has a byte of 255
        if len(digits) < len(lengths) * width:
            found = np.zeros((len(lengths), width), np.uint8)
            found[np.arange(width) < lengths[:, None]] = digits
        else:
            found = digits.reshape(len(lengths), width)
        yield np.ascontiguousarray(found.T)
