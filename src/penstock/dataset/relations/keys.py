"""Number the values of fields, for groups and distinct values: equal values have the same number."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.dataset.relations.key_index import KeyIndex
from penstock.dataset.relations.key_values import arrow_column, hashable, values_at
from penstock.formats.tables.values import values_of
from penstock.order import I64

UNKNOWN_KEY = -1
_SLOT = 120  # bytes of a dict entry, without the value


class Keys(Protocol):
    """The values that have been numbered."""

    @property
    def nbytes(self) -> int:
        """The estimated size in memory."""

    def __len__(self) -> int: ...

    def numbers(self, columns: Sequence[Any], grow: bool) -> I64:
        """Return the number of each sample's values, given by field; a new value gets a number only if ``grow``."""

    def hashes(self, columns: Sequence[Any], salt: int) -> I64:
        """Return a hash of each sample's values, at least 0; equal values have equal hashes, whatever their type."""

    def values(self) -> list[Any]:
        """Return the values by field, in the order of their numbers: Arrow arrays or lists."""


class Numbering:
    """Numbers the values of some fields of samples; works on columns as long as each field has one type."""

    def __init__(self, fields: Sequence[str], verb: str) -> None:
        self.fields, self._verb = tuple(fields), verb
        self.keys: Keys | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else len(self.keys)

    @property
    def nbytes(self) -> int:
        """The estimated size of the values in memory."""
        return 0 if self.keys is None else self.keys.nbytes

    def of(self, items: Sequence[Any], grow: bool = True) -> I64:
        """Return the number of each sample's values; ``UNKNOWN_KEY`` for new values unless ``grow``."""
        columns, keys = self._columns(items)
        return keys.numbers(columns, grow)

    def hashes(self, items: Sequence[Any], salt: int) -> I64:
        """Return a hash of each sample's values; equal values have equal hashes."""
        columns, keys = self._columns(items)
        return keys.hashes(columns, salt)

    def _columns(self, items: Sequence[Any]) -> tuple[list[Any], Keys]:
        columns = [arrow_column(items, field, self._verb) for field in self.fields]
        kinds = [None if array is None else array.type for array in columns]
        simple = all(kind is not None for kind in kinds)
        if self.keys is None:
            self.keys = ColumnKeys(kinds) if simple else PlainKeys(len(self.fields))
        if isinstance(self.keys, ColumnKeys):
            if kinds == self.keys.kinds:
                return columns, self.keys
            self.keys = PlainKeys.from_columns(self.keys)
        return [values_at(items, field, self._verb) for field in self.fields], self.keys

    def values(self) -> list[Any]:
        """Return the values by field, in the order of their numbers: Arrow arrays or lists."""
        return [] if self.keys is None else self.keys.values()


class _DistinctValues:
    """The distinct values of one Arrow column, in the order of their numbers."""

    def __init__(self) -> None:
        self.found: Any = None
        self._index: KeyIndex | None = None  # may lack values that were added after it was built

    def __len__(self) -> int:
        return 0 if self.found is None else len(self.found)

    def numbers(self, array: Any, grow: bool) -> I64:
        if not grow:
            return self._looked_up(array)
        codes, values = dictionary_encoded(array)
        if self.found is None:
            self.found = values
            return codes
        return self._numbered(values)[codes]

    def _numbered(self, values: Any) -> I64:
        """Return the numbers of distinct values; new values get the next numbers."""
        import pyarrow as pa
        import pyarrow.compute as pc

        known = pc.index_in(values, value_set=self.found).fill_null(UNKNOWN_KEY).to_numpy().astype(np.int64)
        new = np.flatnonzero(known == UNKNOWN_KEY)
        if len(new):
            known[new] = len(self.found) + np.arange(len(new))
            self.found = pa.concat_arrays([self.found, values.take(pa.array(new))])
        return known  # type: ignore[no-any-return]

    def _looked_up(self, array: Any) -> I64:
        return np.full(len(array), UNKNOWN_KEY, np.int64) if self.found is None else self.index().numbers(array)

    def index(self) -> KeyIndex:
        """Return an index of all values found so far."""
        if self._index is None or len(self._index) != len(self.found):
            self._index = KeyIndex(self.found)
        return self._index


def dictionary_encoded(array: Any) -> tuple[I64, Any]:
    """Return each value's number among the distinct values, and the distinct values in order of first occurrence."""
    found = _without_negative_zero(array).dictionary_encode(null_encoding="encode")
    return found.indices.to_numpy().astype(np.int64), found.dictionary


def _without_negative_zero(array: Any) -> Any:
    """Replace -0.0 by 0.0, which is equal but has different bits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.add(array, pa.scalar(0.0, array.type)) if pa.types.is_floating(array.type) else array


class ColumnKeys:
    """Values in Arrow columns: the values of each field are numbered, then the pairs of these numbers."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self.kinds = list(kinds)
        self._columns = [_DistinctValues() for _ in kinds]
        self._pairs = [_DistinctValues() for _ in kinds[1:]]

    def __len__(self) -> int:
        return len((self._pairs or self._columns)[-1])

    @property
    def nbytes(self) -> int:
        return sum(2 * values.found.nbytes for values in self._columns + self._pairs if values.found is not None)

    def numbers(self, columns: Sequence[Any], grow: bool) -> I64:
        import pyarrow as pa

        found = self._columns[0].numbers(columns[0], grow)
        for values, pair, array in zip(self._columns[1:], self._pairs, columns[1:], strict=True):
            other = values.numbers(array, grow)
            unknown = (found < 0) | (other < 0)
            found = pair.numbers(pa.array((found << 32) | (other & 0xFFFFFFFF)), grow)
            found = np.where(unknown, UNKNOWN_KEY, found)
        return found

    def freeze(self) -> None:
        """Build the indexes, so that several threads may look up numbers until values are added again."""
        for values in self._columns + self._pairs:
            if values.found is not None:
                values.index()

    def hashes(self, columns: Sequence[Any], salt: int) -> I64:
        hashes = []
        for array in columns:
            codes, values = dictionary_encoded(array)
            hashes.append(_hashes(values_of(values), salt)[codes])
        return _combined_hashes(hashes)

    def values(self) -> list[Any]:
        import pyarrow as pa

        numbers = np.arange(len(self))
        out: list[Any] = []
        for values, pair in zip(reversed(self._columns[1:]), reversed(self._pairs), strict=True):
            packed = pair.found.to_numpy()[numbers]
            out.append(values.found.take(pa.array(packed & 0xFFFFFFFF)))
            numbers = packed >> 32
        first = self._columns[0].found
        return [first.take(pa.array(numbers)) if self._pairs else first, *reversed(out)]


def _hashes(values: Sequence[Any], salt: int) -> I64:
    """Return Python's hashes, so that equal values of different types have equal hashes; all NaN have one hash."""
    keys = (hashable(value) for value in values)
    hashes = (hash((salt, "nan" if key is math.nan else key)) & 0xFFFFFFFFFFFF for key in keys)
    return np.fromiter(hashes, np.int64, len(values))


def _combined_hashes(hashes: Sequence[I64]) -> I64:
    """Combine the hashes of several fields."""
    total = np.zeros(len(hashes[0]), np.int64)
    for field_hashes in hashes:
        total = total * 31 + field_hashes
    return total & 0x7FFFFFFF


class PlainKeys:
    """Values of any type, in a dict."""

    def __init__(self, fields: int) -> None:
        self._found: dict[Hashable, int] = {}
        self._values: list[list[Any]] = [[] for _ in range(fields)]

    @classmethod
    def from_columns(cls, keys: ColumnKeys) -> PlainKeys:
        """Return the same values with the same numbers."""
        plain_keys = cls(len(keys.kinds))
        if len(keys):
            plain_keys.numbers([values_of(array) for array in keys.values()], True)
        return plain_keys

    def __len__(self) -> int:
        return len(self._found)

    @property
    def nbytes(self) -> int:
        sampled = [str(value) for values in self._values for value in values[:: max(1, len(values) // 16)]]
        value_bytes = sum(map(len, sampled)) / max(1, len(sampled)) + _SLOT
        return int(value_bytes * len(self._found) * len(self._values))

    def numbers(self, columns: Sequence[Any], grow: bool) -> I64:
        found, out = self._found, []
        for row in zip(*columns, strict=True):
            key = tuple(map(hashable, row))
            number = found.get(key, UNKNOWN_KEY)
            if number == UNKNOWN_KEY and grow:
                number = found[key] = len(found)
                for values, value in zip(self._values, row, strict=True):
                    values.append(value)
            out.append(number)
        return np.array(out, np.int64)

    def hashes(self, columns: Sequence[Any], salt: int) -> I64:
        return _combined_hashes([_hashes(values, salt) for values in columns])

    def values(self) -> list[Any]:
        return list(self._values)
