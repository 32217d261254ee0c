"""Blocks: the chunks of items that stages pass to each other, with the lineage of every item.

A block holds items, a 64-bit key for each (from which its random numbers are derived), and an *origin*. It covers
``inputs`` inputs of its origin (positions of the order, or outputs of a group), and ``owner`` maps each item to the
input it came from (``None``: one to one). The cursor after any item, and the shard and key that an error names, are
derived from these; stages need not track either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.order import I64, U64, generators


class Place(NamedTuple):
    """The location of a sample, as errors and lists of skipped samples show it."""

    shard: str | None
    key: str | None
    leaf: int = 0  # the number of the source in the plan
    number: int = 0  # the index in the shard
    name: str | None = None  # the shard's name, relative to the root of its dataset
    samples: int = 1  # how many samples the item was computed from; the location is that of the first


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


class Skipped(NamedTuple):
    """A sample that failed and was skipped."""

    input: int  # the number of the input in the block
    place: Place
    stage: str
    problem: str


@dataclass(slots=True)
class Block:
    """Items with their keys and their lineage."""

    items: Sequence[Any]  # a list, or ``Columns``
    keys: U64
    origin: Origin
    inputs: int
    owner: I64 | None = None
    error: Exception | None = None  # raised once every item before it is delivered
    skips: list[Skipped] = field(default_factory=list)
    base: int = 0  # outputs of input ``begin`` in earlier blocks; set by ``engines.flow``
    ends_part: bool = False  # this is the last block of its part of the order
    begin: int = 0  # the first input that is not entirely in earlier blocks
    more: bool = False  # the next block continues input ``inputs``, some outputs of which may be in this one

    def __len__(self) -> int:
        return len(self.items)

    def input_of(self, item: int) -> int:
        """Return the number of the input that ``item`` came from."""
        return item if self.owner is None else int(self.owner[item])

    def place(self, item: int) -> Place:
        """Return the location of the sample that ``item`` came from."""
        return self.origin.place(self.input_of(item))

    def generators(self, stage_number: int) -> list[np.random.Generator]:
        """Return one fresh generator per item, a pure function of the item's key and the stage's number."""
        return generators(self.keys, stage_number)

    def cursor(self, delivered: int) -> Any:
        """Return the cursor after the first ``delivered`` items.

        Inputs without any output count as passed together with the item before them.
        """
        done, sub = delivered, 0
        if self.owner is not None:
            ends = np.cumsum(np.bincount(self.owner, minlength=self.inputs)[: self.inputs])
            done = int(np.searchsorted(ends, delivered, "right"))
            sub = delivered - (int(ends[done - 1]) if done else 0)
        if done == self.begin:
            sub += self.base
        return self.origin.cursor(done, sub)

    def cursor_after(self, item: int) -> tuple[Any, int]:
        """Return the cursor right after ``item``, and the first input that is not entirely before the cursor."""
        number = self.input_of(item)
        last = item + 1 >= len(self.items) or self.input_of(item + 1) != number
        if last and number < self.inputs:
            return self.origin.cursor(number + 1, 0), number + 1
        return self.cursor(item + 1), number

    def skips_before(self, delivered: int) -> list[Skipped]:
        """Return the skipped samples before the cursor after ``delivered`` items."""
        if not self.skips or delivered >= len(self.items):
            return self.skips
        until = self.input_of(delivered)
        return [skip for skip in self.skips if skip.input < until]

    def keep(self, indices: Sequence[int] | I64, items: Sequence[Any]) -> Block:
        """Return a block of ``items``, where item ``i`` came from this block's item ``indices[i]``."""
        selected = np.asarray(indices, np.int64)
        return Block(
            items,
            self.keys[selected],
            self.origin,
            self.inputs,
            selected if self.owner is None else self.owner[selected],
            self.error,
            self.skips,
            self.base,
            self.ends_part,
            self.begin,
            self.more,
        )

    def with_items(self, items: Sequence[Any]) -> Block:
        """Return the block with its items replaced, one for one."""
        return Block(
            items,
            self.keys,
            self.origin,
            self.inputs,
            self.owner,
            self.error,
            self.skips,
            self.base,
            self.ends_part,
            self.begin,
            self.more,
        )

    def first(self, count: int) -> Block:
        """Return a block of the first ``count`` items; the cursor after them is unchanged."""
        block = self.keep(np.arange(count), self.items[:count])
        block.error, block.more = None, False
        block.skips = [skip for skip in self.skips if count and skip.input < self.input_of(count - 1)]
        return block

    def stop(self, item: int, error: Exception) -> None:
        """End the block before ``item`` with ``error``; skips that an earlier stage recorded after it are dropped."""
        self.inputs = self.input_of(item)
        self.error, self.more = error, False
        self.skips = [skip for skip in self.skips if skip.input < self.inputs]

    def outputs_of(self, number: int) -> int:
        """Return how many items came from input ``number``."""
        return int(number < len(self.items)) if self.owner is None else int(np.count_nonzero(self.owner == number))


def estimate_nbytes(item: Any) -> int:
    """Return the approximate size of a value in bytes; long lists are estimated from a few of their values."""
    if isinstance(item, dict):
        return sum(map(estimate_nbytes, item.values()))
    if isinstance(item, (bytes, bytearray, str)):
        return len(item)
    if isinstance(item, (list, tuple)):
        sampled = item[:: max(1, len(item) // 4)]
        return sum(map(estimate_nbytes, sampled)) * len(item) // len(sampled) if sampled else 0
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
