"""Looks up columns of integers and text in other columns, by arithmetic on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.order import I64, U64, fold_into
from penstock.relations.key_codes import DENSE, KeyCoder

_FACTOR = 0x9E3779B97F4A7C15  # of the hash of a text: odd, so that multiplying by it loses nothing
_SLICE = 1 << 20  # bytes of text that are hashed at once


def comparable(array: Any) -> Any:
    """Return an Arrow array as 64-bit integers or large text; ``None`` for other types, and for missing values."""
    import pyarrow as pa

    kind = array.type
    if array.null_count or pa.types.is_uint64(kind):
        return None
    if pa.types.is_integer(kind):
        return array.cast(pa.int64())
    return array.cast(pa.large_string()) if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None


class HashedRows:
    """Rows sorted by the hash of their values, which finds the rows that equal others.

    Rows of one hash are adjacent. Their values are compared, unless different values cannot have the same hash: that
    of keys which lie close together is their code.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        """Sort the rows of columns that ``comparable`` returned."""
        self._columns = columns
        self.types = [column.type for column in columns]
        coder = KeyCoder.of(columns)
        self._coder = coder if coder is not None and coder.span <= DENSE * len(columns[0]) else None
        hashes = self._hashes(columns)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        bits = max(1, len(hashes)).bit_length() + 1
        self._shift = np.uint64(0 if self._coder else 64 - bits)
        buckets = (self._sorted >> self._shift).astype(np.int64)
        sizes = np.bincount(buckets, minlength=self._coder.span + 1 if self._coder else 1 << bits)
        self._buckets = np.concatenate([[0], np.cumsum(sizes)])  # where the hashes begin that start with some bits
        begins = np.flatnonzero(np.concatenate([self._sorted[:1] == self._sorted[:1], np.diff(self._sorted) != 0]))
        ends = np.append(begins, len(hashes))[1:]
        self._next = np.repeat(ends, ends - begins)  # for each row, the first one with another hash

    def pairs(self, columns: Sequence[Any]) -> tuple[I64, I64]:
        """Return the numbers of rows of ``columns``, ascending, each with a row here that equals it."""
        hashes = self._hashes(columns)
        bucket = (hashes >> self._shift).astype(np.int64)
        at, end = self._buckets[bucket], self._buckets[bucket + 1]
        found = np.flatnonzero(at < end)
        if not self._coder:  # a bucket may have rows of several hashes
            active = found
            while len(active := active[self._sorted[at[active]] < hashes[active]]):
                at[active] = self._next[at[active]]
                active = active[at[active] < end[active]]
            found = found[at[found] < end[found]]
            found = found[self._sorted[at[found]] == hashes[found]]
        begin = at[found]
        counts = self._next[begin] - begin
        if len(counts) and int(counts.max()) > 1:
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            found, begin = np.repeat(found, counts), np.repeat(begin, counts) + within
        return self._equal(columns, found, self._order[begin])

    def _hashes(self, columns: Sequence[Any]) -> U64:
        return self._coder.codes(columns) if self._coder else _hashes(columns)

    def _equal(self, columns: Sequence[Any], left: I64, right: I64) -> tuple[I64, I64]:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._coder or (
            len(columns) == 1 and pa.types.is_integer(columns[0].type)
        ):  # different hashes if they differ
            return left, right
        same = np.ones(len(left), bool)
        each = np.array_equal(left, np.arange(len(columns[0])))
        for mine, theirs in zip(columns, self._columns, strict=True):
            chosen = mine if each else mine.take(pa.array(left))
            same &= pc.equal(chosen, theirs.take(pa.array(right))).to_numpy(zero_copy_only=False)
        return (left, right) if same.all() else (left[same], right[same])


def _hashes(columns: Sequence[Any]) -> U64:
    import pyarrow as pa

    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        words = column.to_numpy().view(np.uint64) if pa.types.is_integer(column.type) else _text_hashes(column)
        hashes = fold_into(hashes, words)
    return hashes


def _text_hashes(column: Any) -> U64:
    """Return a polynomial of the bytes of each text; a text gets the same value wherever it lies in the column."""
    _, offsets, data = column.buffers()
    edges = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    hashes, first = np.zeros(len(column), np.uint64), 0
    while first < len(column):
        until = max(first + 1, int(np.searchsorted(edges, edges[first] + _SLICE, "right")) - 1)
        part = edges[first : until + 1] - edges[first]
        powers = _powers(max(_SLICE, 1 << int(part[-1]).bit_length()))
        terms = (content[edges[first] : edges[until]].astype(np.uint64) + np.uint64(1)) * powers[: part[-1]]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        hashes[first:until] = (sums[part[1:]] - sums[part[:-1]]) * powers[_SLICE - part[:-1]]
        first = until
    return hashes


@cache
def _powers(count: int) -> U64:
    """Return the powers of the factor from 0 to ``count``, modulo 2**64."""
    factors = np.full(count + 1, _FACTOR, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
