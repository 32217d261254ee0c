"""The first stage of every run: locate the samples of a block in their sources, and read them in a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engines.cached.located import LeafCache
from penstock.engines.cursor import Cursor
from penstock.engines.lineage import COLUMNS, INDEX, ITEM, KIND, LEAF, OUTPUT, PADDED, POSITION, SHARD
from penstock.errors import DataError
from penstock.order import I64, U64, Refs, scatter
from penstock.plan import (
    PAD_FIELD,
    Block,
    Context,
    Fields,
    Located,
    Place,
    Reader,
    Row,
    Slot,
    Stage,
    join_columns,
    pick_rows,
)


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
        names = reader.names[shard]
        return Place(reader.url(shard), reader.key(shard, index), leaf, index, names, fields=reader.fields(shard))


class PieceRows(NamedTuple):
    """Rows of a span that are consecutive positions of one piece.

    Attributes:
        low: The first row.
        part: The number of the start part.
        piece: The number of the piece in that part.
        after: The position after the last row.
        padding: The samples are repeated so that ranks are equal.
    """

    low: int
    part: int
    piece: int
    after: int
    padding: bool = False


@dataclass(slots=True)
class Span:
    """The origin of a block at the source: positions of the order, usually consecutive ones of one piece.

    Attributes:
        positions: The positions of the order.
        runs: Which pieces the positions belong to.
        refs: The samples at the positions.
        readers: The readers of all sources; empty for a stream.
        located: The located samples, until they are read.
    """

    positions: I64
    runs: tuple[PieceRows, ...]
    refs: Refs
    readers: list[Reader]
    located: Located | None

    def cursor(self, done: int, sub: int) -> Cursor:
        run = self._run_at(done)
        if done < len(self.positions):
            return Cursor(run.part, run.piece, int(self.positions[done]), sub, int(self.refs.key[done]))
        return Cursor(run.part, run.piece, run.after, sub)

    def _run_at(self, row: int) -> PieceRows:
        return next(run for run in reversed(self.runs) if run.low <= row)

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
        rows[KIND] = kind if not self.padded.any() else np.where(self.padded[inputs], PADDED, kind)
        rows[POSITION] = self.positions[inputs]
        rows[OUTPUT] = outputs
        for column, values in ((LEAF, self.refs.leaf), (SHARD, self.refs.shard), (INDEX, self.refs.index)):
            rows[column] = values[inputs]
        return rows

    @property
    def padded(self) -> NDArray[np.bool_]:
        """Which samples are repeated so that ranks are equal."""
        out = np.zeros(len(self.positions), bool)
        for run, end in self._runs():
            out[run.low : end] = run.padding
        return out

    def _runs(self) -> Iterator[tuple[PieceRows, int]]:
        """Yield the runs, each with the row after its last one."""
        ends = [run.low for run in self.runs[1:]]
        return zip(self.runs, [*ends, len(self.positions)], strict=True)

    def ranges(self, until: Cursor | None) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield (piece, first position, (position, sub) where it ends) for each run, up to a cursor if given."""
        for run, end in self._runs():
            positions = self.positions[run.low : end]
            if until is not None and until.position in positions:
                yield run.piece, int(positions[0]), (until.position, until.sub)
                return
            yield run.piece, int(positions[0]), (run.after, 0)

    def is_unread(self, items: Sequence[Any]) -> bool:
        """Return whether the samples of a block with these items still have to be read."""
        return self.located is not None and isinstance(items, list) and not items

    def take(self) -> Located:
        """Return the located samples and drop them, so that the origin does not keep their bytes alive."""
        located, self.located = self.located, None
        assert located is not None
        return located

    def slice(self, low: int, high: int) -> Span:
        """Return the rows from ``low`` to ``high``."""
        if low == 0 and high == len(self.positions):
            return self
        rows, runs = slice(low, high), []
        for run, end in self._runs():
            if run.low < high and end > low:
                after = run.after if end <= high else int(self.positions[high])
                runs.append(run._replace(low=max(0, run.low - low), after=after))
        located = None if self.located is None else self.located.take(rows)
        return Span(self.positions[rows], tuple(runs), self.refs.take(rows), self.readers, located)

    @staticmethod
    def joined(spans: Sequence[Span]) -> Span:
        """Return the rows of several spans, one after another; all of them are located, or none is."""
        if len(spans) == 1:
            return spans[0]
        lows = np.cumsum([0, *(len(span.positions) for span in spans)]).tolist()
        runs = [run._replace(low=run.low + low) for span, low in zip(spans, lows, strict=False) for run in span.runs]
        rows = [np.arange(low, high) for low, high in pairwise(lows)]
        refs = scatter(lows[-1], list(zip(rows, (span.refs for span in spans), strict=True)))
        located = [span.located for span in spans if span.located is not None]
        positions = np.concatenate([span.positions for span in spans])
        return Span(positions, tuple(runs), refs, spans[0].readers, LocatedSequence.of(located) if located else None)


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
        if (padded := span.padded).any():
            items = list(items)
            for row in np.flatnonzero(padded).tolist():
                sample = items[row].values[0] if isinstance(items[row], Row) else items[row]
                if isinstance(sample, dict):
                    sample[PAD_FIELD] = True
        block = block.with_items(items)
        if errors:
            return self._without_failed(block, errors, ctx)
        return block

    def _without_failed(self, block: Block, errors: Mapping[int, DataError | None], ctx: Context) -> Block:
        failed = sorted((item, error) for item, error in errors.items() if error is not None)
        for item, error in failed:
            if not self.fail(block, item, error, ctx):
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
        caches: The caches of the sources that have one.
    """

    readers: list[Reader]
    fields: list[Fields]
    slots: int
    caches: Mapping[int, LeafCache] = field(default_factory=dict)

    def for_one_run(self) -> Finder:
        """Return the finder for a run that begins now: its caches find what was added to them before."""
        if not self.caches:
            return self
        begun = time.monotonic()
        return replace(self, caches={leaf: replace(cache, begun=begun) for leaf, cache in self.caches.items()})

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
        if len(self.readers) == 1 and not self.caches:
            return self.readers[0].locate(refs.shard, refs.index, self.fields[0])
        parts: list[tuple[I64, Located]] = []
        nbytes: I64 = np.zeros(len(refs), np.int64)
        for leaf in np.unique(refs.leaf).tolist():
            indices = np.flatnonzero(refs.leaf == leaf)
            for rows, located in self._locate_in(leaf, refs.take(indices)):
                nbytes[indices[rows]] = located.nbytes
                parts.append((indices[rows], located))
        return LocatedUnion(parts, nbytes)

    def _locate_in(self, leaf: int, refs: Refs) -> list[tuple[I64, Located]]:
        """Locate samples of one source: in its cache, as far as they are there."""
        reader, fields = self.readers[leaf], self.fields[leaf]
        if leaf in self.caches:
            return self.caches[leaf].locate(refs, reader, fields)
        return [(np.arange(len(refs)), reader.locate(refs.shard, refs.index, fields))]


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

    def read(self) -> tuple[list[Any], dict[int, DataError | None]]:
        out: list[Any] = [None] * len(self.nbytes)
        errors: dict[int, DataError | None] = {}
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

    def read(self) -> tuple[list[Any], dict[int, DataError | None]]:
        results = [operand.read() for operand in self.operands]
        errors: dict[int, DataError | None] = {}
        for _, operand_errors in reversed(results):  # the error of the leftmost operand wins
            errors.update(operand_errors)
        return [Row(list(values)) for values in zip(*(items for items, _ in results), strict=True)], errors


@dataclass(frozen=True, slots=True)
class LocatedSequence:
    """Located samples that were located separately, one after another."""

    parts: list[Located]
    nbytes: I64

    @staticmethod
    def of(parts: list[Located]) -> Located:
        """Join located samples."""
        return parts[0] if len(parts) == 1 else LocatedSequence(parts, np.concatenate([p.nbytes for p in parts]))

    def take(self, sel: slice) -> Located:
        low, high, _ = sel.indices(len(self.nbytes))
        taken, begin = [], 0
        for part in self.parts:
            end = begin + len(part.nbytes)
            if begin < high and end > low:
                taken.append(part.take(slice(max(low, begin) - begin, min(high, end) - begin)))
            begin = end
        return LocatedSequence.of(taken)

    def read(self) -> tuple[Sequence[Any], dict[int, DataError | None]]:
        items, begin = [], 0
        errors: dict[int, DataError | None] = {}
        for part in self.parts:
            part_items, part_errors = part.read()
            items.append(part_items)
            errors.update({begin + number: error for number, error in part_errors.items()})
            begin += len(part.nbytes)
        return join_columns(items), errors


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
