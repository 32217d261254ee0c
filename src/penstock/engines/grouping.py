"""Collects the items of a stream into groups and runs a group stage on each; cursors can point inside a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.engines.batch_memory import BatchMemory
from penstock.engines.cursor import AnyCursor, Start
from penstock.engines.lineage import GroupOrigin, ItemLineage, empty_block
from penstock.engines.program import Program
from penstock.errors import DataError, PenstockError, StageError, message_of
from penstock.order import ENDLESS, I64, U64
from penstock.plan import Block, Context, GroupStage, Lineage, Map, Origin, PlacedStage, Skipped, join_columns

_BLOCK_ITEMS = 256  # outputs of a group in one block


@dataclass(frozen=True)
class _Weigh(Map):
    """Turns every item into (weight, item): as a stage, so that a failing ``weigh`` is handled like any failure."""

    stage: GroupStage

    @property
    def name(self) -> str:
        return self.stage.name

    def describe(self) -> str:
        return self.stage.describe()

    def function(self, ctx: Context) -> Callable[[Any], tuple[float, Any]]:
        return lambda item: (self.stage.weigh(item), item)


def take_skips(block: Block, until: int) -> tuple[Skipped, ...]:
    """Remove the skipped samples before input ``until`` from a block, and return them."""
    skips, block.lineage = block.lineage.split_skips(until)
    return skips


def _failed(origin: Origin, error: Exception) -> Block:
    """Return a block without items that ends the stream with an error."""
    return Block([], np.zeros(0, np.uint64), Lineage(origin, 0, error=error))


@dataclass(slots=True)
class Grouping:
    """Collects items into groups and runs a stage on each; its buffer is empty between groups."""

    program: Program
    placed: PlacedStage
    stage: GroupStage
    level: int
    epoch: int
    begin: Start
    buffer: list[Sequence[Any]] = field(default_factory=list)  # the items of the group, block by block
    count: int = 0  # of the items in the buffer
    keys: list[U64] = field(default_factory=list)
    members: list[ItemLineage] = field(default_factory=list)
    skips: tuple[Skipped, ...] = ()  # between the first and the last item of the buffer
    skips_before: tuple[Skipped, ...] = ()  # before the first item
    skips_after: tuple[Skipped, ...] = ()  # after the last item
    weight: float = 0  # of the items in the buffer
    weights: list[float] = field(default_factory=list)  # of the items of the current block
    start: AnyCursor | None = None
    end: AnyCursor | None = None
    part: int = 0
    is_first: bool = True  # no group has been emitted yet
    memory: BatchMemory = field(default_factory=BatchMemory)
    ctx: Context = field(init=False)

    def __post_init__(self) -> None:
        # The key of a group's permutation depends on the groups before it, which are part of a state's identity, and
        # not on the stages before it, which may change between two runs.
        self.ctx = replace(self.program.context(self.placed, self.epoch), stage_number=self.level)
        self.ctx.stack = self.memory.stacked

    def run(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """Yield the outputs of the groups, in order; a group that an error cuts short is not run."""
        for block in blocks:
            if self.stage.weighs:
                block = self._weighed(block)
            yield from self._add(block)
            lineage = block.lineage
            if self.begin.traced and not block.items and lineage.error is None:
                yield empty_block(block)
            if lineage.error is not None:
                yield _failed(lineage.origin, lineage.error)
                return
            if lineage.ends_part:
                if self.count:
                    yield from self._emit()
                self.part += 1
        if self.count:
            yield from self._emit()
        if self.skips_after:
            last = empty_block()
            last.lineage = last.lineage.with_skips(*self.skips_after)
            yield last

    def _weighed(self, block: Block) -> Block:
        """Compute the weights of a block's items; return the block without those whose weighing failed."""
        pairs = _Weigh(self.stage).run(block, self.ctx)
        self.weights = [weight for weight, _ in pairs.items]
        return pairs.with_items([item for _, item in pairs.items])

    def _add(self, block: Block) -> Iterator[Block]:
        low = 0
        while low < len(block):
            room = self._room()
            if room is not None and room <= 0:
                break
            high, full = self._fit(block, low, room)
            if high > low:
                self._join(block, low, high)
            low = high
            if full:
                yield from self._emit()
        if self._room() != 0:  # skips after a full open window belong to the part that follows
            self.skips_after += take_skips(block, ENDLESS)

    def _join(self, block: Block, low: int, high: int) -> None:
        skips = self.skips_after + take_skips(block, block.lineage.input_of(low))
        self.skips_after = ()
        if self.count:
            self.skips += skips
        else:
            self.start, self.skips_before = block.cursor(low), skips
        self.buffer.append(block.items[low:high])
        self.count += high - low
        self.keys.append(block.keys[low:high])
        self.members.append(ItemLineage(block.lineage, low, high, with_gaps=low == 0))
        self.end, until = block.cursor_after(high - 1)
        self.skips += take_skips(block, until)

    def _room(self) -> int | None:
        """Return how many items an open window still lacks; None if this is not an open window."""
        opens = self.begin.opens if self.level == self.program.window_level else ()
        if self.part >= len(opens):
            return None
        size = opens[self.part].n or 0
        return size - self.count

    def _fit(self, block: Block, low: int, room: int | None) -> tuple[int, bool]:
        """Return the end of the group's items in the block, and whether the group is then complete."""
        if room is not None:
            return min(len(block), low + room), False
        if not self.stage.weighs:
            high = min(len(block), low + int(self.stage.capacity) - self.count)
            return high, self.count + high - low >= self.stage.capacity
        count = self.count
        for high in range(low, len(block)):
            weight = self.weights[high]
            if count and self.weight + weight > self.stage.capacity:
                return high, True
            self.weight += weight
            count += 1
        return len(block), False

    def _emit(self) -> Iterator[Block]:
        assert self.start is not None
        assert self.end is not None
        n = self.count
        whole = not self.stage.keeps_count
        origin = GroupOrigin(self.level, self.start, self.end, n, self.members, whole, n)
        keys = np.concatenate(self.keys)
        group = Block(join_columns(self.buffer), keys, Lineage(origin, n))
        skips_before, skips, self.skips_before, self.skips = self.skips_before, self.skips, (), ()
        self.buffer, self.count, self.keys, self.members, self.weight, self.start = [], 0, [], [], 0, None
        out = self._run_stage(group)
        if out.lineage.error is not None:
            yield _failed(origin, out.lineage.error)
            return
        origin.total, origin.owner = len(out), out.lineage.owner
        yield from self._blocks(out, origin, skips_before, skips + out.lineage.skips)

    def _run_stage(self, group: Block) -> Block:
        try:
            return self.stage.run(group, self.ctx)
        except Exception as exc:
            place = group.place(0)
            error: PenstockError
            if isinstance(exc, DataError):
                error = DataError(exc.problem, exc.shard or place.shard, exc.key or place.key)
            else:
                error = StageError(message_of(exc), self.stage.describe(), place.key, place.shard)
            error.__cause__ = exc
            if not self.ctx.skip:
                return _failed(group.lineage.origin, error)
            skipped = group.keep([], [])
            skipped.lineage = skipped.lineage.with_skips(Skipped(0, place, self.stage.name, str(error)))
            return skipped

    def _blocks(
        self, out: Block, origin: GroupOrigin, skips_before: tuple[Skipped, ...], skips: tuple[Skipped, ...]
    ) -> Iterator[Block]:
        """Cut the outputs into blocks, without those that were delivered before this run."""
        done, sub = self._delivered_before()
        low = min(done, len(out))
        block_skips = tuple(skip._replace(input=-1) for skip in skips_before)
        if not len(out):  # one input without output, so that the cursor passes the group
            none: I64 = np.zeros(0, np.int64)
            yield Block([], out.keys[:0], Lineage(origin, 1, none, block_skips + skips))
            return
        while True:
            high = min(len(out), low + _BLOCK_ITEMS)
            block_origin = replace(origin, offset=low) if low else origin
            if last := high == len(out):
                block_skips += tuple(skip._replace(input=high - low - 1) for skip in skips)
            lineage = Lineage(block_origin, high - low, None, block_skips, base=sub)
            yield Block(out.items[low:high], out.keys[low:high], lineage)
            low, sub, block_skips = high, 0, ()
            if last:
                return

    def _delivered_before(self) -> tuple[int, int]:
        """Return the outputs and sub-outputs of this group that were delivered before this run.

        Only the first group and open windows can have been delivered in part.
        """
        if self.level == self.program.window_level:
            opens = self.begin.opens
            return (opens[self.part].done, opens[self.part].sub) if self.part < len(opens) else (0, 0)
        first, self.is_first = self.is_first, False
        return self.begin.groups.get(self.level, (0, 0)) if first else (0, 0)
