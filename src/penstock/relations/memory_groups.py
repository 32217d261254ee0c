"""Groups of rows in memory, by the numbers of their keys: counted and added by numpy, faster than by a hash table.

The results are those of the queries of ``aggregates``, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.lazy import cached_property
from penstock.order import I64
from penstock.relations.aggregates import SQUARE_BITS, magnitude_bands
from penstock.relations.database import StagedTable
from penstock.relations.key_codes import DENSE, KeyCodes, integers_of, key_codes, sorted_rows

_Floats = npt.NDArray[np.float64]
_SAMPLED, _LEAST_DISTINCT = 1024, 256  # with fewer distinct codes among the sampled rows, a hash table is faster
_SLICE = 1 << 16  # rows that are added at a time, in arrays that fit into the cache
_SCALED_BITS = 94  # of a scaled number and its sign


class MemoryGroups:
    """The rows of a table by groups, which are numbered in the order of their keys.

    Attributes:
        counts: How many rows each group has.
        edges: Where each group begins in ``order``, and the number of rows.
    """

    def __init__(self, table: StagedTable, columns: Sequence[str], codes: KeyCodes) -> None:
        self._table, self._columns, self._codes = table, columns, codes
        if codes.span <= DENSE * len(codes.values):
            at = codes.values.view(np.int64)
            counts = np.bincount(at, minlength=codes.span)
            self._number = (np.cumsum(counts > 0) - 1)[at]  # of each row's group
            self.counts = counts[counts > 0]
        else:
            ordered = codes.values[self.order]
            begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
            self.counts = np.diff(begins, append=len(ordered))
            self._number = np.empty(len(ordered), np.int64)
            self._number[self.order] = np.repeat(np.arange(len(begins)), self.counts)
        self.edges = np.concatenate([[0], np.cumsum(self.counts)])

    @staticmethod
    def of(table: StagedTable, columns: Sequence[str]) -> MemoryGroups | None:
        """Group the rows by columns; ``None`` if DuckDB is to group them."""
        codes = key_codes(table, columns)
        if codes is None:
            return None
        sampled = codes.values[:: max(1, len(codes.values) // _SAMPLED)]
        if codes.span > DENSE * len(codes.values) and len(np.unique(sampled)) < _LEAST_DISTINCT:
            return None
        return MemoryGroups(table, columns, codes)

    @cached_property
    def order(self) -> I64:
        """The numbers of the rows, sorted by group; the rows of a group keep their order."""
        return sorted_rows(self._codes)

    @cached_property
    def firsts(self) -> I64:
        """The number of the first row of each group."""
        firsts = np.empty(len(self.counts), np.int64)
        firsts[self._number[::-1]] = np.arange(len(self._number))[::-1]  # the last assignment holds
        return firsts

    def aggregated(self, how: str, columns: Sequence[str], frequent_first: bool) -> Any:
        """Return the table of the query that ``aggregated`` of ``aggregates`` returns, sorted by the key.

        ``None`` if a column has missing values, other values than numbers, or numbers too large or too far apart.
        """
        import pyarrow as pa

        with np.errstate(over="ignore", invalid="ignore"):  # results beyond the range of a float are infinite
            results = [self.counts] if how == "count" else [self._aggregate(how, column) for column in columns]
        if any(result is None for result in results):
            return None
        firsts = pa.array(self.firsts)
        keys = {name: self._table.rows.column(name).combine_chunks().take(firsts) for name in self._columns}
        found = pa.table(keys | {f"r{number}": pa.array(result) for number, result in enumerate(results)})
        if not frequent_first:
            return found
        most = int(self.counts.max())
        return found.take(pa.array(sorted_rows(KeyCodes((most - self.counts).astype(np.uint64), most + 1))))

    def _aggregate(self, how: str, column: str) -> Any:
        import pyarrow as pa

        array = self._table.rows.column(column)
        values: npt.NDArray[Any] | None = integers_of(array)
        if values is None:
            if array.type not in (pa.float32(), pa.float64()) or array.null_count:
                return None
            values = array.to_numpy()
        if how in ("min", "max"):
            return self._extremes(np.fmin if how == "min" else np.fmax, values)
        totals = self._totals(values)
        if totals is None or how == "sum":
            return totals
        means = totals.astype(np.float64) / self.counts
        return means if how == "mean" else self._deviations(values.astype(np.float64, copy=False), means)

    def _extremes(self, pick: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = values[self.firsts]
        pick.at(found, self._number, values)
        return found

    def _totals(self, values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        largest = max(-float(values.min()), float(values.max()))
        if values.dtype == np.int64:  # with results below 2**53, which a float holds
            if largest * int(self.counts.max()) >= 1 << 53:
                return None
            sums = np.zeros(len(self.counts), np.int64)
            np.add.at(sums, self._number, values)
            return sums
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
        bits = 62 - int(self.counts.max()).bit_length()  # of a limb: the sum of a group's limbs fits into 63 bits
        sums = np.zeros((-(-_SCALED_BITS // bits), len(self.counts)), np.int64)
        for begin in range(0, len(values), _SLICE):
            rest, number = values[begin : begin + _SLICE], self._number[begin : begin + _SLICE]
            if centre is not None and scale is not None:
                rest = rest - centre[number]
                rest /= scale[number]
                rest *= rest
            rest = rest * math.ldexp(1.0, half)
            rest *= math.ldexp(1.0, exponent - half)
            np.rint(rest, out=rest)
            limb = np.empty_like(rest)
            for place in range(len(sums) - 1, 0, -1):
                np.trunc(np.multiply(rest, math.ldexp(1.0, -place * bits), out=limb), out=limb)
                np.add.at(sums[place], number, limb.astype(np.int64))
                rest -= np.multiply(limb, math.ldexp(1.0, place * bits), out=limb)
            np.add.at(sums[0], number, rest.astype(np.int64))
        return np.ldexp(_rounded(sums, bits), -exponent)

    def _deviations(self, values: _Floats, means: _Floats) -> _Floats | None:
        lowest, highest = (self._extremes(pick, values) for pick in (np.minimum, np.maximum))
        spread = np.maximum(highest - means, means - lowest)
        if not np.isfinite(spread).all():
            return None
        divisors = np.where(spread > 0, spread, 1.0)
        squares = self._scaled_totals(values, SQUARE_BITS, means, divisors)
        alone = self.counts == 1
        deviations = np.sqrt(squares / np.where(alone, 1, self.counts - 1)) * spread
        return np.where(alone, math.nan, deviations)


def _rounded(sums: I64, bits: int) -> _Floats:
    """Return sums of limbs, the lowest ones first, as DuckDB rounds integers of 128 bits: the words one by one."""
    high, low = np.zeros_like(sums[0]), np.zeros_like(sums[0]).view(np.uint64)
    for limbs in sums[::-1]:
        high = (high << bits) | (low >> np.uint64(64 - bits)).view(np.int64)
        low <<= np.uint64(bits)
        low += limbs.view(np.uint64)
        high += (limbs >> 63) + (low < limbs.view(np.uint64))
    negative = -(~low).astype(np.float64) - 1.0
    rounded: _Floats = low.astype(np.float64) + high * 2.0**64
    return np.where(high == -1, negative, rounded)
