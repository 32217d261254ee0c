"""Groups of one column of integers, in memory: sorted once and aggregated by numpy, faster than by a hash table.

The results are those of the queries of ``aggregates``, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order import I64
from penstock.relations.aggregates import SQUARE_BITS, magnitude_bands
from penstock.relations.database import StagedTable

_Floats = npt.NDArray[np.float64]
_NARROW = 1 << 16  # a range of integers that numpy sorts digit by digit
_SAMPLED, _LEAST_DISTINCT = 1024, 256  # with fewer distinct values among the sampled rows, a hash table is faster
_SLICE = 1 << 16  # rows that are added at a time, in arrays that fit into the cache
_LIMB_BITS = 31  # three limbs hold an integer of 93 bits; the sum of 2**32 of them fits into 63 bits


def sorted_integers(table: StagedTable, column: str, descending: bool = False) -> tuple[I64, I64] | None:
    """Return the numbers of the rows, sorted by a column, and the sorted values; ``None`` if they are not integers.

    Equal rows keep their order. Rows that are not in memory, missing values and unsigned 64-bit integers are left to
    DuckDB. Of a descending sort the values are inverted bit by bit.
    """
    keys = _integers(table, column)
    return None if keys is None else _sorted(~keys if descending else keys)


def _integers(table: StagedTable, column: str) -> I64 | None:
    import pyarrow as pa

    if table.rows is None:
        return None
    array = table.rows.column(column)
    if not pa.types.is_integer(array.type) or pa.types.is_uint64(array.type) or array.null_count or not len(array):
        return None
    return array.to_numpy().astype(np.int64, copy=False)  # type: ignore[no-any-return]


def _sorted(keys: I64) -> tuple[I64, I64]:
    """Sort integers together with their positions, as single integers if both fit into 63 bits."""
    low, high, bits = int(keys.min()), int(keys.max()), len(keys).bit_length()
    narrow = high - low < _NARROW
    if narrow or (high - low) >> (63 - bits):
        order = np.argsort((keys - low).astype(np.uint16) if narrow else keys, kind="stable")
        return order, keys[order]
    packed = keys - low
    packed <<= bits  # in place, as elsewhere: a new array costs more than the arithmetic
    packed |= np.arange(len(keys))
    packed.sort()
    order = packed & ((1 << bits) - 1)
    packed >>= bits
    packed += low
    return order, packed


class IntegerGroups:
    """The rows of a table, sorted by a column of integers."""

    def __init__(self, table: StagedTable, column: str, order: I64, keys: I64) -> None:
        self.order = order
        self._table, self._column, self._keys = table, column, keys
        self._begins = np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
        self.edges = np.append(self._begins, len(keys))
        self._counts = np.diff(self.edges)

    @staticmethod
    def of(table: StagedTable, columns: Sequence[str]) -> IntegerGroups | None:
        """Sort the rows; ``None`` if DuckDB is to group them."""
        keys = _integers(table, columns[0]) if len(columns) == 1 else None
        if keys is None:
            return None
        sampled = keys[:: max(1, len(keys) // _SAMPLED)]
        if int(keys.max()) - int(keys.min()) >= _NARROW and len(np.unique(sampled)) < _LEAST_DISTINCT:
            return None
        return IntegerGroups(table, columns[0], *_sorted(keys))

    def aggregated(self, how: str, columns: Sequence[str], frequent_first: bool) -> Any:
        """Return the table of the query that ``aggregated`` of ``aggregates`` returns, sorted by the key.

        ``None`` if a column has missing values, other values than numbers, or numbers too large or too far apart.
        """
        import pyarrow as pa

        results = [self._counts] if how == "count" else [self._aggregate(how, column) for column in columns]
        if any(result is None for result in results):
            return None
        order = _sorted(~self._counts)[0] if frequent_first else slice(None)
        named = {self._column: self._keys[self._begins], **{f"r{n}": result for n, result in enumerate(results)}}
        return pa.table({name: pa.array(values[order]) for name, values in named.items()})

    def _aggregate(self, how: str, column: str) -> Any:
        import pyarrow as pa

        values = _integers(self._table, column)
        if values is None:
            array = self._table.rows.column(column)
            if array.type not in (pa.float32(), pa.float64()) or array.null_count:
                return None
            values = array.to_numpy()
        values = values[self.order]
        if how in ("min", "max"):
            return (np.fmin if how == "min" else np.fmax).reduceat(values, self._begins)
        totals = self._totals(values)
        if totals is None or how == "sum":
            return totals
        means = totals.astype(np.float64) / self._counts
        return means if how == "mean" else self._deviations(values.astype(np.float64, copy=False), means)

    def _totals(self, values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        largest = max(-float(values.min()), float(values.max()))
        if values.dtype == np.int64:  # with results below 2**53, which a float holds
            within = largest * int(self._counts.max()) < 1 << 53
            return np.add.reduceat(values, self._begins) if within else None
        if not math.isfinite(largest):
            return None
        values = values.astype(np.float64, copy=False)
        sizes = np.abs(values)
        found = magnitude_bands(float(np.min(sizes, where=sizes > 0, initial=math.inf)), largest or 1.0)
        return self._scaled_totals(values, found[0][2]) if len(found) == 1 else None

    def _scaled_totals(
        self, values: _Floats, exponent: int, centre: _Floats | None = None, scale: _Floats | None = None
    ) -> _Floats:
        """Return the sums of the values times ``2**exponent``, rounded to integers, divided by it again.

        With ``centre`` and ``scale`` of each group, the squares of the scaled differences to the centre are added.
        """
        half = exponent // 2  # a power of two may be beyond the range of a float
        sums = np.zeros((3, len(self._begins)), np.int64)
        for begin in range(0, len(values), _SLICE):
            rest = values[begin : begin + _SLICE]
            end = begin + len(rest)
            first, until = np.searchsorted(self.edges, begin, "right") - 1, np.searchsorted(self.edges, end)
            bounds = np.clip(self.edges[first : until + 1], begin, end) - begin
            if centre is not None and scale is not None:
                counts = np.diff(bounds)
                rest = rest - np.repeat(centre[first:until], counts)
                rest /= np.repeat(scale[first:until], counts)
                rest *= rest
            rest = rest * math.ldexp(1.0, half)
            rest *= math.ldexp(1.0, exponent - half)
            np.rint(rest, out=rest)
            limb = np.empty_like(rest)
            for total, bits in zip(sums, (2 * _LIMB_BITS, _LIMB_BITS, 0), strict=True):
                np.floor(np.multiply(rest, math.ldexp(1.0, -bits), out=limb), out=limb)
                total[first:until] += np.add.reduceat(limb.astype(np.int64), bounds[:-1])
                rest -= np.multiply(limb, math.ldexp(1.0, bits), out=limb)
        high, middle, low = sums
        middle += low >> _LIMB_BITS
        high += middle >> _LIMB_BITS
        mask = (1 << _LIMB_BITS) - 1
        words = (high << 2 * _LIMB_BITS) | ((middle & mask) << _LIMB_BITS) | (low & mask)
        high >>= 64 - 2 * _LIMB_BITS
        # As DuckDB rounds a 128-bit integer: the words one by one.
        rounded = words.view(np.uint64).astype(np.float64) + high * 2.0**64
        negative = -(~words).view(np.uint64).astype(np.float64) - 1.0
        return np.ldexp(np.where(high == -1, negative, rounded), -exponent)

    def _deviations(self, values: _Floats, means: _Floats) -> _Floats | None:
        lowest, highest = (pick.reduceat(values, self._begins) for pick in (np.minimum, np.maximum))
        spread = np.maximum(highest - means, means - lowest)
        if not np.isfinite(spread).all():
            return None
        divisors = np.where(spread > 0, spread, 1.0)
        squares = self._scaled_totals(values, SQUARE_BITS, means, divisors)
        alone = self._counts == 1
        deviations = np.sqrt(squares / np.where(alone, 1, self._counts - 1)) * spread
        return np.where(alone, math.nan, deviations)
