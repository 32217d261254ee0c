"""Encode where the samples of a block came from, for a worker on a cluster, which cannot query the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engines.read_stage import Finder, PieceRows, Span
from penstock.errors import DataError
from penstock.order import I64, U64, Refs
from penstock.plan import Located, Origin, Place


@dataclass(slots=True)
class DeferredSamples:
    """Samples that are located by the process that reads them; implements ``Located``."""

    refs: Refs
    finder: Finder
    nbytes: I64  # estimates

    def take(self, sel: slice) -> DeferredSamples:
        return DeferredSamples(self.refs.take(sel), self.finder, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], Mapping[int, DataError | None]]:
        """Locate and read the samples in this process."""
        return self.finder.locate(self.refs).read()


@dataclass(slots=True)
class EncodedOrigin:
    """An origin that knows only the locations and slots of its samples, for errors and branches."""

    places: list[Place]
    slots: list[EncodedSlot]

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("only the run knows the cursor of a stream")

    def place(self, number: int) -> Place:
        return self.places[number] if number < len(self.places) else Place(None, None)

    def slot(self, number: int) -> EncodedSlot:
        return self.slots[number]

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise AssertionError("only the run can trace samples")


@dataclass(slots=True)
class EncodedSlot:
    """The samples of one operand of a zip."""

    leaves: I64
    keys: U64
    places: list[Place]

    def place(self, number: int) -> Place:
        return self.places[number]


@dataclass(frozen=True, slots=True)
class OriginRefs:
    """References to samples: all that a worker needs to locate the samples in its sources and to name them."""

    refs: Refs
    padded: NDArray[np.bool_]


def encode_origin(origin: Origin, inputs: int, finder: Finder | None, slots: int) -> OriginRefs | EncodedOrigin:
    """Encode the origin of a block of ``inputs`` samples.

    Args:
        origin: The origin.
        inputs: The number of samples of the block.
        finder: The sources that the worker has; ``None`` if it has none.
        slots: The number of zip operands of a sample.
    """
    if isinstance(origin, Span) and finder is not None:
        return OriginRefs(origin.refs, origin.padded)
    operands = []
    if isinstance(origin, Span):
        for number in range(slots):
            slot = origin.slot(number)
            leaves = slot.leaves.tolist()  # -1: this sample has no partner in this operand
            places = [slot.place(i) if leaves[i] >= 0 else Place(None, None) for i in range(inputs)]
            operands.append(EncodedSlot(slot.leaves, slot.keys, places))
    return EncodedOrigin(operands[0].places if operands else [origin.place(i) for i in range(inputs)], operands)


def decode_origin(encoded: OriginRefs | EncodedOrigin, finder: Finder | None, unread: bool) -> Origin:
    """Return the origin that ``encode_origin`` encoded; if its samples are ``unread``, with the samples located."""
    if isinstance(encoded, EncodedOrigin):
        return encoded
    assert finder is not None
    located: Located | None = finder.locate(encoded.refs) if unread else None
    positions = np.arange(len(encoded.refs), dtype=np.int64)
    edges = [0, *(np.flatnonzero(np.diff(encoded.padded)) + 1).tolist()]
    runs = tuple(PieceRows(low, 0, 0, len(positions), bool(encoded.padded[low])) for low in edges if len(positions))
    return Span(positions, runs or (PieceRows(0, 0, 0, 0),), encoded.refs, finder.readers, located)
