"""Where items came from, as a table of integers: made only when somebody asks, for many items at once.

A table has a row for each sample that went into some items, and these columns (as rows of an array, so that each is
one stretch of memory).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.order import I64
from penstock.plan import Block, Origin

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
