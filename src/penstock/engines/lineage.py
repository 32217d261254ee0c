"""Where the items of a block came from: their lineage, and the samples in it as a table made on request.

A table has a row for each sample that went into some items, and these columns (as rows of an array, so that each is
one run of memory)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engines.cursor import AnyCursor, Counted, Inside
from penstock.order import I64
from penstock.plan import Block, Origin, Place, Slot

ITEM, KIND, POSITION, OUTPUT, LEAF, SHARD, INDEX = range(7)
COLUMNS = 7

# What became of a sample: it is in the item; it gave nothing; the item is one more that was made of it; it is there
# to fill up; it was left out so that ranks are equal.
DELIVERED, PASSED, AGAIN, PADDED, DROPPED = range(5)


def joined(tables: list[I64]) -> I64:
    """One table of several."""
    if len(tables) == 1:
        return tables[0]
    return np.concatenate(tables, axis=1) if tables else np.zeros((COLUMNS, 0), np.int64)


@dataclass(slots=True)
class Trail:
    """Some items of a block by what they came from: it outlives the block and keeps no hold on its items."""

    origin: Origin
    low: int  # the first item
    high: int  # behind the last
    owner: I64 | None  # of the block
    begin: int  # of the block
    base: int  # of the block
    until: int = 0  # inputs of the block below it that have no item gave nothing; 0: another trail says so

    @classmethod
    def of(cls, block: Block, low: int, high: int, *, gaps: bool) -> Trail:
        """The trail of some items, with the block's inputs that gave nothing if ``gaps``."""
        return cls(block.origin, low, high, block.owner, block.begin, block.base, block.inputs if gaps else 0)

    def __len__(self) -> int:
        return self.high - self.low

    def inputs(self) -> I64:
        """The input of each item."""
        return np.arange(self.low, self.high) if self.owner is None else self.owner[self.low : self.high]

    def outputs(self) -> I64:
        """The number of each item among those of its input."""
        own = self.inputs()
        if self.owner is None:
            out: I64 = np.zeros(len(own), np.int64)
        else:
            out = np.arange(self.low, self.high) - np.searchsorted(self.owner, own)
        if self.base:
            out[own == self.begin] += self.base
        return out

    def gaps(self) -> I64:
        """The inputs that gave nothing."""
        low = self.begin + (1 if self.base else 0)  # an input that gave something before is none of them
        if self.owner is None or low >= self.until:
            return np.zeros(0, np.int64)
        empty = np.ones(self.until - low, bool)
        empty[self.owner[(self.owner >= low) & (self.owner < self.until)] - low] = False
        return np.flatnonzero(empty) + low

    def trace(self, kind: int) -> I64:
        """The samples of the items, in their order; before them those that gave nothing."""
        rows = self.origin.trace(self.inputs(), self.outputs(), kind)
        if self.owner is None:
            return rows
        gaps = self.gaps()
        return joined([self.passed(gaps), rows]) if len(gaps) else rows

    def passed(self, gaps: I64) -> I64:
        """The samples of inputs that gave nothing, noted with the first item."""
        rows = self.origin.trace(gaps, np.zeros_like(gaps), PASSED)
        rows[ITEM] = 0
        return rows


@dataclass(slots=True)
class Nowhere:
    """The origin of a block without items; it may name inputs that gave nothing."""

    gone: tuple[Trail, ...] = ()

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("an empty block has no place")

    def place(self, number: int) -> Place:
        return Place(None, None)

    def slot(self, number: int) -> Slot:
        raise AssertionError("an empty block has no samples")

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        rows = joined([trail.trace(PASSED) for trail in self.gone])
        rows[ITEM] = 0
        return rows


def nothing(gone: Block | None = None, *, ends_part: bool = False) -> Block:
    """A block without items, that may name the inputs of one that gave nothing."""
    trails = () if gone is None else (Trail.of(gone, 0, 0, gaps=True),)
    return Block([], np.zeros(0, np.uint64), Nowhere(trails), 0, ends_part=ends_part)


@dataclass(slots=True)
class Passed:
    """The origin of what a counting stage lets through: the items of the block before it."""

    level: int
    block: Block
    seen: int

    def cursor(self, done: int, sub: int) -> AnyCursor:
        return Counted(self.level, self.block.cursor(done), self.seen + done, sub)

    def place(self, number: int) -> Place:
        return self.block.place(number)

    def slot(self, number: int) -> Slot:
        return self.block.origin.slot(number)

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        items = Trail.of(self.block, 0, len(self.block), gaps=False)
        return _again(items.origin.trace(items.inputs()[inputs], items.outputs()[inputs], kind), outputs)


@dataclass(slots=True)
class Members:
    """The origin of a group being collected, and of what its stage makes of it."""

    level: int
    start: AnyCursor
    end: AnyCursor
    n: int
    members: list[Trail]
    whole: bool  # an output is made of all members, not of one
    total: int  # outputs of the group
    offset: int = 0  # the first of this block's
    owner: I64 | None = None  # which member each output came from
    traced: list[I64] = field(default_factory=list)  # the members' samples, once somebody asked

    def cursor(self, done: int, sub: int) -> AnyCursor:
        done += self.offset
        if done >= self.total and not sub:
            return self.end
        return Inside(self.level, self.start, self.end, self.n, done, sub) if done or sub else self.start

    def place(self, number: int) -> Place:
        number += self.offset
        member = int(self.owner[number]) if self.owner is not None and number < len(self.owner) else 0
        for trail in self.members:
            if member < len(trail):
                place = trail.origin.place(int(trail.inputs()[member]))
                return place._replace(samples=max(self.n, place.samples)) if self.whole else place
            member -= len(trail)
        return Place(None, None)

    def slot(self, number: int) -> Slot:
        raise AssertionError("a group has no operands")

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        """All members with the group's first output, and one that stands for them with any other; or one by one."""
        if not self.whole:
            return self._one_by_one(inputs, outputs, kind)
        tables = []
        for item, (number, output) in enumerate(zip(inputs.tolist(), outputs.tolist(), strict=True)):
            first = number + self.offset == 0 and output == 0
            rows = joined([trail.trace(kind) for trail in self.members]) if first else self._leader()
            rows[ITEM] = item
            tables.append(rows)
        return joined(tables)

    def _leader(self) -> I64:
        """The sample that the group begins with."""
        trail = next(trail for trail in self.members if len(trail))
        rows: I64 = trail.origin.trace(trail.inputs()[:1], trail.outputs()[:1], AGAIN)[:, :1]
        return rows

    def _one_by_one(self, inputs: I64, outputs: I64, kind: int) -> I64:
        assert self.owner is not None
        chosen = self.owner[inputs + self.offset]
        table, many, starts = self._by_member()
        if len(many) == table.shape[1]:  # each member is one sample
            rows = table[:, chosen]
            rows[ITEM] = np.arange(len(chosen))
        else:
            counts = many[chosen]
            at = np.repeat(starts[chosen] - np.cumsum(counts) + counts, counts)
            rows = table[:, at + np.arange(len(at))]
            rows[ITEM] = np.repeat(np.arange(len(chosen)), counts)
        if kind != DELIVERED:
            rows[KIND][rows[KIND] == DELIVERED] = kind
        rows = _again(rows, outputs)
        if ((inputs + self.offset == 0) & (outputs == 0)).any():
            gaps = [trail.passed(found) for trail in self.members if len(found := trail.gaps())]
            rows = joined([*gaps, rows])
        return rows

    def _by_member(self) -> list[I64]:
        """The samples of all members in their order, how many each has, and where they begin."""
        if not self.traced:
            tables, before = [], 0
            for trail in self.members:
                tables.append(trail.origin.trace(trail.inputs(), trail.outputs(), DELIVERED))
                tables[-1][ITEM] += before
                before += len(trail)
            table = joined(tables)
            many = np.bincount(table[ITEM], minlength=before)
            self.traced += [table, many, np.cumsum(many) - many]
        return self.traced


def _again(rows: I64, outputs: I64) -> I64:
    """The rows of items, where only the first output of each is what the samples came for."""
    if outputs.any():
        rows[KIND][(outputs[rows[ITEM]] > 0) & (rows[KIND] == DELIVERED)] = AGAIN
    return rows
