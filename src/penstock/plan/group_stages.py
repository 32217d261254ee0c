"""The stages that see more than one item: batches, windows of the stream, and counts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.order import fold, permute
from penstock.plan.block import Block, Context
from penstock.plan.collation import BatchMemory, collate, rows
from penstock.plan.columns import Columns, pick_rows
from penstock.plan.stage import FlatMap, GroupStage, StreamStage
from penstock.plan.values import Fields, check_callable, check_count, name_of


@dataclass(frozen=True)
class Unbatched(FlatMap):
    """``unbatched()``: the samples of a batch again."""

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Take the columns apart."""
        return rows

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after


@dataclass(frozen=True)
class Batched(GroupStage):
    """``batched(64)``: so many neighbours as one batch."""

    batch_size: int
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", check_count("batched", self.batch_size, least=1))
        if self.collate is not None:
            check_callable("collate", self.collate)

    @property
    def capacity(self) -> float:
        return self.batch_size

    def describe(self) -> str:
        more = ", drop_last=True" if self.drop_last else ""
        more += f", collate={name_of(self.collate)}" if self.collate else ""
        return f"batched({self.batch_size}{more})"

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def length(self, items: int) -> int | None:
        """Whole batches, and the last one if it is kept."""
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def run(self, block: Block, ctx: Context) -> Block:
        """Collate the group."""
        if self.drop_last and len(block.items) < self.batch_size:
            return block.keep([], [])
        return _batch(block, self.collate, ctx)


def _batch(block: Block, join: Callable[[Any], Any] | None, ctx: Context) -> Block:
    """One item made of all; its identity is that of its first sample, in another role."""
    items = block.items
    if join is None:
        made = collate(items, ctx.local.setdefault("buffers", BatchMemory()).stacked)
    elif isinstance(items, Columns) and not getattr(join, "columnar", False):
        made = join(list(items))  # a function of the user's knows samples only
    else:
        made = join(items)
    batch = block.keep([0], [made])
    batch.keys = np.array([fold(int(block.keys[0]), 7)], np.uint64)
    return batch


@dataclass(frozen=True)
class BatchedBy(GroupStage):
    """``batched_by(size_fn, max_size)``: as many neighbours as fit; one that alone is larger stands alone."""

    size_fn: Callable[[Any], float]
    max_size: float
    collate: Callable[[list[Any]], Any] | None = None

    weighs = True

    def __post_init__(self) -> None:
        check_callable("batched_by", self.size_fn)
        if isinstance(self.max_size, bool) or not isinstance(self.max_size, Real) or not self.max_size > 0:
            raise PlanError(f"max_size={self.max_size!r}: give a number above 0")
        if self.collate is not None:
            check_callable("collate", self.collate)

    @property
    def name(self) -> str:
        return "batched_by"

    @property
    def capacity(self) -> float:
        return self.max_size

    def weigh(self, item: Any) -> float:
        """The size of one item."""
        return self.size_fn(item)

    def describe(self) -> str:
        return f"batched_by({name_of(self.size_fn)}, {self.max_size})"

    def run(self, block: Block, ctx: Context) -> Block:
        """Collate the group."""
        return _batch(block, self.collate, ctx)


@dataclass(frozen=True)
class LateShuffle(GroupStage):
    """``shuffle(window)`` after a stage that makes or joins items: permutes windows of the stream."""

    window: int

    keeps_count = True

    @property
    def name(self) -> str:
        return "shuffle"

    @property
    def capacity(self) -> float:
        return self.window

    def describe(self) -> str:
        return f"shuffle(window={self.window})"

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def run(self, block: Block, ctx: Context) -> Block:
        """Permute the group by where it began, so that whoever replays it gets the same permutation."""
        start = block.origin.cursor(0, 0).marks()
        order = permute(fold(ctx.seed, ctx.epoch, 5, ctx.place, *start), len(block), np.arange(len(block)))
        return block.keep(order, pick_rows(block.items, order))


@dataclass(frozen=True)
class StreamLimit(StreamStage):
    """``limit(n)`` where the count is not known before: the first n that come."""

    n: int

    @property
    def name(self) -> str:
        return "limit"

    def describe(self) -> str:
        return f"limit({self.n})"

    def length(self, items: int) -> int | None:
        """At most n."""
        return min(items, self.n)

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def pass_on(self, block: Block, seen: int) -> Block:
        """The items below n."""
        left = max(0, self.n - seen)
        return block if len(block) <= left else block.first(left)

    def finished(self, seen: int) -> bool:
        """After n items nothing more comes."""
        return seen >= self.n


@dataclass(frozen=True)
class StreamSkip(StreamStage):
    """``skip(n)`` where the count is not known before: without the first n that come."""

    n: int

    @property
    def name(self) -> str:
        return "skip"

    def describe(self) -> str:
        return f"skip({self.n})"

    def length(self, items: int) -> int | None:
        """All but n."""
        return max(0, items - self.n)

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def pass_on(self, block: Block, seen: int) -> Block:
        """The items from n on."""
        gone = min(len(block), max(0, self.n - seen))
        return block.keep(np.arange(gone, len(block)), block.items[gone:]) if gone else block
