"""Where a block's samples came from, as it is told to a worker of a cluster, which cannot ask back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines.read_stage import Finder, Span
from penstock.errors import DataError
from penstock.order import I64, U64, Refs
from penstock.plan import Located, Origin, Place


@dataclass(slots=True)
class Later:
    """Samples that are found where they are read."""

    refs: Refs
    finder: Finder
    nbytes: I64

    def take(self, sel: slice) -> Later:
        """A run of them."""
        return Later(self.refs.take(sel), self.finder, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """The samples, if they must be read here after all."""
        return self.finder.locate(self.refs).read()


@dataclass(slots=True)
class EncodedOrigin:
    """An origin of which only what errors and branches ask for is known."""

    places: list[Place]
    slots: list[EncodedSlot]

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("where a stream stands is known to its run alone")

    def place(self, number: int) -> Place:
        return self.places[number] if number < len(self.places) else Place(None, None)

    def slot(self, number: int) -> EncodedSlot:
        return self.slots[number]

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise AssertionError("where samples came from is known to their run alone")


@dataclass(slots=True)
class EncodedSlot:
    """One operand's samples."""

    leaves: I64
    keys: U64
    places: list[Place]

    def place(self, number: int) -> Place:
        return self.places[number]


@dataclass(frozen=True, slots=True)
class Found:
    """What is told of samples of the order, where the worker has the sources: their numbers."""

    refs: Refs
    padding: bool


def encode_origin(origin: Origin, inputs: int, finder: Finder | None, slots: int) -> Found | EncodedOrigin:
    """What to tell of ``inputs`` samples; ``finder``: that of the worker."""
    if isinstance(origin, Span) and finder is not None:
        return Found(origin.refs, origin.padding)
    operands = []
    if isinstance(origin, Span):
        for number in range(slots):
            own = origin.slot(number)
            there = own.leaves.tolist()  # -1: nothing, since this sample has no partner
            places = [own.place(i) if there[i] >= 0 else Place(None, None) for i in range(inputs)]
            operands.append(EncodedSlot(own.leaves, own.keys, places))
    return EncodedOrigin(operands[0].places if operands else [origin.place(i) for i in range(inputs)], operands)


def decode_origin(words: Found | EncodedOrigin, finder: Finder | None, unread: bool) -> Origin:
    """The origin again; with the samples found, where they are to be read."""
    if isinstance(words, EncodedOrigin):
        return words
    assert finder is not None
    spots: Located | None = finder.locate(words.refs) if unread else None
    positions = np.arange(len(words.refs), dtype=np.int64)
    return Span(0, 0, positions, len(positions), words.refs, finder.readers, spots, words.padding)
