"""The values of small fields in an index, so that samples can be found by a label without reading their shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.formats.tar.archive import EncodedSamples

MAX_VALUE_BYTES = 64  # of one value: labels, numbers and short names
_ABSENT = 255  # the length of a value that the sample does not have
_PIECES = 3  # of a member that is written: header, data, padding

Lengths = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class FieldValues:
    """The values of one field, for every sample of a shard that has the field.

    Attributes:
        lengths: The length of each sample's value; 255 if the sample does not have the field.
        data: All values, one after the other.
    """

    lengths: Lengths
    data: bytes

    @classmethod
    def of(cls, samples: int, values: Mapping[int, bytes]) -> FieldValues:
        """Return the values of ``samples`` samples; ``values`` has those that exist, by number."""
        lengths = np.full(samples, _ABSENT, np.uint8)
        rows = sorted(values)
        lengths[rows] = [len(values[row]) for row in rows]
        return cls(lengths, b"".join(values[row] for row in rows))

    def all(self) -> list[bytes | None]:
        """Return the value of every sample; None where the sample does not have the field."""
        lengths = np.where(self.lengths == _ABSENT, 0, self.lengths).astype(np.int64)
        ends = np.cumsum(lengths)
        spans = zip((ends - lengths).tolist(), ends.tolist(), (self.lengths != _ABSENT).tolist(), strict=True)
        data = self.data
        return [data[start:end] if there else None for start, end, there in spans]

    def counts(self) -> Counter[bytes]:
        """Return how many samples have each value."""
        return Counter(value for value in self.all() if value is not None)


class ValueCollector:
    """Collects the small values of the samples that are written to one shard.

    A field is left out if one of its values is not small, or was written as it is stored in another archive.
    """

    def __init__(self) -> None:
        self._fields: dict[str, dict[int, bytes]] = {}
        self._left_out: set[str] = set()

    def add(self, row: int, encoded: EncodedSamples) -> None:
        """Add the sample of number ``row``, or several that follow each other."""
        names, step = encoded.field_names, len(encoded.field_names)
        are_members = len(encoded.pieces) == _PIECES * len(encoded.sizes)
        for number, name in enumerate(names):
            if name in self._left_out:
                continue
            values = encoded.pieces[_PIECES * number + 1 :: _PIECES * step] if are_members else ()
            if values and max(encoded.sizes[number::step]) <= MAX_VALUE_BYTES and type(values[0]) is bytes:
                self._fields.setdefault(name, {}).update(enumerate(values, row))
            else:
                self._left_out.add(name)
                self._fields.pop(name, None)

    def values(self, samples: int) -> dict[str, FieldValues]:
        """Return the values by field, for a shard of ``samples`` samples."""
        return {name: FieldValues.of(samples, values) for name, values in sorted(self._fields.items())}


def encode_values(values: Mapping[str, FieldValues]) -> tuple[list[tuple[str, int]], bytes]:
    """Return the part of an index's header that describes its values, and their bytes."""
    parts = [bytes(field.lengths) + field.data for field in values.values()]
    return [(name, len(field.data)) for name, field in values.items()], b"".join(parts)


def decode_values(header: Any, samples: int, data: bytes, at: int) -> dict[str, FieldValues]:
    """Return the values that ``encode_values`` encoded; they begin at ``at``, and ``data`` ends with a checksum.

    Raises:
        ValueError: The values are not those of ``samples`` samples, or not small.
    """
    out = {}
    for name, size in header:
        lengths = np.frombuffer(data, np.uint8, samples, at)
        there = lengths[lengths != _ABSENT]
        begin, at = at + samples, at + samples + int(size)
        if (there > MAX_VALUE_BYTES).any() or int(there.sum(dtype=np.int64)) != size or at > len(data) - 4:
            raise ValueError(f"the values of field {name!r} are not valid")
        out[str(name)] = FieldValues(lengths, data[begin:at])
    return out
