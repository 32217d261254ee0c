"""Where values are among many distinct ones: made once, asked for every block, by whole columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order import I64
from penstock.order.hashing import scramble

_ABSENT = -1
_WORD = 8  # bytes of text that are hashed at a time
U64 = npt.NDArray[np.uint64]


class Index:
    """The places of distinct values of an Arrow column of numbers, moments, text or bytes.

    Values are looked for by their hashes, which are in order: the upper bits of one tell about where it stands. Nothing
    (null) has a place too, and so has NaN.
    """

    def __init__(self, found: Any) -> None:
        self._found = found
        valid = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
        missing = np.setdiff1d(np.arange(len(found)), valid)
        self._missing = int(missing[0]) if len(missing) else _ABSENT
        hashes = hashes_of(found)[valid]
        order = np.argsort(hashes)
        self._places, self._hashes = valid[order], hashes[order]
        # two texts of one hash: as good as never
        self._ambiguous = bool((self._hashes[1:] == self._hashes[:-1]).any())
        bits = max(1, len(valid).bit_length())
        self._shift = np.uint64(64 - bits)
        edges = np.searchsorted(self._hashes, np.arange(1 << bits, dtype=np.uint64) << self._shift)
        self._edges = np.append(edges, len(valid))  # where hashes of these upper bits begin

    def __len__(self) -> int:
        return len(self._found)

    def numbers(self, array: Any) -> I64:
        """The place of each value; -1 where it is none of them."""
        if self._ambiguous:
            import pyarrow.compute as pc

            return pc.index_in(array, value_set=self._found).fill_null(_ABSENT).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
        found = self._hashed(hashes_of(array))
        if _is_text(array.type):
            found = self._compared(array, found)
        if array.null_count:
            found[array.is_null().to_numpy(zero_copy_only=False)] = self._missing
        return found

    def _hashed(self, hashes: U64) -> I64:
        found = np.full(len(hashes), _ABSENT, np.int64)
        bucket = (hashes >> self._shift).astype(np.int64)
        at, until = self._edges[bucket], self._edges[bucket + 1]
        left = np.flatnonzero(at < until)
        while len(left):
            here = at[left]
            same = self._hashes[here] == hashes[left]
            found[left[same]] = self._places[here[same]]
            left = left[~same & (here + 1 < until[left])]
            at[left] += 1
        return found

    def _compared(self, array: Any, found: I64) -> I64:
        """Without those whose text is another than the one at their place."""
        import pyarrow as pa
        import pyarrow.compute as pc

        there = self._found.take(pa.array(found, mask=found == _ABSENT))
        same = pc.equal(array, there).fill_null(False).to_numpy(zero_copy_only=False)
        return np.where(same, found, _ABSENT)


def hashes_of(array: Any) -> U64:
    """A hash of each value of an Arrow array: equal values have the same; of numbers others have another."""
    return _hashes_of_text(array) if _is_text(array.type) else scramble(_bits(array))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    return bool(text or types.is_binary(kind) or types.is_large_binary(kind))


def _bits(array: Any) -> U64:
    """Numbers, moments and truth as 64 bits."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_floating(kind):
        values = array.cast(pa.float64()).fill_null(0).to_numpy() + 0.0  # -0.0 is equal to 0.0
        values[np.isnan(values)] = np.nan  # all of the same bits
        return values.view(np.uint64)  # type: ignore[no-any-return]
    if not pa.types.is_integer(kind):
        array = array.cast(pa.int32() if pa.types.is_date32(kind) or pa.types.is_boolean(kind) else pa.int64())
    return array.fill_null(0).to_numpy().astype(np.uint64)  # type: ignore[no-any-return]


def _hashes_of_text(array: Any) -> U64:
    """Word by word, for all texts at once."""
    import pyarrow as pa

    if not len(array):
        return np.zeros(0, np.uint64)
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, edges, data = array.buffers()
    edge = np.frombuffer(edges, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    low, high = int(edge[0]), int(edge[-1])
    text = np.zeros(high - low + _WORD, np.uint8)  # with zeros behind, so that a word may begin at the last byte
    text[: high - low] = np.frombuffer(data, np.uint8, high - low, low) if high > low else 0
    words: U64 = np.ndarray((high - low + 1,), "<u8", text.data, strides=(1,))
    begin, length = edge[:-1].astype(np.int64) - low, np.diff(edge).astype(np.int64)
    total = scramble(length.astype(np.uint64))
    left = np.arange(len(length))
    for at in range(0, int(length.max()), _WORD):
        left = left[length[left] > at]
        spare = np.maximum(_WORD - (length[left] - at), 0).astype(np.uint64) * np.uint64(8)
        word = (words[begin[left] + at] << spare) >> spare  # without what stands behind the text
        total[left] = scramble(total[left] ^ word)
    return total
