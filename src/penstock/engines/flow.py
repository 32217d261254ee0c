"""The flow of blocks, shared by all engines: cut from the order, passed through segments, collected into groups.

An engine defines only how the blocks of a segment are run (``each``). What a plan yields, and the cursor after any
item, is the same on all engines and is determined here.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.engines.batch_memory import BatchMemory, BlockRows
from penstock.engines.cursor import Start
from penstock.engines.grouping import Grouping
from penstock.engines.joining import join_blocks
from penstock.engines.lineage import (
    DELIVERED,
    KIND,
    PADDED,
    PASSED,
    CountedOrigin,
    GroupOrigin,
    ItemLineage,
    empty_block,
)
from penstock.engines.meter import Meter, Meters
from penstock.engines.program import Program
from penstock.engines.read_stage import BufferedSamples, Finder, PieceRows, Span
from penstock.engines.segments import Segment
from penstock.order import GROUP_STRIDE, I64, Order, Piece, Refs, UncountedOrder, fold_into
from penstock.order.orders import doubling_sizes
from penstock.plan import (
    PAD_FIELD,
    Block,
    GroupStage,
    Lineage,
    Located,
    Origin,
    PlacedStage,
    Skipped,
    StreamStage,
)
from penstock.storage.retry import while_wanted

Each = Callable[[Iterator[Block], Segment], Iterator[Block]]
Locate = Callable[[Refs], Located]

MAX_SAMPLES = 512  # of a block
COLUMN_BLOCK_ROWS = 16_384  # maximum of a block of columns, whose cost is per block, not per row
JOIN_BYTES = 1_000_000_000  # held back to give a stage the rows that it asks for
COLUMN_BLOCK_BYTES = 4_000_000  # maximum of stored bytes in such a block


@dataclass(slots=True)
class BlockSizer:
    """Decides how many samples a block has: few at first, then as many as the bounds and the measured cost allow.

    Attributes:
        count: The number of samples of the next block.
        max_samples: The maximum number of samples of a block; measurements change it.
        min_samples: The minimum, for stages that process several rows in one call.
        max_stored_bytes: The maximum number of stored bytes: larger blocks do not fit into the processor's cache.
        max_output_bytes: The maximum size of the outputs.
        max_seconds: The maximum duration of the work: closing a run may have to wait for a block.
        ceiling: The value up to which ``max_samples`` may grow.
        limits: The limit of each segment that works on the blocks.
    """

    count: int = 16
    max_samples: int = MAX_SAMPLES
    min_samples: int = 1
    max_stored_bytes: int = 500_000
    max_output_bytes: int = 16_000_000
    max_seconds: float = 0.05
    ceiling: int = MAX_SAMPLES
    limits: list[SizeLimit] = field(default_factory=list)

    def cuts(self, sizes: I64) -> Iterator[tuple[int, int]]:
        """Cut samples of these sizes into blocks; yield the start and stop of each."""
        ends = np.cumsum(sizes)
        low = 0
        while low < len(sizes):
            budget = (int(ends[low - 1]) if low else 0) + self.max_stored_bytes
            fits = bisect_right(ends, budget, low)  # numpy's search would let go of the interpreter for each block
            high = min(low + max(self.count, self.min_samples), max(fits, low + 1), len(sizes))
            yield low, high
            low = high
            self.count = min(self.max_samples, self.count * 2)

    def limit(self) -> SizeLimit:
        """Return a new limit, for one segment that works on the blocks."""
        limit = SizeLimit(self, self.max_samples)
        self.limits.append(limit)
        return limit

    def apply_limits(self) -> None:
        """Apply the tightest limit: every block passes all segments."""
        self.max_samples = min(limit.max_samples for limit in self.limits)
        self.count = min(self.count, self.max_samples)


@dataclass(slots=True)
class SizeLimit:
    """The maximum number of samples of a block for one segment."""

    sizer: BlockSizer
    max_samples: int

    def adjust(self, inputs: int, seconds: float, nbytes: int) -> None:
        """Adjust the limit to the cost of a finished block, so that no block takes too long or grows too large."""
        if inputs:
            # A cost of 1 is the maximum for one block.
            cost = max(seconds / self.sizer.max_seconds, nbytes / self.sizer.max_output_bytes)
            if cost > 1:
                self.max_samples = max(1, int(inputs / cost))
            elif cost < 0.25:
                self.max_samples = min(self.sizer.ceiling, max(self.max_samples, 2 * inputs))
            self.sizer.apply_limits()


def flow(
    program: Program,
    order: Order | None,
    epoch: int,
    start: Start,
    each: Each,
    sizer: BlockSizer,
    meters: Meters,
    locate: Locate | None = None,
    join_bytes: int = JOIN_BYTES,
) -> Iterator[Block]:
    """Return the blocks that the last stage of a plan outputs.

    Args:
        program: The plan with its sources open.
        order: The order of the epoch; None for a stream.
        epoch: The number of the epoch.
        start: Where the run begins.
        each: Runs the blocks of a segment.
        sizer: Decides how large blocks are.
        meters: Receives a meter for every stage that is the head of a level.
        locate: Replaces the program's finder, if the workers that read the samples also locate them.
        join_bytes: The most bytes that are held back to give a stage the number of rows that it asks for.

    What fails is not raised: the last block carries it, so that what came before it is delivered first.
    """
    memory = BatchMemory()
    first = _stream(program) if order is None else walk(program, order, start, sizer, locate)
    blocks = _until_error(first)
    if batch_size := _known_batch_size(program):
        blocks = _with_rows(blocks, memory, batch_size)
    for number, level in enumerate(program.levels):
        if level.head is not None:
            meter = Meter(level.head.stage.describe(), "inline")
            meters.segments.append(meter)
            head_memory = memory if number == 1 else BatchMemory()
            blocks = _run_head(program, _count_starved(blocks, meter), level.head, number, epoch, start, head_memory)
            blocks = _count_busy(blocks, meter)
        for segment in level.segments:
            if segment.rows > 1:
                blocks = join_blocks(blocks, segment.rows, join_bytes, segment.describe())
            blocks = each(blocks, segment)
        blocks = finish_level(blocks)
        if start.pad is not None:
            blocks = _mark_padding(blocks)
    return _closing(blocks, first)


def _closing(blocks: Iterator[Block], first: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks, and close the iterator that locates samples when they end for any reason.

    A stored exception keeps its frames alive, and with them a lookahead thread that would keep running.
    """
    try:
        yield from blocks
    finally:
        if isinstance(first, Generator):
            first.close()


def _until_error(blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks; if the order cannot be walked, or samples cannot be located, the last one carries the error."""
    try:
        yield from blocks
    except Exception as error:
        yield empty_block(error=error)


def _count_starved(blocks: Iterator[Block], meter: Meter) -> Iterator[Block]:
    """Yield the blocks, and count the time until each as time without input."""
    while True:
        begun = time.perf_counter()
        block = next(blocks, None)
        meter.starved += time.perf_counter() - begun
        if block is None:
            return
        yield block
        del block


def _count_busy(blocks: Iterator[Block], meter: Meter) -> Iterator[Block]:
    """Yield the blocks, and count the time until each, without the starved part of it, as busy."""
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
    """End a level: drop outputs that were delivered before this run, and number outputs of an input across blocks."""
    midway = False  # the last block ended inside an input
    to_drop = outputs_before = 0  # outputs of that input: still to drop, and in earlier blocks
    skips: tuple[Skipped, ...] = ()
    for block in blocks:
        lineage = block.lineage
        if not midway:
            to_drop, outputs_before = lineage.base, 0
        if dropped := min(to_drop, block.outputs_of(lineage.begin)) if to_drop else 0:
            block = block.keep(np.arange(dropped, len(block)), block.items[dropped:])
        to_drop, outputs_before = to_drop - dropped, outputs_before + dropped
        if skips or outputs_before != lineage.base:
            block.lineage = replace(block.lineage, base=outputs_before, skips=skips + lineage.skips)
        skips, midway = (), lineage.more
        if midway:
            outputs = block.outputs_of(lineage.inputs)
            same_input = lineage.inputs == lineage.begin
            to_drop, outputs_before = (to_drop, outputs_before + outputs) if same_input else (0, outputs)
            complete, unfinished = block.lineage.split_skips(lineage.inputs)
            skips, block.lineage = unfinished.skips, replace(unfinished, skips=complete)
        yield block


def _mark_padding(blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks with padding marked, because a function that returns a new dict drops the mark."""
    for block in blocks:
        origin = block.lineage.origin
        if len(block) and _has_padding(origin):
            column = isinstance(origin, GroupOrigin) and origin.whole
            lineages = (ItemLineage(block.lineage, n, n + 1, with_gaps=False) for n in range(len(block)))
            marked = [_marked(item, lineage, column) for item, lineage in zip(block.items, lineages, strict=True)]
            block = block.with_items(marked)
        yield block


def _has_padding(origin: Origin) -> bool:
    """Return whether a block may have padding, which is the end of a stream."""
    while isinstance(origin, GroupOrigin | CountedOrigin):
        origin = origin.members[-1].origin if isinstance(origin, GroupOrigin) else origin.block.lineage.origin
    return isinstance(origin, Span) and any(run.padding for run in origin.runs)


def _marked(item: Any, lineage: ItemLineage, column: bool) -> Any:
    """Return an item with the mark of padding, which is a column in a batch, unless it has one."""
    if not isinstance(item, dict) or PAD_FIELD in item:
        return item
    kinds = lineage.trace(DELIVERED)[KIND]
    padded = kinds[kinds != PASSED] == PADDED
    return {**item, PAD_FIELD: padded if column else True} if padded.any() else item


def _run_head(
    program: Program,
    blocks: Iterator[Block],
    placed: PlacedStage,
    number: int,
    epoch: int,
    start: Start,
    memory: BatchMemory,
) -> Iterator[Block]:
    if isinstance(placed.stage, StreamStage):
        _, sub = start.groups.get(number, (0, 0))
        return run_stream_stage(blocks, placed.stage, number, start.seen.get(number, 0), sub)
    assert isinstance(placed.stage, GroupStage)
    return Grouping(program, placed, placed.stage, number, epoch, start, memory=memory).run(blocks)


def _known_batch_size(program: Program) -> int:
    """Return the size of the batches whose rows are known before they are computed; 0 if there are none."""
    source, *groups = program.levels
    keeps_count = all(placed.stage.keeps_count for segment in source.segments for placed in segment.stages)
    head = groups[0].head if groups and groups[0].regroups and keeps_count else None
    return (head.stage.group_size or 0) if head is not None else 0


def _with_rows(blocks: Iterator[Block], memory: BatchMemory, batch_size: int) -> Iterator[Block]:
    """Tell each block which rows of which batches its items will be."""
    position = 0
    for block in blocks:
        count = block.lineage.inputs
        rows = BlockRows(memory, batch_size, position, count)
        block.lineage = replace(block.lineage, rows=rows)
        position += count
        if block.lineage.ends_part:  # so does the batch
            position += -position % batch_size
        yield block


def walk(
    program: Program, order: Order, start: Start, sizer: BlockSizer, locate: Locate | None = None
) -> Iterator[Block]:
    """Yield the positions of a start as blocks of samples that are located but not read."""
    parts = start.parts()
    padding = start.padded_from()
    readers, finder = program.readers, program.finder.for_one_run()
    checked = False
    passed = _Passed(program, order)
    for part, start_part in enumerate(parts):
        for number, piece in enumerate(start_part.pieces):
            sub = piece[3]
            padded = part == len(parts) - 1 and number >= padding
            for (positions, refs, after), located in _located_chunks(program, finder, order, piece, locate):
                checked = checked or program.check_fields(refs)
                for low, high in sizer.cuts(located.nbytes):
                    cut = slice(low, high)
                    following = int(positions[high]) if high < len(positions) else after
                    runs = (PieceRows(0, part, number, following, padded),)
                    origin = Span(positions[cut], runs, refs.take(cut), readers, located.take(cut))
                    yield Block([], origin.refs.key, Lineage(origin, high - low, base=sub))
                    sub = 0
                    passed.add(positions[cut])
        if part < len(parts) - 1:
            yield empty_block(ends_part=True)


class _Passed:
    """Tells the caches of the sources how far a run has come: in positions, or in groups of uncounted shards."""

    def __init__(self, program: Program, order: Order) -> None:
        self._caches, self._uncounted = program.caches, isinstance(order, UncountedOrder)
        self._done, self._group = 0, -1

    def add(self, positions: I64) -> None:
        """Count the positions of a block."""
        if not self._caches:
            return
        if not self._uncounted:
            self._done += len(positions)
        elif (group := int(positions[-1]) // GROUP_STRIDE) != self._group:
            self._done, self._group = self._done + (self._group >= 0), group
        for cache in self._caches:
            cache.advance(self._done)


def _located_chunks(
    program: Program, finder: Finder, order: Order, piece: Piece, locate: Locate | None
) -> Iterator[tuple[tuple[I64, Refs, int], Located]]:
    """Return the chunks of a piece with their samples located; of remote sources, the next chunk in advance."""
    if locate is not None:
        return ((chunk, locate(chunk[1])) for chunk in order.walk(piece))
    if not program.remote:
        sizes = doubling_sizes(COLUMN_BLOCK_ROWS) if program.columnar else None
        return ((chunk, finder.locate(chunk[1])) for chunk in order.walk(piece, sizes))
    sizer = _ChunkSizer()

    def locate_and_learn(chunk: tuple[I64, Refs, int]) -> Located:
        located = finder.locate(chunk[1])
        sizer.learn(located.nbytes)
        return located

    return look_ahead(order.walk(piece, sizer.counts()), locate_and_learn)


@dataclass(slots=True)
class _ChunkSizer:
    """Decides how many samples of remote sources are located at once: few at first, then ``nbytes``."""

    count: int = 16  # they may be in 16 shards, which are opened as quickly as one
    nbytes: int = 256 << 20  # prefetched at a time

    def counts(self) -> Iterator[int]:
        while True:
            yield self.count

    def learn(self, sizes: I64) -> None:
        self.count = max(16, min(8192, int(self.nbytes / max(1.0, float(sizes.mean())))))


def _stream(program: Program) -> Iterator[Block]:
    """Yield the blocks of a source that can be read only once; a position is the number of a sample in the stream."""
    assert program.stream is not None
    low, high = 0, 1 << 62
    for stage in program.plan.ordering:
        assert stage.bounds is not None
        first, stop = stage.bounds
        low, high = low + first, high if stop is None else min(high, low + stop)
    samples = islice(program.stream.stream(program.fields[0]), low, high)
    count = 1  # the first sample at once, later ones in larger blocks
    while read := list(islice(samples, count)):
        index = np.arange(low, low + len(read), dtype=np.int64)
        zero: I64 = np.zeros(len(read), np.int64)
        refs = Refs(zero, zero, index, fold_into(np.full(len(read), program.seed, np.uint64), index))
        buffered = BufferedSamples([s for s, _ in read], {i: error for i, (_, error) in enumerate(read) if error}, zero)
        low += len(read)
        span = Span(index, (PieceRows(0, 0, 0, low),), refs, [], buffered)
        yield Block([], refs.key, Lineage(span, len(read)))
        count = min(64, 2 * count)


def run_stream_stage(blocks: Iterator[Block], stage: StreamStage, level: int, seen: int, sub: int) -> Iterator[Block]:
    """Run a stage that counts the stream on its blocks.

    Args:
        blocks: The stream.
        stage: The stage.
        level: The number of the level that the stage is the head of.
        seen: How many items the stage has seen before this run.
        sub: How many of the outputs that later stages make of the first item were delivered before this run.
    """
    if stage.finished(seen):
        return
    for block in blocks:
        origin = CountedOrigin(level, block, seen)
        base, sub = (sub, 0) if block.items else (0, sub)
        lineage = Lineage(origin, len(block), None, _skips_by_item(block), block.lineage.error, base=base)
        counted = Block(block.items, block.keys, lineage)
        seen += len(block)
        yield stage.pass_on(counted, seen - len(block))
        if stage.finished(seen):
            return


def _skips_by_item(block: Block) -> tuple[Skipped, ...]:
    """Return the skips of a block with the number of the item before them in place of their input."""
    owner, skips = block.lineage.owners(len(block)), block.lineage.skips
    return tuple(skip._replace(input=int(np.searchsorted(owner, skip.input, "right")) - 1) for skip in skips)


_T = TypeVar("_T")
_U = TypeVar("_U")


def look_ahead(values: Iterable[_T], compute: Callable[[_T], _U]) -> Iterator[tuple[_T, _U]]:
    """Yield every value with the result of ``compute``; a thread computes the next pair while one is being used.

    An exception of ``values`` or ``compute`` is raised after the pairs before it. When the iterator is closed, the
    thread ends after its current call.
    """
    thread = _LookaheadThread(values, compute)
    thread.start()
    try:
        yield from thread.pairs()
    finally:
        thread.end()


class _LookaheadThread(threading.Thread, Generic[_T, _U]):
    """Computes one pair at a time, and waits until it is taken.

    Its queues are locked by the interpreter: Ctrl-C in the consumer's thread leaves no lock held.
    """

    def __init__(self, values: Iterable[_T], compute: Callable[[_T], _U]) -> None:
        super().__init__(name="penstock lookahead", daemon=True)
        self._values, self._compute = values, compute
        self._ready: SimpleQueue[tuple[_T, _U] | None] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False

    def run(self) -> None:
        try:
            with while_wanted(lambda: not self._closed):
                for value in self._values:
                    self._ready.put((value, self._compute(value)))
                    self._taken.get()
                    if self._closed:
                        return
        except BaseException as error:  # raised in the consumer's thread, after the pairs before it
            self._error = error
        self._ready.put(None)

    def pairs(self) -> Iterator[tuple[_T, _U]]:
        """Yield the pairs, in the consumer's thread."""
        while (pair := self._ready.get()) is not None:
            self._taken.put(None)
            yield pair
            del pair
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the thread, and wait for it briefly."""
        self._closed = True
        self._taken.put(None)
        self.join(0.5)  # it may be waiting for a server that does not answer
