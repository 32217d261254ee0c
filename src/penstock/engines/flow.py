"""How blocks flow: cut from the order, through segments, collected into groups. Shared by the engines.

An engine says only how a segment's blocks are worked on (``each``); what a stream means, and where it stands after any
item, is settled here once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from penstock.engines.cursor import Start
from penstock.engines.grouping import Grouping, take_skips
from penstock.engines.lineage import Passed, nothing
from penstock.engines.meter import Meter, Meters
from penstock.engines.program import Program, Segment
from penstock.engines.read_stage import Held, Span
from penstock.order import I64, Order, Piece, Refs, fold_into
from penstock.plan import (
    Block,
    GroupStage,
    Located,
    PlacedStage,
    Skipped,
    Slice,
    StreamStage,
)
from penstock.storage.retry import while_wanted

Each = Callable[[Iterator[Block], Segment], Iterator[Block]]
Find = Callable[[Refs], Located]


MOST = 512  # samples a block
WIDE, WIDE_BYTES = 8192, 4_000_000  # the same where samples are columns, which cost by the block and not by the row


@dataclass(slots=True)
class BlockSizer:
    """How large blocks are: small at first, then bounded by number and bytes, and by what they turn out to cost."""

    count: int = 16
    most: int = MOST
    least: int = 1  # what a stage that works on several rows at once would like
    nbytes: int = 500_000  # raw bytes: larger blocks fall out of the processor's cache
    large: int = 16_000_000  # bytes of what comes out
    seconds: float = 0.05  # of work: what a close may have to wait for
    ceiling: int = MOST  # what ``most`` may grow to
    limits: list[SizeLimit] = field(default_factory=list)

    def cuts(self, sizes: I64) -> Iterator[tuple[int, int]]:
        """Cut a chunk of samples of these sizes into blocks."""
        ends = np.cumsum(sizes)
        low = 0
        while low < len(sizes):
            budget = (int(ends[low - 1]) if low else 0) + self.nbytes
            fits = int(np.searchsorted(ends, budget, "right"))
            high = min(low + max(self.count, self.least), max(fits, low + 1), len(sizes))
            yield low, high
            low = high
            self.count = min(self.most, self.count * 2)

    def limit(self) -> SizeLimit:
        """A limit of its own for one of those who work on the blocks."""
        limit = SizeLimit(self, self.most)
        self.limits.append(limit)
        return limit

    def settle(self) -> None:
        """Take the tightest limit: every block passes them all."""
        self.most = min(limit.most for limit in self.limits)
        self.count = min(self.count, self.most)


@dataclass(slots=True)
class SizeLimit:
    """How many samples a block may have for one of those who work on it."""

    pace: BlockSizer
    most: int

    def measured(self, inputs: int, seconds: float, nbytes: int) -> None:
        """Learn from a finished block: none should take long or grow large."""
        if inputs:
            costly = max(seconds / self.pace.seconds, nbytes / self.pace.large)
            if costly > 1:
                self.most = max(1, int(inputs / costly))
            elif costly < 0.25:
                self.most = min(self.pace.ceiling, max(self.most, 2 * inputs))
            self.pace.settle()


def flow(
    program: Program,
    order: Order | None,
    epoch: int,
    start: Start,
    each: Each,
    pace: BlockSizer,
    meters: Meters,
    find: Find | None = None,
) -> Iterator[Block]:
    """The blocks that come out at the end of the plan.

    ``order`` is ``None`` for a stream. A block with an error is the last one. ``find`` takes the place of looking for
    samples where that is left to whoever reads them.
    """
    first = blocks = _stream(program) if order is None else walk(program, order, start, pace, find)
    for number, level in enumerate(program.levels):
        if level.head is not None:
            meter = Meter(level.head.stage.describe(), "inline")
            meters.segments.append(meter)
            blocks = _headed(program, _starving(blocks, meter), level.head, number, epoch, start)
            blocks = _busy(blocks, meter)
        for segment in level.segments:
            blocks = each(blocks, segment)
        blocks = finish_level(blocks)
    return _ended(blocks, first)


def _ended(blocks: Iterator[Block], first: Iterator[Block]) -> Iterator[Block]:
    """The blocks; when they end, however that is, nothing is looked for any more.

    Whoever keeps an error keeps the frames it came through, and what they hold would go on.
    """
    try:
        yield from blocks
    finally:
        if isinstance(first, Generator):
            first.close()


def _starving(blocks: Iterator[Block], meter: Meter) -> Iterator[Block]:
    """The blocks, with the time it takes to get them counted as waiting for input."""
    while True:
        begun = time.perf_counter()
        block = next(blocks, None)
        meter.starved += time.perf_counter() - begun
        if block is None:
            return
        yield block
        del block


def _busy(blocks: Iterator[Block], meter: Meter) -> Iterator[Block]:
    """The blocks, with the time it takes to make them, but for waiting, counted as busy."""
    while True:
        begun, starved = time.perf_counter(), meter.starved
        block = next(blocks, None)
        meter.busy += time.perf_counter() - begun - (meter.starved - starved)
        if block is None:
            return
        meter.blocks += 1
        meter.items += len(block)
        yield block
        del block


def finish_level(blocks: Iterator[Block]) -> Iterator[Block]:
    """The end of a level: leave out what was delivered before this run, and number the parts of an input on."""
    midway = False
    due = given = 0  # of the input that blocks are in the middle of: outputs to leave out, outputs so far
    skips: list[Skipped] = []
    for block in blocks:
        if not midway:
            due, given = block.base, 0
        if gone := min(due, block.outputs_of(block.begin)) if due else 0:
            block = block.keep(np.arange(gone, len(block)), block.items[gone:])
        due, given = due - gone, given + gone
        block.base, block.skips, skips = given, skips + block.skips, []
        midway = block.more
        if midway:
            ours = block.outputs_of(block.inputs)
            due, given = (due, given + ours) if block.inputs == block.begin else (0, ours)
            skips = [skip for skip in block.skips if skip.input >= block.inputs]
            block.skips = take_skips(block, block.inputs)
        yield block


def _headed(
    program: Program, blocks: Iterator[Block], placed: PlacedStage, number: int, epoch: int, start: Start
) -> Iterator[Block]:
    if isinstance(placed.stage, StreamStage):
        _, sub = start.groups.get(number, (0, 0))
        return streamed(blocks, placed.stage, number, start.seen.get(number, 0), sub)
    assert isinstance(placed.stage, GroupStage)
    return Grouping(program, placed, placed.stage, number, epoch, start).run(blocks)


def walk(program: Program, order: Order, start: Start, pace: BlockSizer, find: Find | None = None) -> Iterator[Block]:
    """Cut the positions to come into blocks of found samples."""
    parts = start.parts()
    padding = start.padded_from()
    readers = program.readers
    for part, stretch in enumerate(parts):
        for number, piece in enumerate(stretch.pieces):
            sub = piece[3]
            padded = part == len(parts) - 1 and number >= padding
            for (positions, refs, after), spots in _located(program, order, piece, find):
                for low, high in pace.cuts(spots.nbytes):
                    cut = slice(low, high)
                    following = int(positions[high]) if high < len(positions) else after
                    origin = Span(
                        part,
                        number,
                        positions[cut],
                        following,
                        refs.take(cut),
                        readers,
                        spots.take(cut),
                        padded,
                    )
                    yield Block([], origin.refs.key, origin, high - low, base=sub)
                    sub = 0
        if part < len(parts) - 1:
            yield nothing(ends_part=True)


def _located(
    program: Program, order: Order, piece: Piece, find: Find | None
) -> Iterator[tuple[tuple[I64, Refs, int], Located]]:
    """The chunks of a piece and where their samples lie; far away, those to come are looked for in the meantime."""

    if find is not None:
        return ((chunk, find(chunk[1])) for chunk in order.walk(piece))
    if not program.remote:
        return ((chunk, program.locate(chunk[1])) for chunk in order.walk(piece))
    reach = _Reach()

    def found(chunk: tuple[I64, Refs, int]) -> Located:
        spots = program.locate(chunk[1])
        reach.learn(spots.nbytes)
        return spots

    return ahead(order.walk(piece, reach.sizes()), found)


@dataclass(slots=True)
class _Reach:
    """How many samples are looked for at once where that takes time: few, then as many as shall be on their way."""

    many: int = 16  # of as many shards: they are opened as quickly as one
    nbytes: int = 256 << 20

    def sizes(self) -> Iterator[int]:
        while True:
            yield self.many

    def learn(self, sizes: I64) -> None:
        self.many = max(16, min(8192, int(self.nbytes / max(1.0, float(sizes.mean())))))


def _stream(program: Program) -> Iterator[Block]:
    """Blocks of a source that is read once: its position is its number."""
    assert program.stream is not None
    low, high = 0, 1 << 62
    for stage in program.plan.ordering:
        assert isinstance(stage, Slice)
        low, high = low + stage.start, high if stage.stop is None else min(high, low + stage.stop)
    samples = islice(program.stream.stream(program.fields[0]), low, high)
    count = 1  # the first sample at once, later ones in larger blocks
    while found := list(islice(samples, count)):
        index = np.arange(low, low + len(found), dtype=np.int64)
        zero: I64 = np.zeros(len(found), np.int64)
        refs = Refs(zero, zero, index, fold_into(np.full(len(found), program.seed, np.uint64), index))
        held = Held([s for s, _ in found], {i: error for i, (_, error) in enumerate(found) if error}, zero)
        low += len(found)
        yield Block([], refs.key, Span(0, 0, index, low, refs, [], held), len(found))
        count = min(64, 2 * count)


def streamed(blocks: Iterator[Block], stage: StreamStage, level: int, seen: int, sub: int) -> Iterator[Block]:
    """Take a stream through a stage that counts it; ``sub`` outputs of its first item are out already."""
    if stage.finished(seen):
        return
    for block in blocks:
        origin = Passed(level, block, seen)
        base, sub = (sub, 0) if block.items else (0, sub)
        over = Block(block.items, block.keys, origin, len(block), None, block.error, _by_item(block), base)
        seen += len(block)
        yield stage.pass_on(over, seen - len(block))
        if stage.finished(seen):
            return


def _by_item(block: Block) -> list[Skipped]:
    """The skips of a block by the last item before them, where its items are the inputs of what follows."""
    owner = np.arange(len(block)) if block.owner is None else block.owner
    return [skip._replace(input=int(np.searchsorted(owner, skip.input, "right")) - 1) for skip in block.skips]


_A = TypeVar("_A")
_B = TypeVar("_B")


def ahead(things: Iterable[_A], find: Callable[[_A], _B]) -> Iterator[tuple[_A, _B]]:
    """Give things and what was found for each, finding the next in advance in a thread of its own.

    What fails is raised where it stands. When the iterator is closed the thread ends after what it is at.
    """
    scout = _Scout(things, find)
    scout.start()
    try:
        yield from scout.found()
    finally:
        scout.end()


class _Scout(threading.Thread, Generic[_A, _B]):
    """Finds, and waits until what it found is taken."""

    def __init__(self, things: Iterable[_A], find: Callable[[_A], _B]) -> None:
        super().__init__(name="penstock ahead", daemon=True)
        self._things, self._find = things, find
        self._changed = threading.Condition()
        self._ready: tuple[_A, _B] | None = None
        self._error: BaseException | None = None
        self._done = self._over = False

    def run(self) -> None:
        try:
            with while_wanted(lambda: not self._over):
                for thing in self._things:
                    if not self._hand_over((thing, self._find(thing))):
                        return
        except BaseException as error:  # it is the reader's, who will come to it
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _hand_over(self, pair: tuple[_A, _B]) -> bool:
        """Whether more is wanted."""
        with self._changed:
            self._ready = pair
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._ready is None)
            return not self._over

    def found(self) -> Iterator[tuple[_A, _B]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready is not None or self._done)
                pair, self._ready = self._ready, None
                self._changed.notify_all()
            if pair is None:
                break
            yield pair
            del pair
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._ready = None
            self._changed.notify_all()
        self.join(0.5)  # it may be waiting for a server that says nothing
