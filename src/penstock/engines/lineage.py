"""Lineage: which samples each item of a block came from, through batches, windows and limits.

The lineage of some items is a table with a row for each sample that went into them, computed only on request. The
table is stored as an array with one line for each of its columns, so that every column is contiguous in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engines.cursor import AnyCursor, CountedCursor, GroupCursor
from penstock.order import I64
from penstock.plan import Block, Lineage, Origin, Place, Slot

# The columns: the number of the item, what happened to the sample, its position in the order, the number of the output
# among the outputs of the sample, its source, its shard and its index in the shard.
ITEM, KIND, POSITION, OUTPUT, LEAF, SHARD, INDEX = range(7)
COLUMNS = 7

# What happened to a sample. DELIVERED: it is in the item. PASSED: it produced no output. REPEATED: it was delivered
# with an earlier output of the same group or counted item. PADDED: it is repeated so that ranks are equal. DROPPED: it
# is left out so that ranks are equal.
DELIVERED, PASSED, REPEATED, PADDED, DROPPED = range(5)


def concat_tables(tables: list[I64]) -> I64:
    """Join tables of samples into one."""
    if len(tables) == 1:
        return tables[0]
    return np.concatenate(tables, axis=1) if tables else np.zeros((COLUMNS, 0), np.int64)


@dataclass(slots=True)
class ItemLineage:
    """The inputs that consecutive items of a block came from; it can outlive the block and holds none of its items.

    Attributes:
        lineage: The lineage of the block.
        low: The number of the first item.
        high: The number after the last item.
        with_gaps: Inputs of the block that produced no output are reported too; False if another object reports them.
    """

    lineage: Lineage
    low: int
    high: int
    with_gaps: bool

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def origin(self) -> Origin:
        """The origin of the block."""
        return self.lineage.origin

    def inputs(self) -> I64:
        """Return the number of the input that each item came from."""
        owner = self.lineage.owner
        return np.arange(self.low, self.high) if owner is None else owner[self.low : self.high]

    def outputs(self) -> I64:
        """Return the number of each item among the outputs of its input."""
        own, owner = self.inputs(), self.lineage.owner
        if owner is None:
            out: I64 = np.zeros(len(own), np.int64)
        else:
            out = np.arange(self.low, self.high) - np.searchsorted(owner, own)
        if self.lineage.base:
            out[own == self.lineage.begin] += self.lineage.base
        return out

    def gaps(self) -> I64:
        """Return the inputs that produced no output."""
        low = self.lineage.begin + (1 if self.lineage.base else 0)  # outputs in earlier blocks: not a gap
        owner, until = self.lineage.owner, self.lineage.inputs
        if owner is None or not self.with_gaps or low >= until:
            return np.zeros(0, np.int64)
        empty = np.ones(until - low, bool)
        empty[owner[(owner >= low) & (owner < until)] - low] = False
        return np.flatnonzero(empty) + low

    def trace(self, kind: int) -> I64:
        """Return the samples of the items, in order, after the samples that produced no output."""
        rows = self.origin.trace(self.inputs(), self.outputs(), kind)
        gaps = self.gaps()
        return concat_tables([self.trace_gaps(gaps), rows]) if len(gaps) else rows

    def trace_gaps(self, gaps: I64) -> I64:
        """Return the samples of inputs that produced no output, as samples of the first item."""
        rows = self.origin.trace(gaps, np.zeros_like(gaps), PASSED)
        rows[ITEM] = 0
        return rows


@dataclass(slots=True)
class EmptyOrigin:
    """The origin of a block without items, which may report inputs that produced no output."""

    passed: tuple[ItemLineage, ...] = ()

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("an empty block has no cursor")

    def place(self, number: int) -> Place:
        return Place(None, None)

    def slot(self, number: int) -> Slot:
        raise AssertionError("an empty block has no samples")

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        rows = concat_tables([lineage.trace(PASSED) for lineage in self.passed])
        rows[ITEM] = 0
        return rows


def empty_block(passed: Block | None = None, *, ends_part: bool = False, error: Exception | None = None) -> Block:
    """Return a block without items; it reports the inputs of ``passed``, a block that produced no output."""
    lineages = () if passed is None else (ItemLineage(passed.lineage, 0, 0, with_gaps=True),)
    return Block([], np.zeros(0, np.uint64), Lineage(EmptyOrigin(lineages), 0, error=error, ends_part=ends_part))


@dataclass(slots=True)
class CountedOrigin:
    """The origin of a block that passed a counting stage: its inputs are the items of the block before the stage."""

    level: int
    block: Block
    seen: int

    def cursor(self, done: int, sub: int) -> AnyCursor:
        return CountedCursor(self.level, self.block.cursor(done), self.seen + done, sub)

    def place(self, number: int) -> Place:
        return self.block.place(number)

    def slot(self, number: int) -> Slot:
        return self.block.lineage.origin.slot(number)

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        items = ItemLineage(self.block.lineage, 0, len(self.block), with_gaps=False)
        return _mark_repeats(items.origin.trace(items.inputs()[inputs], items.outputs()[inputs], kind), outputs)


@dataclass(slots=True)
class GroupOrigin:
    """The origin of a group, and of the outputs that its stage computes from it.

    Attributes:
        level: The level whose head collects the group.
        start: The cursor before the first member.
        end: The cursor after the last member.
        n: The number of members.
        members: The lineage of the members, in order.
        whole: Every output is computed from all members, not from one.
        total: The number of outputs of the group.
        offset: The number of the block's first output.
        owner: Which member each output came from.
        traced: The result of ``_by_member``, empty until the first request.
    """

    level: int
    start: AnyCursor
    end: AnyCursor
    n: int
    members: list[ItemLineage]
    whole: bool
    total: int
    offset: int = 0
    owner: I64 | None = None
    traced: list[I64] = field(default_factory=list)

    def cursor(self, done: int, sub: int) -> AnyCursor:
        done += self.offset
        if done >= self.total and not sub:
            return self.end
        return GroupCursor(self.level, self.start, self.end, self.n, done, sub) if done or sub else self.start

    def place(self, number: int) -> Place:
        number += self.offset
        member = int(self.owner[number]) if self.owner is not None and number < len(self.owner) else 0
        for lineage in self.members:
            if member < len(lineage):
                place = lineage.origin.place(int(lineage.inputs()[member]))
                return place._replace(samples=max(self.n, place.samples)) if self.whole else place
            member -= len(lineage)
        return Place(None, None)

    def slot(self, number: int) -> Slot:
        raise AssertionError("a group has no operands")

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        """Return the samples of the outputs.

        If every output is computed from all members, the first output has all of them, any other only the first one.
        """
        if not self.whole:
            return self._trace_each(inputs, outputs, kind)
        tables = []
        for item, (number, output) in enumerate(zip(inputs.tolist(), outputs.tolist(), strict=True)):
            first = number + self.offset == 0 and output == 0
            rows = concat_tables([lineage.trace(kind) for lineage in self.members]) if first else self._first_member()
            rows[ITEM] = item
            tables.append(rows)
        return concat_tables(tables)

    def _first_member(self) -> I64:
        """Return the first sample of the group."""
        lineage = next(lineage for lineage in self.members if len(lineage))
        rows: I64 = lineage.origin.trace(lineage.inputs()[:1], lineage.outputs()[:1], REPEATED)[:, :1]
        return rows

    def _trace_each(self, inputs: I64, outputs: I64, kind: int) -> I64:
        """Return the samples of the one member that each output came from."""
        assert self.owner is not None
        chosen = self.owner[inputs + self.offset]
        table, counts_of, starts = self._by_member()
        if len(counts_of) == table.shape[1]:  # each member is one sample
            rows = table[:, chosen]
            rows[ITEM] = np.arange(len(chosen))
        else:
            counts = counts_of[chosen]
            offsets = np.repeat(starts[chosen] - np.cumsum(counts) + counts, counts)
            rows = table[:, offsets + np.arange(len(offsets))]
            rows[ITEM] = np.repeat(np.arange(len(chosen)), counts)
        if kind != DELIVERED:
            rows[KIND][rows[KIND] == DELIVERED] = kind
        rows = _mark_repeats(rows, outputs)
        if ((inputs + self.offset == 0) & (outputs == 0)).any():
            gaps = [lineage.trace_gaps(found) for lineage in self.members if len(found := lineage.gaps())]
            rows = concat_tables([*gaps, rows])
        return rows

    def _by_member(self) -> list[I64]:
        """Return the samples of all members in order, the number of samples of each, and the index of its first one."""
        if not self.traced:
            tables, before = [], 0
            for lineage in self.members:
                tables.append(lineage.origin.trace(lineage.inputs(), lineage.outputs(), DELIVERED))
                tables[-1][ITEM] += before
                before += len(lineage)
            table = concat_tables(tables)
            counts = np.bincount(table[ITEM], minlength=before)
            self.traced += [table, counts, np.cumsum(counts) - counts]
        return self.traced


def _mark_repeats(rows: I64, outputs: I64) -> I64:
    """Mark the samples of items that are not the first output of their input."""
    if outputs.any():
        rows[KIND][(outputs[rows[ITEM]] > 0) & (rows[KIND] == DELIVERED)] = REPEATED
    return rows
