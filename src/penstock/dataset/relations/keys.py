"""Values of fields by number: the same value has the same number, and new ones get the next, as they come."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.dataset.relations.key_index import Index
from penstock.dataset.relations.key_values import column, hashable, values_at
from penstock.formats.tables.values import values_of
from penstock.order import I64

UNKNOWN = -1
_SLOT = 120  # bytes a value takes in a dict, beside itself


class Keys(Protocol):
    """The values seen so far."""

    @property
    def nbytes(self) -> int:
        """About how many bytes they take."""

    def __len__(self) -> int: ...

    def numbers(self, columns: Sequence[Any], grow: bool) -> I64:
        """The numbers of the values of some samples, by field; of new ones too, or ``UNKNOWN`` if not ``grow``."""

    def hashes(self, columns: Sequence[Any], salt: int) -> I64:
        """A number for each sample that is the same for the same values; from 0."""

    def values(self) -> list[Any]:
        """The values by field, in the order of their numbers: Arrow arrays or lists."""


class Numbering:
    """Numbers the values of some fields of samples: by columns as long as all of them are of one type each."""

    def __init__(self, fields: Sequence[str], verb: str) -> None:
        self.fields, self._verb = tuple(fields), verb
        self.keys: Keys | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else len(self.keys)

    @property
    def nbytes(self) -> int:
        """About how many bytes the values take."""
        return 0 if self.keys is None else self.keys.nbytes

    def of(self, items: Sequence[Any], grow: bool = True) -> I64:
        """The number of each sample's values."""
        columns, keys = self._columns(items)
        return keys.numbers(columns, grow)

    def hashes(self, items: Sequence[Any], salt: int) -> I64:
        """A number for each sample that is the same for the same values."""
        columns, keys = self._columns(items)
        return keys.hashes(columns, salt)

    def _columns(self, items: Sequence[Any]) -> tuple[list[Any], Keys]:
        columns = [column(items, field, self._verb) for field in self.fields]
        kinds = [None if array is None else array.type for array in columns]
        simple = all(kind is not None for kind in kinds)
        if self.keys is None:
            self.keys = ColumnKeys(kinds) if simple else PlainKeys(len(self.fields))
        if isinstance(self.keys, ColumnKeys):
            if kinds == self.keys.kinds:
                return columns, self.keys
            self.keys = PlainKeys.taken_over(self.keys)
        return [values_at(items, field, self._verb) for field in self.fields], self.keys

    def values(self) -> list[Any]:
        """The values by field, in the order of their numbers: Arrow arrays or lists."""
        return [] if self.keys is None else self.keys.values()


class _One:
    """The distinct values of one Arrow column."""

    def __init__(self) -> None:
        self.found: Any = None
        self._index: Index | None = None  # of what was found when it was made

    def __len__(self) -> int:
        return 0 if self.found is None else len(self.found)

    def numbers(self, array: Any, grow: bool) -> I64:
        if not grow:
            return self._looked_up(array)
        codes, own = encoded(array)
        if self.found is None:
            self.found = own
            return codes
        return self._numbered(own)[codes]

    def _numbered(self, own: Any) -> I64:
        """The numbers of distinct values, with the next ones for those that are new."""
        import pyarrow as pa
        import pyarrow.compute as pc

        known = pc.index_in(own, value_set=self.found).fill_null(UNKNOWN).to_numpy().astype(np.int64)
        new = np.flatnonzero(known == UNKNOWN)
        if len(new):
            known[new] = len(self.found) + np.arange(len(new))
            self.found = pa.concat_arrays([self.found, own.take(pa.array(new))])
        return known  # type: ignore[no-any-return]

    def _looked_up(self, array: Any) -> I64:
        return np.full(len(array), UNKNOWN, np.int64) if self.found is None else self.index().numbers(array)

    def index(self) -> Index:
        """Where the values are that were found up to now."""
        if self._index is None or len(self._index) != len(self.found):
            self._index = Index(self.found)
        return self._index


def encoded(array: Any) -> tuple[I64, Any]:
    """The distinct values of an array as they first come, and for each place which it is."""
    made = _same_zero(array).dictionary_encode(null_encoding="encode")
    return made.indices.to_numpy().astype(np.int64), made.dictionary


def _same_zero(array: Any) -> Any:
    """Without -0.0, which is equal to 0.0 and has other bits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.add(array, pa.scalar(0.0, array.type)) if pa.types.is_floating(array.type) else array


class ColumnKeys:
    """Values that are Arrow columns: several fields are numbered each, then the pairs of their numbers."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self.kinds = list(kinds)
        self._ones = [_One() for _ in kinds]
        self._pairs = [_One() for _ in kinds[1:]]

    def __len__(self) -> int:
        return len((self._pairs or self._ones)[-1])

    @property
    def nbytes(self) -> int:
        return sum(2 * one.found.nbytes for one in self._ones + self._pairs if one.found is not None)

    def numbers(self, columns: Sequence[Any], grow: bool) -> I64:
        import pyarrow as pa

        found = self._ones[0].numbers(columns[0], grow)
        for one, pair, array in zip(self._ones[1:], self._pairs, columns[1:], strict=True):
            other = one.numbers(array, grow)
            lost = (found < 0) | (other < 0)
            found = pair.numbers(pa.array((found << 32) | (other & 0xFFFFFFFF)), grow)
            found = np.where(lost, UNKNOWN, found)
        return found

    def settle(self) -> None:
        """No values will be added: they can be asked for from several threads."""
        for one in self._ones + self._pairs:
            if one.found is not None:
                one.index()

    def hashes(self, columns: Sequence[Any], salt: int) -> I64:
        each = []
        for array in columns:
            codes, own = encoded(array)
            each.append(_hashes(values_of(own), salt)[codes])
        return _folded(each)

    def values(self) -> list[Any]:
        import pyarrow as pa

        numbers = np.arange(len(self))
        out: list[Any] = []
        for one, pair in zip(reversed(self._ones[1:]), reversed(self._pairs), strict=True):
            packed = pair.found.to_numpy()[numbers]
            out.append(one.found.take(pa.array(packed & 0xFFFFFFFF)))
            numbers = packed >> 32
        first = self._ones[0].found
        return [first.take(pa.array(numbers)) if self._pairs else first, *reversed(out)]


def _hashes(values: Sequence[Any], salt: int) -> I64:
    """Python's, so that a value of a column has that of the same value elsewhere; NaN is equal to itself here."""
    plain = (hashable(value) for value in values)
    each = (hash((salt, "nan" if one is math.nan else one)) & 0xFFFFFFFFFFFF for one in plain)
    return np.fromiter(each, np.int64, len(values))


def _folded(hashes: Sequence[I64]) -> I64:
    """One number of those of several fields."""
    total = np.zeros(len(hashes[0]), np.int64)
    for own in hashes:
        total = total * 31 + own
    return total & 0x7FFFFFFF


class PlainKeys:
    """Values of any kind, in a dict."""

    def __init__(self, fields: int) -> None:
        self._found: dict[Hashable, int] = {}
        self._values: list[list[Any]] = [[] for _ in range(fields)]

    @classmethod
    def taken_over(cls, keys: ColumnKeys) -> PlainKeys:
        """The same values under the same numbers."""
        own = cls(len(keys.kinds))
        if len(keys):
            own.numbers([values_of(array) for array in keys.values()], True)
        return own

    def __len__(self) -> int:
        return len(self._found)

    @property
    def nbytes(self) -> int:
        some = [str(value) for values in self._values for value in values[:: max(1, len(values) // 16)]]
        each = sum(map(len, some)) / max(1, len(some)) + _SLOT
        return int(each * len(self._found) * len(self._values))

    def numbers(self, columns: Sequence[Any], grow: bool) -> I64:
        found, out = self._found, []
        for row in zip(*columns, strict=True):
            key = tuple(map(hashable, row))
            number = found.get(key, UNKNOWN)
            if number == UNKNOWN and grow:
                number = found[key] = len(found)
                for values, value in zip(self._values, row, strict=True):
                    values.append(value)
            out.append(number)
        return np.array(out, np.int64)

    def hashes(self, columns: Sequence[Any], salt: int) -> I64:
        return _folded([_hashes(values, salt) for values in columns])

    def values(self) -> list[Any]:
        return list(self._values)
