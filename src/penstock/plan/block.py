"""Blocks: what moves between stages, and how a block says where its items came from.

A block is a run of items with a 64-bit key each (the item's identity for randomness) and an *origin*: it covers
``inputs`` inputs of its origin (positions of the order, or outputs of a group), and ``owner`` says which of
them each item came from (``None``: one to one). From that follow the cursor after any of its items, and the shard
and key that an error names, without a stage having to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.order import I64, U64, generators


class Place(NamedTuple):
    """Where a sample lies: what errors and lists of skipped samples name."""

    shard: str | None
    key: str | None
    leaf: int = 0  # the source, counted over the plan
    number: int = 0  # in the shard
    name: str | None = None  # of the shard, relative to the root of its dataset
    samples: int = 1  # how many were joined in what is named; this is the first of them


class Origin(Protocol):
    """What a block was cut from."""

    def cursor(self, done: int, sub: int) -> Any:
        """Where the stream stands after ``done`` inputs and ``sub`` outputs of the next."""

    def place(self, number: int) -> Place:
        """The sample that input ``number`` is, or begins with."""

    def slot(self, number: int) -> Slot:
        """What one operand of a zip brought (0: the leftmost, or the only one)."""

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        """The samples that ``inputs`` are, as a table (see ``engines.tracing``); ``outputs`` is what came before."""


class Slot(Protocol):
    """The samples of one operand: their source and their keys."""

    leaves: I64
    keys: U64

    def place(self, number: int) -> Place:
        """The sample that input ``number`` is."""


class Skipped(NamedTuple):
    """A sample that failed and was left out."""

    input: int  # its number in the block
    place: Place
    stage: str
    problem: str


@dataclass(slots=True)
class Block:
    """Items on their way, with what is needed to say where they came from."""

    items: Sequence[Any]  # a list, or columns (see ``columns``)
    keys: U64
    origin: Origin
    inputs: int
    owner: I64 | None = None
    error: Exception | None = None  # raised when every item before it is delivered
    skips: list[Skipped] = field(default_factory=list)
    base: int = 0  # outputs of input ``begin`` that came before this block; see ``engines.flow.settled``
    ends_part: bool = False  # the last block of its part of the order
    begin: int = 0  # the first input that is not wholly in blocks before this one
    more: bool = False  # the following block goes on with input ``inputs``, of which some outputs may be here

    def __len__(self) -> int:
        return len(self.items)

    def input_of(self, item: int) -> int:
        """The number of the input that ``item`` came from."""
        return item if self.owner is None else int(self.owner[item])

    def place(self, item: int) -> Place:
        """Where ``item`` came from; a key it carries itself is preferred."""
        return self.origin.place(self.input_of(item))

    def generators(self, place: int) -> list[np.random.Generator]:
        """One fresh generator per item, a pure function of the item's key and the stage's place."""
        return generators(self.keys, place)

    def cursor(self, delivered: int) -> Any:
        """Where the stream stands when the first ``delivered`` items are out.

        Inputs that gave nothing are passed with the item before them.
        """
        done, sub = delivered, 0
        if self.owner is not None:
            ends = np.cumsum(np.bincount(self.owner, minlength=self.inputs)[: self.inputs])
            done = int(np.searchsorted(ends, delivered, "right"))
            sub = delivered - (int(ends[done - 1]) if done else 0)
        if done == self.begin:
            sub += self.base
        return self.origin.cursor(done, sub)

    def behind(self, item: int) -> tuple[Any, int]:
        """Where the stream stands right behind ``item``, and the first input that is not wholly before that."""
        number = self.input_of(item)
        last = item + 1 >= len(self.items) or self.input_of(item + 1) != number
        if last and number < self.inputs:
            return self.origin.cursor(number + 1, 0), number + 1
        return self.cursor(item + 1), number

    def passed(self, delivered: int) -> list[Skipped]:
        """The skipped samples that lie before the cursor after ``delivered`` items."""
        if not self.skips or delivered >= len(self.items):
            return self.skips
        until = self.input_of(delivered)
        return [skip for skip in self.skips if skip.input < until]

    def keep(self, which: Sequence[int] | I64, items: Sequence[Any]) -> Block:
        """The block whose items are ``items``, the survivors ``which`` of this one's."""
        chosen = np.asarray(which, np.int64)
        return Block(
            items,
            self.keys[chosen],
            self.origin,
            self.inputs,
            chosen if self.owner is None else self.owner[chosen],
            self.error,
            self.skips,
            self.base,
            self.ends_part,
            self.begin,
            self.more,
        )

    def become(self, items: Sequence[Any]) -> Block:
        """The block with other items, one for one."""
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

    def first(self, many: int) -> Block:
        """The first ``many`` items; the cursor after them is where it was."""
        block = self.keep(np.arange(many), self.items[:many])
        block.error, block.more = None, False
        block.skips = [skip for skip in self.skips if many and skip.input < self.input_of(many - 1)]
        return block

    def stop(self, item: int, error: Exception) -> None:
        """End the block before ``item`` with ``error``: what an earlier stage noted beyond it is forgotten."""
        self.inputs = self.input_of(item)
        self.error, self.more = error, False
        self.skips = [skip for skip in self.skips if skip.input < self.inputs]

    def outputs_of(self, number: int) -> int:
        """How many of the items came from input ``number``."""
        return int(number < len(self.items)) if self.owner is None else int(np.count_nonzero(self.owner == number))


def weight(item: Any) -> int:
    """About how many bytes a value holds; long lists are judged by a few of their values."""
    if isinstance(item, dict):
        return sum(map(weight, item.values()))
    if isinstance(item, (bytes, bytearray, str)):
        return len(item)
    if isinstance(item, (list, tuple)):
        some = item[:: max(1, len(item) // 4)]
        return sum(map(weight, some)) * len(item) // len(some) if some else 0
    size = getattr(item, "nbytes", None)  # arrays, tensors and the like
    return size if isinstance(size, int) else 64


@dataclass(slots=True)
class Context:
    """What a worker hands to a stage."""

    place: int  # the stage's place in the plan: part of every random key
    seed: int = 0
    epoch: int = 0
    skip: bool = False  # failing samples are skipped
    device: Any = None
    local: dict[str, Any] = field(default_factory=dict)  # what this worker keeps for this stage
    watch: Callable[[int], Any] | None = None  # told which input the stage is at, where somebody watches
    retried: int = 0  # calls that were made again
    features: dict[str, Any] = field(default_factory=dict)  # what the sources say of fields, for stages that follow it
