"""The first stage of every run: locate the samples of a block in their sources, and read them in a worker."""

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
    """The samples of one operand of a zip, by reference."""

    leaves: I64
    keys: U64
    refs: Refs
    readers: list[Reader]

    def place(self, number: int) -> Place:
        leaf, shard, index = (int(a[number]) for a in (self.refs.leaf, self.refs.shard, self.refs.index))
        if not self.readers:  # a stream: its samples carry their own keys
            return Place(None, None, leaf, index)
        reader = self.readers[leaf]
        return Place(reader.url(shard), reader.key(shard, index), leaf, index, reader.names[shard])


@dataclass(slots=True)
class Span:
    """The origin of a block at the source: consecutive positions of one piece.

    Attributes:
        part: The number of the start part.
        piece: The number of the piece in that part.
        positions: The positions of the order.
        after: The position after them.
        refs: The samples at the positions.
        readers: The readers of all sources; empty for a stream.
        located: The located samples, until they are read.
        padding: The samples are repeated so that ranks are equal.
    """

    part: int
    piece: int
    positions: I64
    after: int
    refs: Refs
    readers: list[Reader]
    located: Located | None
    padding: bool = False

    def cursor(self, done: int, sub: int) -> Cursor:
        if done < len(self.positions):
            return Cursor(self.part, self.piece, int(self.positions[done]), sub, int(self.refs.key[done]))
        return Cursor(self.part, self.piece, self.after, sub)

    def place(self, number: int) -> Place:
        return self.slot(0).place(number) if number < len(self.positions) else Place(None, None)

    def slot(self, number: int) -> Slot:
        refs = self.refs
        for _ in range(number):
            assert refs.pair is not None
            refs = refs.pair
        return RefSlot(refs.leaf, refs.key, refs, self.readers)

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        rows = np.empty((COLUMNS, len(inputs)), np.int64)
        rows[ITEM] = np.arange(len(inputs))
        rows[KIND] = PADDED if self.padding else kind
        rows[POSITION] = self.positions[inputs]
        rows[OUTPUT] = outputs
        for column, values in ((LEAF, self.refs.leaf), (SHARD, self.refs.shard), (INDEX, self.refs.index)):
            rows[column] = values[inputs]
        return rows

    def take(self) -> Located:
        """Return the located samples and drop them, so that the origin does not keep their bytes alive."""
        located, self.located = self.located, None
        assert located is not None
        return located


@dataclass(frozen=True)
class Read(Stage):
    """Reads the located samples of a block; samples that cannot be read fail as in any other stage."""

    reads_source = True

    def describe(self) -> str:
        return "read"

    def run(self, block: Block, ctx: Context) -> Block:
        span = block.lineage.origin
        assert isinstance(span, Span)
        items, errors = span.take().read()
        if span.padding:
            items = list(items)
        block = block.with_items(items)
        if span.padding:
            for item in items:
                sample = item.values[0] if isinstance(item, Row) else item
                if isinstance(sample, dict):
                    sample["__pad__"] = True
        if errors:
            return self._without_failed(block, errors, ctx)
        return block

    def _without_failed(self, block: Block, errors: dict[int, DataError], ctx: Context) -> Block:
        for item in sorted(errors):
            if not self.fail(block, item, errors[item], ctx):
                kept = [i for i in range(item) if i not in errors]
                return block.keep(kept, pick_rows(block.items, kept))
        kept = [i for i in range(len(block.items)) if i not in errors]
        return block.keep(kept, pick_rows(block.items, kept))


@dataclass(frozen=True, slots=True)
class Finder:
    """Locates samples in open sources; it can be pickled and sent to the worker that reads them.

    Attributes:
        readers: The readers of all sources.
        fields: The fields to read from each source.
        slots: The number of operands of a zip; 1 if there is no zip.
    """

    readers: list[Reader]
    fields: list[Fields]
    slots: int

    def locate(self, refs: Refs) -> Located:
        """Locate samples by reference, for every operand of a zip."""
        if self.slots == 1:
            return self._locate(refs)
        operands = []
        chain: Refs | None = refs
        while chain is not None:
            operands.append(self._locate(chain))
            chain = chain.pair
        return LocatedZip(operands, np.sum([operand.nbytes for operand in operands], axis=0))

    def _locate(self, refs: Refs) -> Located:
        if len(self.readers) == 1:
            return self.readers[0].locate(refs.shard, refs.index, self.fields[0])
        parts = []
        nbytes: I64 = np.zeros(len(refs), np.int64)
        for leaf in np.unique(refs.leaf).tolist():
            indices = np.flatnonzero(refs.leaf == leaf)
            located = self.readers[leaf].locate(refs.shard[indices], refs.index[indices], self.fields[leaf])
            nbytes[indices] = located.nbytes
            parts.append((indices, located))
        return LocatedUnion(parts, nbytes)


@dataclass(slots=True)
class LocatedUnion:
    """Located samples of several sources, as one sequence.

    Attributes:
        parts: For each source: the indices of its samples in the sequence, ascending, and the samples.
        nbytes: The size of each sample.
    """

    parts: list[tuple[I64, Located]]
    nbytes: I64

    def take(self, sel: slice) -> LocatedUnion:
        parts = []
        for indices, located in self.parts:
            low, high = np.searchsorted(indices, (sel.start, sel.stop))
            if low < high:
                parts.append((indices[low:high] - sel.start, located.take(slice(int(low), int(high)))))
        return LocatedUnion(parts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        out: list[Any] = [None] * len(self.nbytes)
        errors: dict[int, DataError] = {}
        for indices, located in self.parts:
            items, part_errors = located.read()
            for number, item in zip(indices.tolist(), items, strict=True):
                out[number] = item
            errors.update({int(indices[number]): error for number, error in part_errors.items()})
        return out, errors


@dataclass(slots=True)
class LocatedZip:
    """Located samples of the operands of a zip; a row cannot be read if one of its operands cannot."""

    operands: list[Located]
    nbytes: I64

    def take(self, sel: slice) -> LocatedZip:
        return LocatedZip([operand.take(sel) for operand in self.operands], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        results = [operand.read() for operand in self.operands]
        errors: dict[int, DataError] = {}
        for _, operand_errors in reversed(results):  # the error of the leftmost operand wins
            errors.update(operand_errors)
        return [Row(list(values)) for values in zip(*(items for items, _ in results), strict=True)], errors


@dataclass(slots=True)
class BufferedSamples:
    """Samples that are already in memory, from a stream that can be read only once; implements ``Located``."""

    items: list[Any]
    errors: dict[int, DataError]
    nbytes: I64

    def take(self, sel: slice) -> BufferedSamples:
        low, high, _ = sel.indices(len(self.items))
        errors = {number - low: error for number, error in self.errors.items() if low <= number < high}
        return BufferedSamples(self.items[sel], errors, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        return self.items, self.errors
