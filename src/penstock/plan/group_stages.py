"""The stages that see more than one item: batches, windows of the stream, and limits that count its items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.order import fold, permute
from penstock.plan.block import Block, Context
from penstock.plan.collation import collate, uncollate
from penstock.plan.columns import Columns, pick_rows
from penstock.plan.stage import FlatMap, GroupStage, StreamStage
from penstock.plan.values import Fields, Recut, check_callable, check_count, check_flag, name_of


@dataclass(frozen=True)
class Unbatched(FlatMap):
    """``unbatched()``: splits batches into their samples."""

    def function(self, ctx: Context) -> Callable[..., Any]:
        return uncollate

    def needs(self, after: Fields) -> Fields:
        return after


@dataclass(frozen=True)
class Batched(GroupStage):
    """``batched(64)``: joins this many consecutive samples into a batch."""

    batch_size: int
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None

    recut = Recut.REGROUP

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", check_count("batch_size", self.batch_size, least=1))
        check_flag("drop_last", self.drop_last)
        if self.collate is not None:
            check_callable("collate", self.collate)

    @property
    def capacity(self) -> float:
        return self.batch_size

    def describe(self) -> str:
        options = ", drop_last=True" if self.drop_last else ""
        options += f", collate={name_of(self.collate)}" if self.collate else ""
        return f"batched({self.batch_size}{options})"

    def needs(self, after: Fields) -> Fields:
        return after

    def length(self, items: int) -> int | None:
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def run(self, block: Block, ctx: Context) -> Block:
        if self.drop_last and len(block.items) < self.batch_size:
            return block.keep([], [])
        return _collate_group(block, self.collate, ctx)


def _collate_group(block: Block, join: Callable[[Any], Any] | None, ctx: Context) -> Block:
    """Return a block with one item, collated from all items; its key is derived from the key of the first one."""
    items = block.items
    if join is None:
        collated = collate(items, ctx.stack)
    elif isinstance(items, Columns) and not getattr(join, "columnar", False):
        collated = join(list(items))  # a user's function expects a list of samples
    else:
        collated = join(items)
    batch = block.keep([0], [collated])
    batch.keys = np.array([fold(int(block.keys[0]), 7)], np.uint64)
    return batch


@dataclass(frozen=True)
class BatchedBy(GroupStage):
    """``batched_by(size_fn, max_size)``: joins as many samples as fit; one that is too large is a batch by itself."""

    size_fn: Callable[[Any], float]
    max_size: float
    collate: Callable[[list[Any]], Any] | None = None

    weighs = True

    def __post_init__(self) -> None:
        check_callable("batched_by", self.size_fn)
        if isinstance(self.max_size, bool) or not isinstance(self.max_size, Real) or not self.max_size > 0:
            raise PlanError(f"max_size={self.max_size!r}: expected a number above 0")
        if self.collate is not None:
            check_callable("collate", self.collate)

    @property
    def name(self) -> str:
        return "batched_by"

    @property
    def capacity(self) -> float:
        return self.max_size

    def weigh(self, item: Any) -> float:
        size = float(self.size_fn(item))
        if not size >= 0:
            raise ValueError(f"{name_of(self.size_fn)} returned {size}: return a number of at least 0")
        return size

    def describe(self) -> str:
        return f"batched_by({name_of(self.size_fn)}, {self.max_size})"

    def run(self, block: Block, ctx: Context) -> Block:
        return _collate_group(block, self.collate, ctx)


@dataclass(frozen=True)
class LateShuffle(GroupStage):
    """``shuffle(window)`` after a stage that multiplies or joins items: permutes windows of the stream."""

    window: int

    recut = Recut.WINDOW
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
        return after

    def run(self, block: Block, ctx: Context) -> Block:
        """Permute the group, keyed by the cursor at its beginning, so that a replay has the same permutation."""
        start = block.lineage.origin.cursor(0, 0).hash_words()
        order = permute(fold(ctx.seed, ctx.epoch, 5, ctx.stage_number, *start), len(block), np.arange(len(block)))
        return block.keep(order, pick_rows(block.items, order))


@dataclass(frozen=True)
class StreamLimit(StreamStage):
    """``limit(n)`` where the count is not known in advance: passes the first n items of the stream."""

    n: int

    ends_stream = True

    @property
    def name(self) -> str:
        return "limit"

    def describe(self) -> str:
        return f"limit({self.n})"

    def length(self, items: int) -> int | None:
        return min(items, self.n)

    def needs(self, after: Fields) -> Fields:
        return after

    def pass_on(self, block: Block, seen: int) -> Block:
        remaining = max(0, self.n - seen)
        # Even if all items pass: what failed after the last one is not reached.
        return block if len(block) < remaining else block.first(remaining)

    def finished(self, seen: int) -> bool:
        return seen >= self.n


@dataclass(frozen=True)
class StreamSkip(StreamStage):
    """``skip(n)`` where the count is not known in advance: drops the first n items of the stream."""

    n: int

    @property
    def name(self) -> str:
        return "skip"

    def describe(self) -> str:
        return f"skip({self.n})"

    def length(self, items: int) -> int | None:
        return max(0, items - self.n)

    def needs(self, after: Fields) -> Fields:
        return after

    def pass_on(self, block: Block, seen: int) -> Block:
        skipped = min(len(block), max(0, self.n - seen))
        return block.keep(np.arange(skipped, len(block)), block.items[skipped:]) if skipped else block
