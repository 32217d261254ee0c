"""Keys as numbers: one integer for each row, which sorts as the row's values of some columns do.

Integers are counted from the lowest. A text is a number with a digit for each of its bytes, in the base of how many
bytes occur at that place: numbered names such as ``"key 000123"`` become small numbers. The numbers of several columns
are digits of one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order import I64, U64
from penstock.relations.database import StagedTable

_LARGEST_SPAN = (1 << 64) - 1  # which a 64-bit integer holds, too
_LONGEST = 64  # bytes of a text
_TRIED = 1024  # texts that tell quickly whether all are too different for 64 bits
_SLICE = 1 << 14  # texts that are converted at a time, in arrays that fit into the cache
_DIGIT_BITS = 16  # which numpy's stable sort counts instead of comparing


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
    if table.rows is None or not table.rows.num_rows:
        return None
    found: KeyCodes | None = None
    for number, name in enumerate(columns):
        codes = _column_codes(table.rows.column(name))
        if codes is None or codes.span * (found.span if found else 1) > _LARGEST_SPAN:
            return None
        if descending and descending[number]:
            codes = KeyCodes(np.uint64(codes.span - 1) - codes.values, codes.span)
        if found is not None:
            codes = KeyCodes(found.values * np.uint64(codes.span) + codes.values, found.span * codes.span)
        found = codes
    return found


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


def _column_codes(array: Any) -> KeyCodes | None:
    import pyarrow as pa

    if (values := integers_of(array)) is not None:
        low, high = values.min(), values.max()
        return KeyCodes((values - low).view(np.uint64), int(high) - int(low) + 1)
    if array.null_count or not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        return None
    return None if _text_codes(array.slice(0, _TRIED)) is None else _text_codes(array)


def _text_codes(array: Any) -> KeyCodes | None:
    texts = _Texts(array)
    if texts.longest > _LONGEST:
        return None
    parts = range(0, len(array), _SLICE)
    bounds = [(part.min(axis=1), part.max(axis=1)) for part in map(texts.digits, parts)]
    low, high = np.min([low for low, _ in bounds], axis=0), np.max([high for _, high in bounds], axis=0)
    sizes = [int(size) + 1 for size in high - low]
    span = 1
    for size in sizes:
        span *= size
    if span > _LARGEST_SPAN:
        return None
    codes = np.zeros(len(array), np.uint64)
    for begin in parts:
        digits, part = texts.digits(begin), codes[begin : begin + _SLICE]
        for place in np.flatnonzero(high - low):
            part *= np.uint64(sizes[place])
            part += digits[place] - low[place]
    return KeyCodes(codes, span)


class _Texts:
    """Texts as digits: their bytes, each one higher, and zeros after the end."""

    def __init__(self, array: Any) -> None:
        import pyarrow as pa

        whole = array.cast(pa.large_string())
        column = whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole
        _, offsets, data = column.buffers()
        self._edges = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        self._content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        self._lengths = np.diff(self._edges)
        self.longest = int(self._lengths.max())
        self._equal = int(self._lengths.min()) == self.longest

    def digits(self, begin: int) -> npt.NDArray[np.uint8]:
        """Return an array for each place: the digits there of ``_SLICE`` texts, from one of them on."""
        lengths = self._lengths[begin : begin + _SLICE]
        edges = self._edges[begin : begin + len(lengths) + 1]
        content = self._content[edges[0] : edges[-1]]
        if self._equal:  # no end is seen, and the bytes serve as they are
            return np.ascontiguousarray(content.reshape(len(lengths), self.longest).T)
        digits = np.zeros((len(lengths), self.longest), np.uint8)
        digits[np.arange(self.longest) < lengths[:, None]] = content + np.uint8(1)  # no text has a byte of 255
        return np.ascontiguousarray(digits.T)
