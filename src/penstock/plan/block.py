"""Blocks: the chunks of items that stages pass to each other, with the lineage of every item.

A block holds items, a 64-bit key for each (from which its random numbers are derived), and their *lineage*. The cursor
after any item, and the shard and key that an error names, are derived from the lineage; stages need not track either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.order import I64, U64, generators

_MAX_DEPTH = 64  # levels of dicts and lists that are measured


class Place(NamedTuple):
    """The location of a sample, as errors and lists of skipped samples show it."""

    shard: str | None
    key: str | None
    leaf: int = 0  # the number of the source in the plan
    number: int = 0  # the index in the shard
    name: str | None = None  # the shard's name, relative to the root of its dataset
    samples: int = 1  # how many samples the item was computed from; the location is that of the first
    fields: tuple[str, ...] = ()  # the fields of the samples in the shard, as far as they are known


class Origin(Protocol):
    """The sequence of inputs that a block was computed from."""

    def cursor(self, done: int, sub: int) -> Any:
        """Return the cursor after ``done`` inputs and ``sub`` outputs of the next one."""

    def place(self, number: int) -> Place:
        """Return the location of input ``number``, or of its first sample."""

    def slot(self, number: int) -> Slot:
        """Return the samples of one operand of a zip (0: the leftmost one, or the only one)."""

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        """Return the samples behind ``inputs`` as a table (see ``engines.lineage``).

        ``outputs`` numbers each item among the outputs of its input.
        """


class Slot(Protocol):
    """The samples of one operand of a zip: their sources and keys."""

    leaves: I64
    keys: U64

    def place(self, number: int) -> Place:
        """Return the location of input ``number``."""


class BatchRows(Protocol):
    """The rows that the items of a block will take in batches: memory to compute arrays in, so that no copy is made.

    It is only an offer. An array that is elsewhere, or in another row than expected, is copied to its batch.
    """

    def take(self, field: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
        """Return uninitialised memory for the field of the next item; ``None``: allocate it elsewhere."""


class Skipped(NamedTuple):
    """A sample that failed and was skipped."""

    input: int  # the number of the input in the block
    place: Place
    stage: str
    problem: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which inputs the items of a block came from, and what happened to inputs without an item.

    Attributes:
        origin: The sequence of the inputs: positions of the order, or outputs of a group.
        inputs: How many inputs the block covers.
        owner: The input that each item came from; ``None``: one to one.
        skips: The samples that failed and were skipped.
        error: Raised once every item of the block is delivered.
        begin: The first input that is not entirely in earlier blocks.
        base: How many outputs of input ``begin`` are in earlier blocks; set by ``engines.flow``.
        more: The next block continues input ``inputs``, some outputs of which may be in this one.
        ends_part: This is the last block of its part of the order.
        rows: Where the arrays of its items will be in batches; ``None`` if that is not known.
    """

    origin: Origin
    inputs: int
    owner: I64 | None = None
    skips: tuple[Skipped, ...] = ()
    error: Exception | None = None
    begin: int = 0
    base: int = 0
    more: bool = False
    ends_part: bool = False
    rows: BatchRows | None = field(default=None, compare=False, repr=False)

    def input_of(self, item: int) -> int:
        """Return the number of the input that ``item`` came from."""
        return item if self.owner is None else int(self.owner[item])

    def owners(self, items: int) -> I64:
        """Return the number of the input that each of ``items`` items came from."""
        return np.arange(items) if self.owner is None else self.owner

    def selected(self, indices: I64) -> Lineage:
        """Return the lineage of items of which item ``i`` came from this lineage's item ``indices[i]``."""
        return replace(self, owner=indices if self.owner is None else self.owner[indices])

    def stopped(self, item: int, error: Exception) -> Lineage:
        """Return the lineage of the items before ``item``, which failed; skips recorded after it are dropped."""
        return self.until(self.input_of(item), error)

    def until(self, inputs: int, error: Exception | None) -> Lineage:
        """Return the lineage of the first ``inputs`` inputs, followed by an error."""
        skips = tuple(skip for skip in self.skips if skip.input < inputs)
        return replace(self, inputs=inputs, error=error, more=False, skips=skips)

    def with_skips(self, *skips: Skipped) -> Lineage:
        """Return the lineage with more skipped samples, in the order of their inputs."""
        return replace(self, skips=tuple(sorted((*self.skips, *skips), key=lambda skip: skip.input)))

    def split_skips(self, until: int) -> tuple[tuple[Skipped, ...], Lineage]:
        """Return the skipped samples before input ``until``, and the lineage without them."""
        if not self.skips:
            return (), self
        before = tuple(skip for skip in self.skips if skip.input < until)
        return before, replace(self, skips=tuple(skip for skip in self.skips if skip.input >= until))


@dataclass(slots=True)
class Block:
    """Items, the key of each, and their lineage."""

    items: Sequence[Any]  # a list, or ``Columns``
    keys: U64
    lineage: Lineage

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_marker(self) -> bool:
        """Whether the block covers nothing: it only ends a part of the order, or carries an error or skips."""
        return not (self.lineage.inputs or self.items)

    @property
    def new_inputs(self) -> int:
        """The number of inputs that the block covers, without those that earlier blocks began."""
        return self.lineage.inputs - self.lineage.begin

    def place(self, item: int) -> Place:
        """Return the location of the sample that ``item`` came from."""
        return self.lineage.origin.place(self.lineage.input_of(item))

    def generators(self, stage_number: int) -> list[np.random.Generator]:
        """Return one fresh generator per item, a pure function of the item's key and the stage's number."""
        return generators(self.keys, stage_number)

    def cursor(self, delivered: int) -> Any:
        """Return the cursor after the first ``delivered`` items.

        Inputs without any output count as passed together with the item before them.
        """
        lineage = self.lineage
        done, sub = delivered, 0
        if lineage.owner is not None:
            ends = np.cumsum(np.bincount(lineage.owner, minlength=lineage.inputs)[: lineage.inputs])
            done = int(np.searchsorted(ends, delivered, "right"))
            sub = delivered - (int(ends[done - 1]) if done else 0)
        if done == lineage.begin:
            sub += lineage.base
        return lineage.origin.cursor(done, sub)

    def cursor_after(self, item: int) -> tuple[Any, int]:
        """Return the cursor right after ``item``, and the first input that is not entirely before the cursor."""
        lineage = self.lineage
        number = lineage.input_of(item)
        last = item + 1 >= len(self.items) or lineage.input_of(item + 1) != number
        if last and number < lineage.inputs:
            return lineage.origin.cursor(number + 1, 0), number + 1
        return self.cursor(item + 1), number

    def skips_before(self, delivered: int) -> tuple[Skipped, ...]:
        """Return the skipped samples before the cursor after ``delivered`` items."""
        skips = self.lineage.skips
        if not skips or delivered >= len(self.items):
            return skips
        until = self.lineage.input_of(delivered)
        return tuple(skip for skip in skips if skip.input < until)

    def keep(self, indices: Sequence[int] | I64, items: Sequence[Any]) -> Block:
        """Return a block of ``items``, where item ``i`` came from this block's item ``indices[i]``."""
        selected = np.asarray(indices, np.int64)
        return Block(items, self.keys[selected], self.lineage.selected(selected))

    def with_items(self, items: Sequence[Any]) -> Block:
        """Return the block with its items replaced, one for one."""
        return Block(items, self.keys, self.lineage)

    def first(self, count: int) -> Block:
        """Return a block of the first ``count`` items; the cursor after them is unchanged."""
        block = self.keep(np.arange(count), self.items[:count])
        until = self.lineage.input_of(count - 1) if count else 0
        skips, _ = self.lineage.split_skips(until)
        block.lineage = replace(block.lineage, error=None, more=False, skips=skips)
        return block

    def outputs_of(self, number: int) -> int:
        """Return how many items came from input ``number``."""
        owner = self.lineage.owner
        return int(number < len(self.items)) if owner is None else int(np.count_nonzero(owner == number))


def estimate_nbytes(item: Any) -> int:
    """Return the approximate size of a value in bytes; long lists are estimated from a few of their values.

    A dict or list that appears again inside the value counts once: a value may hold itself.
    """
    return _estimate(item, set(), _MAX_DEPTH)


def _estimate(item: Any, seen: set[int], depth: int) -> int:
    if isinstance(item, (bytes, bytearray, str)):
        return len(item)
    if isinstance(item, (dict, list, tuple)):
        if id(item) in seen or not depth:
            return 0
        seen.add(id(item))
        if isinstance(item, dict):
            return sum(_estimate(value, seen, depth - 1) for value in item.values())
        sampled = item[:: max(1, len(item) // 4)]
        return sum(_estimate(value, seen, depth - 1) for value in sampled) * len(item) // len(sampled) if sampled else 0
    size = getattr(item, "nbytes", None)  # arrays, tensors and the like
    return size if isinstance(size, int) else 64


@dataclass(slots=True)
class Context:
    """What a worker provides to a stage."""

    stage_number: int  # in the plan: part of every random key
    seed: int = 0
    epoch: int = 0
    skip: bool = False  # failing samples are skipped
    device: Any = None
    local: dict[str, Any] = field(default_factory=dict)  # what this worker stores for this stage
    watch: Callable[[int], Any] | None = None  # called with each input's number, if progress is monitored
    retried: int = 0  # the number of repeated calls
    features: dict[str, Any] = field(default_factory=dict)  # the sources' typed features, for stages that use them
    stack: Callable[[list[Any]], Any] = np.stack  # joins arrays of the same shape
    rows: BatchRows | None = None  # where arrays of the current block will be in batches
