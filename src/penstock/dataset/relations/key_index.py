"""Look up columns in a large set of distinct values, for joins and numbering."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order import I64
from penstock.order.hashing import scramble

_ABSENT = -1
_WORD = 8  # bytes of text that are hashed in one step
U64 = npt.NDArray[np.uint64]


class KeyIndex:
    """Finds the positions of distinct values of an Arrow column of numbers, times, text or bytes.

    The index is a sorted list of hashes; the upper bits of a hash give the bucket to search. Null and NaN have
    positions too. Safe to use from several threads.
    """

    def __init__(self, found: Any) -> None:
        self._found = found
        valid = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
        missing = np.setdiff1d(np.arange(len(found)), valid)
        self._missing = int(missing[0]) if len(missing) else _ABSENT
        hashes = hashes_of(found)[valid]
        order = np.argsort(hashes)
        self._positions, self._hashes = valid[order], hashes[order]
        # Two texts with the same hash practically never occur; then Arrow looks up the values.
        self._ambiguous = bool((self._hashes[1:] == self._hashes[:-1]).any())
        bits = max(1, len(valid).bit_length())
        self._shift = np.uint64(64 - bits)
        edges = np.searchsorted(self._hashes, np.arange(1 << bits, dtype=np.uint64) << self._shift)
        self._edges = np.append(edges, len(valid))  # where the bucket of each value of the upper bits begins

    def __len__(self) -> int:
        return len(self._found)

    def numbers(self, array: Any) -> I64:
        """Return the position of each value; -1 for values that are not in the index."""
        if self._ambiguous:
            import pyarrow.compute as pc

            return pc.index_in(array, value_set=self._found).fill_null(_ABSENT).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
        found = self._find_hashes(hashes_of(array))
        if _is_text(array.type):
            found = self._verified(array, found)
        if array.null_count:
            found[array.is_null().to_numpy(zero_copy_only=False)] = self._missing
        return found

    def _find_hashes(self, hashes: U64) -> I64:
        found = np.full(len(hashes), _ABSENT, np.int64)
        bucket = (hashes >> self._shift).astype(np.int64)
        position, end = self._edges[bucket], self._edges[bucket + 1]
        left = np.flatnonzero(position < end)
        while len(left):
            candidate = position[left]
            same = self._hashes[candidate] == hashes[left]
            found[left[same]] = self._positions[candidate[same]]
            left = left[~same & (candidate + 1 < end[left])]
            position[left] += 1
        return found

    def _verified(self, array: Any, found: I64) -> I64:
        """Return the positions, with -1 where the text at a position is a different one with the same hash."""
        import pyarrow as pa
        import pyarrow.compute as pc

        indexed = self._found.take(pa.array(found, mask=found == _ABSENT))
        same = pc.equal(array, indexed).fill_null(False).to_numpy(zero_copy_only=False)
        return np.where(same, found, _ABSENT)


def hashes_of(array: Any) -> U64:
    """Return a hash of each value of an Arrow array; equal values have equal hashes, unequal numbers unequal ones."""
    return _hashes_of_text(array) if _is_text(array.type) else scramble(_bits(array))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    return bool(text or types.is_binary(kind) or types.is_large_binary(kind))


def _bits(array: Any) -> U64:
    """Return numbers, times and booleans as 64-bit words; equal values have equal words."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_floating(kind):
        values = array.cast(pa.float64()).fill_null(0).to_numpy() + 0.0  # -0.0 is equal to 0.0
        values[np.isnan(values)] = np.nan  # one bit pattern for all NaN
        return values.view(np.uint64)  # type: ignore[no-any-return]
    if not pa.types.is_integer(kind):
        array = array.cast(pa.int32() if pa.types.is_date32(kind) or pa.types.is_boolean(kind) else pa.int64())
    return array.fill_null(0).to_numpy().astype(np.uint64)  # type: ignore[no-any-return]


def _hashes_of_text(array: Any) -> U64:
    """Return hashes of text or bytes, computed word by word for all values at once."""
    import pyarrow as pa

    if not len(array):
        return np.zeros(0, np.uint64)
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, edges, data = array.buffers()
    edge = np.frombuffer(edges, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    low, high = int(edge[0]), int(edge[-1])
    text = np.zeros(high - low + _WORD, np.uint8)  # zero padding, so that a word may begin at the last byte
    text[: high - low] = np.frombuffer(data, np.uint8, high - low, low) if high > low else 0
    words: U64 = np.ndarray((high - low + 1,), "<u8", text.data, strides=(1,))
    begin, length = edge[:-1].astype(np.int64) - low, np.diff(edge).astype(np.int64)
    total = scramble(length.astype(np.uint64))
    left = np.arange(len(length))
    for offset in range(0, int(length.max()), _WORD):
        left = left[length[left] > offset]
        spare = np.maximum(_WORD - (length[left] - offset), 0).astype(np.uint64) * np.uint64(8)
        word = (words[begin[left] + offset] << spare) >> spare  # without the bytes of the next text
        total[left] = scramble(total[left] ^ word)
    return total
