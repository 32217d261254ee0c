"""Joins blocks, so that a stage that processes n rows in one call gets n, whatever the size of the blocks before it.

Fewer rows come only at the end of a run or of an open window, before an error, and where n rows exceed the memory
limit. Blocks may be joined before their samples are read; joining moves no payload.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.engines.lineage import ITEM, concat_tables
from penstock.engines.read_stage import Span
from penstock.order import ENDLESS, I64, U64
from penstock.plan import Block, Lineage, Origin, Place, Skipped, Slot, estimate_nbytes, join_columns

log = logging.getLogger("penstock")


def join_blocks(blocks: Iterator[Block], rows: int, max_bytes: int, name: str) -> Iterator[Block]:
    """Yield the same items in blocks whose sizes are multiples of ``rows``.

    Args:
        blocks: The blocks; samples that are not read yet stay unread.
        rows: The number of rows of one call.
        max_bytes: The most bytes to hold back; beyond that, blocks have fewer rows.
        name: The stage that asks for the rows, for the warning about that.
    """
    waiting = _Waiting()
    warned = False
    for block in blocks:
        lineage = block.lineage
        if lineage.base:
            yield from waiting.flush()
        waiting.add(block)
        if lineage.error is not None:
            yield from waiting.flush(None if block.is_marker else lineage.error)
            return
        if lineage.ends_part:
            yield from waiting.flush()
        elif full := waiting.rows // rows * rows:
            yield from waiting.take(full)
        elif waiting.nbytes > max_bytes:
            if not warned:
                log.warning("%s: %d rows exceed the memory limit of %d bytes; it gets fewer", name, rows, max_bytes)
                warned = True
            yield from waiting.flush()
        del block
    yield from waiting.flush()


@dataclass(slots=True)
class _Part:
    """A block, or a part of one, that waits to be joined.

    Attributes:
        low: The first input of the block's origin that the part covers.
        high: The input after the last one.
        items: The items; None if the samples are not read yet.
        keys: The key of each row.
        lineage: The lineage of the block, except for ``owner`` and ``skips``, which are those of the part.
        nbytes: The approximate size of the rows.
    """

    low: int
    high: int
    items: Sequence[Any] | None
    keys: U64
    lineage: Lineage
    nbytes: int

    @staticmethod
    def of(block: Block) -> _Part:
        lineage, origin = block.lineage, block.lineage.origin
        if isinstance(origin, Span) and origin.is_unread(block.items):
            assert origin.located is not None
            return _Part(0, lineage.inputs, None, block.keys, lineage, int(origin.located.nbytes.sum()))
        return _Part(lineage.begin, lineage.inputs, block.items, block.keys, lineage, estimate_nbytes(block.items))

    @property
    def rows(self) -> int:
        return self.high - self.low if self.items is None else len(self.items)

    def owners(self) -> I64:
        """Return the input of each row."""
        return np.arange(self.low, self.low + self.rows) if self.lineage.owner is None else self.lineage.owner

    def split(self, row: int) -> tuple[_Part, _Part]:
        """Return the first ``row`` rows, and the others.

        An input with outputs on both sides belongs to the second part, and the first one ends inside of it. Inputs
        without output between the two rows belong to the second part.
        """
        owner = self.lineage.owner
        more, edge = False, self.low + row
        if owner is not None:
            more = bool(owner[row - 1] == owner[row])
            edge = int(owner[row - 1]) + (not more)
        skips, rest = self.lineage.split_skips(edge)
        first = replace(self.lineage, owner=None if owner is None else owner[:row], skips=skips, more=more)
        second = replace(rest, owner=None if owner is None else owner[row:], base=0)
        items = (None, None) if self.items is None else (self.items[:row], self.items[row:])
        nbytes = self.nbytes * row // self.rows
        return (
            _Part(self.low, edge, items[0], self.keys[:row], first, nbytes),
            _Part(edge, self.high, items[1], self.keys[row:], second, self.nbytes - nbytes),
        )


@dataclass(slots=True)
class _Waiting:
    """The parts that wait to be joined, and blocks that cover nothing, which are delivered with the next rows."""

    parts: deque[_Part] = field(default_factory=deque)
    markers: list[Block] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0

    def add(self, block: Block) -> None:
        if block.is_marker:
            self.markers.append(block)
            return
        part = _Part.of(block)
        self.parts.append(part)
        self.rows += part.rows
        self.nbytes += part.nbytes

    def take(self, rows: int) -> Iterator[Block]:
        """Remove the first ``rows`` rows and yield them as a block."""
        taken: list[_Part] = []
        self.rows -= rows
        while rows:
            part = self.parts.popleft()
            if part.rows > rows:
                part, rest = part.split(rows)
                self.parts.appendleft(rest)
            taken.append(part)
            rows -= part.rows
            self.nbytes -= part.nbytes
        yield from self._take_markers()
        yield _joined(taken)

    def _take_markers(self) -> list[Block]:
        markers, self.markers = self.markers, []
        return markers

    def flush(self, error: Exception | None = None) -> Iterator[Block]:
        """Yield everything that waits as one block, which ends with an error if one is given."""
        markers = self._take_markers()
        yield from (marker for marker in markers if not _is_ending(marker))
        if self.parts:
            parts, self.parts = self.parts, deque()
            self.rows = self.nbytes = 0
            yield _joined(list(parts), error)
        yield from filter(_is_ending, markers)


def _is_ending(marker: Block) -> bool:
    return marker.lineage.ends_part or marker.lineage.error is not None


def _joined(parts: list[_Part], error: Exception | None = None) -> Block:
    first, last = parts[0], parts[-1]
    starts = np.cumsum([0, *(part.high - part.low for part in parts)]).tolist()
    owner = None
    if any(part.lineage.owner is not None for part in parts):
        owner = np.concatenate([part.owners() + (at - part.low) for part, at in zip(parts, starts, strict=False)])
    skips: list[Skipped] = []
    for part, at in zip(parts, starts, strict=False):
        skips += (skip._replace(input=skip.input + at - part.low) for skip in part.lineage.skips)
    lineage = Lineage(
        _joined_origin(parts, starts),
        starts[-1],
        owner,
        tuple(skips),
        error,
        base=first.lineage.base,
        more=last.lineage.more,
    )
    items = [] if first.items is None else join_columns([part.items for part in parts if part.items is not None])
    return Block(items, np.concatenate([part.keys for part in parts]), lineage)


def _joined_origin(parts: list[_Part], starts: list[int]) -> Origin:
    spans = []
    for part in parts:
        origin = part.lineage.origin
        if isinstance(origin, Span):
            begun = part is parts[-1] and part.lineage.more  # its last row is an input that the next block continues
            spans.append(origin.slice(part.low, part.high + begun))
    if len(spans) == len(parts):
        return Span.joined(spans)
    return JoinedOrigin([(part.lineage.origin, part.low) for part in parts], starts)


@dataclass(frozen=True, slots=True)
class JoinedOrigin:
    """The inputs of several origins, one after another.

    Attributes:
        parts: The origins, each with its first input.
        starts: For each of them, the number of its first input here; then the number of all inputs.
    """

    parts: list[tuple[Origin, int]]
    starts: list[int]

    def _find(self, number: int) -> tuple[Origin, int]:
        """Return the origin of an input, and its number there; for the number of all inputs, after the last one."""
        part = max(0, min(int(np.searchsorted(self.starts, number, "right")), len(self.parts)) - 1)
        origin, low = self.parts[part]
        return origin, number - self.starts[part] + low

    def cursor(self, done: int, sub: int) -> Any:
        origin, number = self._find(done)
        return origin.cursor(number, sub)

    def place(self, number: int) -> Place:
        origin, own = self._find(number)
        return origin.place(own)

    def slot(self, number: int) -> Slot:
        raise AssertionError("samples are zipped before they are joined")

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        tables = []
        ends = [*self.starts[1:-1], ENDLESS]  # the last part may have begun one input more
        for (origin, low), begin, end in zip(self.parts, self.starts, ends, strict=False):
            own = np.flatnonzero((inputs >= begin) & (inputs < end))
            if len(own):
                rows = origin.trace(inputs[own] - begin + low, outputs[own], kind)
                rows[ITEM] = own[rows[ITEM]]
                tables.append(rows)
        return concat_tables(tables)
