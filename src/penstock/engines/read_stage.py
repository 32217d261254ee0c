"""From positions to samples: blocks of found samples, and the stage that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines.cursor import Cursor
from penstock.engines.lineage import COLUMNS, INDEX, ITEM, KIND, LEAF, OUTPUT, PADDED, POSITION, SHARD
from penstock.errors import DataError
from penstock.order import I64, U64, Refs
from penstock.plan import Block, Context, Fields, Located, Place, Reader, Row, Slot, Stage, pick_rows


@dataclass(slots=True)
class RefSlot:
    """The samples of one operand, by reference."""

    leaves: I64
    keys: U64
    refs: Refs
    readers: list[Reader]

    def place(self, number: int) -> Place:
        """The sample that input ``number`` is."""
        leaf, shard, index = (int(a[number]) for a in (self.refs.leaf, self.refs.shard, self.refs.index))
        if not self.readers:  # a stream: its samples name themselves
            return Place(None, None, leaf, index)
        reader = self.readers[leaf]
        return Place(reader.url(shard), reader.key(shard, index), leaf, index, reader.names[shard])


@dataclass(slots=True)
class Span:
    """The origin of a block at the source: consecutive positions of one piece."""

    part: int
    piece: int
    positions: I64
    after: int
    refs: Refs
    readers: list[Reader]
    spots: Located | None
    padding: bool = False

    def cursor(self, done: int, sub: int) -> Cursor:
        """The position after ``done`` of them."""
        if done < len(self.positions):
            return Cursor(self.part, self.piece, int(self.positions[done]), sub, int(self.refs.key[done]))
        return Cursor(self.part, self.piece, self.after, sub)

    def place(self, number: int) -> Place:
        """The sample at position ``number``."""
        return self.slot(0).place(number) if number < len(self.positions) else Place(None, None)

    def slot(self, number: int) -> Slot:
        """One operand's samples."""
        refs = self.refs
        for _ in range(number):
            assert refs.pair is not None
            refs = refs.pair
        return RefSlot(refs.leaf, refs.key, refs, self.readers)

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        """The samples at some of the positions."""
        rows = np.empty((COLUMNS, len(inputs)), np.int64)
        rows[ITEM] = np.arange(len(inputs))
        rows[KIND] = PADDED if self.padding else kind
        rows[POSITION] = self.positions[inputs]
        rows[OUTPUT] = outputs
        for column, found in ((LEAF, self.refs.leaf), (SHARD, self.refs.shard), (INDEX, self.refs.index)):
            rows[column] = found[inputs]
        return rows

    def take(self) -> Located:
        """The found samples, for the one who reads them: the span keeps no hold on their bytes."""
        spots, self.spots = self.spots, None
        assert spots is not None
        return spots


@dataclass(frozen=True)
class Read(Stage):
    """Reads the samples of a block, in place."""

    def describe(self) -> str:
        return "read"

    def run(self, block: Block, ctx: Context) -> Block:
        """Read the block; samples that cannot be read fail like any other."""
        span = block.origin
        assert isinstance(span, Span)
        items, bad = span.take().read()
        if span.padding:
            items = list(items)
        block = block.become(items)
        if span.padding:
            for item in items:
                sample = item.values[0] if isinstance(item, Row) else item
                if isinstance(sample, dict):
                    sample["__pad__"] = True
        if bad:
            return self._without(block, bad, ctx)
        return block

    def _without(self, block: Block, bad: dict[int, DataError], ctx: Context) -> Block:
        for item in sorted(bad):
            if not self.fail(block, item, bad[item], ctx):
                kept = [i for i in range(item) if i not in bad]
                return block.keep(kept, pick_rows(block.items, kept))
        kept = [i for i in range(len(block.items)) if i not in bad]
        return block.keep(kept, pick_rows(block.items, kept))


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds samples in open sources; it can be sent to where they are read."""

    readers: list[Reader]
    fields: list[Fields]
    slots: int  # operands of a zip

    def locate(self, refs: Refs) -> Located:
        """Find the samples that ``refs`` name, for every operand of a zip."""
        if self.slots == 1:
            return self._find(refs)
        slots = []
        chain: Refs | None = refs
        while chain is not None:
            slots.append(self._find(chain))
            chain = chain.pair
        return Rows(slots, np.sum([spots.nbytes for spots in slots], axis=0))

    def _find(self, refs: Refs) -> Located:
        if len(self.readers) == 1:
            return self.readers[0].locate(refs.shard, refs.index, self.fields[0])
        parts = []
        nbytes: I64 = np.zeros(len(refs), np.int64)
        for leaf in np.unique(refs.leaf).tolist():
            at = np.flatnonzero(refs.leaf == leaf)
            spots = self.readers[leaf].locate(refs.shard[at], refs.index[at], self.fields[leaf])
            nbytes[at] = spots.nbytes
            parts.append((at, spots))
        return Gathered(parts, nbytes)


@dataclass(slots=True)
class Gathered:
    """Spots of several sources, in one order."""

    parts: list[tuple[I64, Located]]  # (where its samples stand, ascending; the samples)
    nbytes: I64

    def take(self, sel: slice) -> Gathered:
        """A run of them."""
        parts = []
        for at, spots in self.parts:
            low, high = np.searchsorted(at, (sel.start, sel.stop))
            if low < high:
                parts.append((at[low:high] - sel.start, spots.take(slice(int(low), int(high)))))
        return Gathered(parts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Read each source's samples and put them in order."""
        out: list[Any] = [None] * len(self.nbytes)
        bad: dict[int, DataError] = {}
        for at, spots in self.parts:
            items, wrong = spots.read()
            for where, item in zip(at.tolist(), items, strict=True):
                out[where] = item
            bad.update({int(at[number]): error for number, error in wrong.items()})
        return out, bad


@dataclass(slots=True)
class Rows:
    """Spots of the operands of a zip, side by side."""

    slots: list[Located]
    nbytes: I64

    def take(self, sel: slice) -> Rows:
        """A run of them."""
        return Rows([spots.take(sel) for spots in self.slots], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Read every operand; a position fails where one of them does."""
        answers = [spots.read() for spots in self.slots]
        bad: dict[int, DataError] = {}
        for _, wrong in reversed(answers):
            bad.update(wrong)
        return [Row(list(values)) for values in zip(*(items for items, _ in answers), strict=True)], bad


@dataclass(slots=True)
class Held:
    """Samples that are already in memory: from a stream that is read once."""

    items: list[Any]
    bad: dict[int, DataError]
    nbytes: I64

    def take(self, sel: slice) -> Held:
        """A run of them."""
        low, high, _ = sel.indices(len(self.items))
        bad = {number - low: error for number, error in self.bad.items() if low <= number < high}
        return Held(self.items[sel], bad, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """The samples."""
        return self.items, self.bad
