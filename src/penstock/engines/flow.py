"""How blocks flow: cut from the order, through segments, collected into groups. Shared by the engines.

An engine says only how a segment's blocks are worked on (``each``); what a stream means, and where it stands after any
item, is settled here once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from penstock.engines.ahead import ahead
from penstock.engines.cursor import AnyCursor, Start
from penstock.engines.meter import Meter, Meters
from penstock.engines.origins import Members, Passed, nothing
from penstock.engines.program import Program, Segment
from penstock.engines.reading import Held, Span
from penstock.engines.tracing import Trail
from penstock.errors import DataError, PenstockError, StageError
from penstock.order import ENDLESS, I64, U64, Order, Piece, Refs, fold_into
from penstock.plan import (
    Block,
    Context,
    GroupStage,
    Map,
    Placed,
    Skipped,
    Slice,
    Spots,
    StreamStage,
    joined,
)

Each = Callable[[Iterator[Block], Segment], Iterator[Block]]
Find = Callable[[Refs], Spots]


MOST = 512  # samples a block
WIDE, WIDE_BYTES = 8192, 4_000_000  # the same where samples are columns, which cost by the block and not by the row


@dataclass(slots=True)
class Pace:
    """How large blocks are: small at first, then bounded by number and bytes, and by what they turn out to cost."""

    count: int = 16
    most: int = MOST
    least: int = 1  # what a stage that works on several rows at once would like
    nbytes: int = 500_000  # raw bytes: larger blocks fall out of the processor's cache
    large: int = 16_000_000  # bytes of what comes out
    seconds: float = 0.05  # of work: what a close may have to wait for
    ceiling: int = MOST  # what ``most`` may grow to
    limits: list[Limit] = field(default_factory=list)

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

    def limit(self) -> Limit:
        """A limit of its own for one of those who work on the blocks."""
        limit = Limit(self, self.most)
        self.limits.append(limit)
        return limit

    def settle(self) -> None:
        """Take the tightest limit: every block passes them all."""
        self.most = min(limit.most for limit in self.limits)
        self.count = min(self.count, self.most)


@dataclass(slots=True)
class Limit:
    """How many samples a block may have for one of those who work on it."""

    pace: Pace
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
    pace: Pace,
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
        blocks = settled(blocks)
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


def settled(blocks: Iterator[Block]) -> Iterator[Block]:
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
            block.skips = _take_skips(block, block.inputs)
        yield block


def _headed(
    program: Program, blocks: Iterator[Block], placed: Placed, number: int, epoch: int, start: Start
) -> Iterator[Block]:
    if isinstance(placed.stage, StreamStage):
        _, sub = start.groups.get(number, (0, 0))
        return streamed(blocks, placed.stage, number, start.seen.get(number, 0), sub)
    assert isinstance(placed.stage, GroupStage)
    return _Grouping(program, placed, placed.stage, number, epoch, start).run(blocks)


def walk(program: Program, order: Order, start: Start, pace: Pace, find: Find | None = None) -> Iterator[Block]:
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
) -> Iterator[tuple[tuple[I64, Refs, int], Spots]]:
    """The chunks of a piece and where their samples lie; far away, those to come are looked for in the meantime."""

    if find is not None:
        return ((chunk, find(chunk[1])) for chunk in order.walk(piece))
    if not program.remote:
        return ((chunk, program.locate(chunk[1])) for chunk in order.walk(piece))
    reach = _Reach()

    def found(chunk: tuple[I64, Refs, int]) -> Spots:
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


@dataclass(frozen=True)
class _Weigh(Map):
    """Weighs the items of a block: (weight, item), with the policy on errors that every stage has."""

    stage: GroupStage

    @property
    def name(self) -> str:
        return self.stage.name

    def describe(self) -> str:
        return self.stage.describe()

    def function(self, ctx: Context) -> Callable[[Any], tuple[float, Any]]:
        return lambda item: (float(self.stage.weigh(item)), item)


def _take_skips(block: Block, until: int) -> list[Skipped]:
    """Take those that lie before input ``until``."""
    taken = [skip for skip in block.skips if skip.input < until]
    block.skips = [skip for skip in block.skips if skip.input >= until]
    return taken


@dataclass(slots=True)
class _Grouping:
    """Collects items into groups and runs a stage on each; between groups it holds nothing."""

    program: Program
    placed: Placed
    stage: GroupStage
    level: int
    epoch: int
    begin: Start
    held: list[Sequence[Any]] = field(default_factory=list)  # the items at hand, in runs
    many: int = 0  # how many these are
    keys: list[U64] = field(default_factory=list)
    members: list[Trail] = field(default_factory=list)
    skips: list[Skipped] = field(default_factory=list)  # among the items at hand
    before: list[Skipped] = field(default_factory=list)  # before the first of them
    behind: list[Skipped] = field(default_factory=list)  # behind the last of them
    weight: float = 0
    weights: list[float] = field(default_factory=list)  # of the block at hand
    start: AnyCursor | None = None
    end: AnyCursor | None = None
    part: int = 0
    fresh: bool = True  # no group has been made yet
    ctx: Context = field(init=False)

    def __post_init__(self) -> None:
        self.ctx = self.program.context(self.placed, self.epoch)

    def run(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """The outputs of the groups, in order; a group cut short by an error is lost with it."""
        for block in blocks:
            if self.stage.weighs:
                block = self._weighed(block)
            yield from self._add(block)
            if self.begin.traced and not block.items and block.error is None:
                yield nothing(block)
            if block.error is not None:
                yield Block([], np.zeros(0, np.uint64), block.origin, 0, error=block.error)
                return
            if block.ends_part:
                if self.many:
                    yield from self._emit()
                self.part += 1
        if self.many:
            yield from self._emit()
        if self.behind:
            last = nothing()
            last.skips = self.behind
            yield last

    def _weighed(self, block: Block) -> Block:
        """The block with the weights of its items at hand; an item that cannot be weighed fails."""
        pairs = _Weigh(self.stage).run(block, self.ctx)
        self.weights = [weight for weight, _ in pairs.items]
        return pairs.become([item for _, item in pairs.items])

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
        if self._room() != 0:  # what comes behind an open window is not this run's to count
            self.behind += _take_skips(block, ENDLESS)

    def _join(self, block: Block, low: int, high: int) -> None:
        skips = self.behind + _take_skips(block, block.input_of(low))
        self.behind = []
        if self.many:
            self.skips += skips
        else:
            self.start, self.before = block.cursor(low), skips
        self.held.append(block.items[low:high])
        self.many += high - low
        self.keys.append(block.keys[low:high])
        self.members.append(Trail.of(block, low, high, gaps=low == 0))
        self.end, until = block.behind(high - 1)
        self.skips += _take_skips(block, until)

    def _room(self) -> int | None:
        """How many items an open window still lacks; ``None``: this is no open window."""
        opens = self.begin.opens if self.level == self.program.window_level else ()
        if self.part >= len(opens):
            return None
        wanted = opens[self.part].n or 0
        return wanted - self.many

    def _fit(self, block: Block, low: int, room: int | None) -> tuple[int, bool]:
        """How far into the block the group reaches, and whether it is then complete."""
        if room is not None:
            return min(len(block), low + room), False
        if not self.stage.weighs:
            high = min(len(block), low + int(self.stage.capacity) - self.many)
            return high, self.many + high - low >= self.stage.capacity
        many = self.many
        for high in range(low, len(block)):
            weight = self.weights[high]
            if many and self.weight + weight > self.stage.capacity:
                return high, True
            self.weight += weight
            many += 1
        return len(block), False

    def _emit(self) -> Iterator[Block]:
        assert self.start is not None
        assert self.end is not None
        n = self.many
        whole = not self.stage.keeps_count
        origin = Members(self.level, self.start, self.end, n, self.members, whole, n)
        keys = np.concatenate(self.keys)
        group = Block(joined(self.held), keys, origin, n)
        before, skips, self.before, self.skips = self.before, self.skips, [], []
        self.held, self.many, self.keys, self.members, self.weight, self.start = [], 0, [], [], 0, None
        out = self._made(group)
        if out.error is not None:
            yield Block([], np.zeros(0, np.uint64), origin, 0, error=out.error)
            return
        origin.total, origin.owner = len(out), out.owner
        yield from self._blocks(out, origin, before, skips + out.skips)

    def _made(self, group: Block) -> Block:
        try:
            return self.stage.run(group, self.ctx)
        except Exception as exc:
            place = group.place(0)
            error: PenstockError
            if isinstance(exc, DataError):
                error = DataError(exc.problem, exc.shard or place.shard, exc.key or place.key)
            else:
                error = StageError(f"{type(exc).__name__}: {exc}", self.stage.describe(), place.key, place.shard)
            error.__cause__ = exc
            if not self.ctx.skip:
                group.error = error
                return group
            gone = group.keep([], [])
            gone.skips = [Skipped(0, place, self.stage.name, str(error))]
            return gone

    def _blocks(self, out: Block, origin: Members, before: list[Skipped], skips: list[Skipped]) -> Iterator[Block]:
        """Cut the outputs into blocks, without those delivered before this run."""
        done, sub = self._resume()
        low = min(done, len(out))
        before = [skip._replace(input=-1) for skip in before]
        if not len(out):  # an input that gave nothing: what follows begins behind it
            none: I64 = np.zeros(0, np.int64)
            yield Block([], out.keys[:0], origin, 1, none, skips=before + skips)
            return
        while True:
            high = min(len(out), low + 256)
            own = replace(origin, offset=low) if low else origin
            if last := high == len(out):
                before += [skip._replace(input=high - low - 1) for skip in skips]
            yield Block(
                out.items[low:high],
                out.keys[low:high],
                own,
                high - low,
                base=sub,
                skips=before,
            )
            low, sub, before = high, 0, []
            if last:
                return

    def _resume(self) -> tuple[int, int]:
        """What was delivered of the group at hand before this run: only of its first, and of open windows."""
        if self.level == self.program.window_level:
            opens = self.begin.opens
            return (opens[self.part].done, opens[self.part].sub) if self.part < len(opens) else (0, 0)
        first, self.fresh = self.fresh, False
        return self.begin.groups.get(self.level, (0, 0)) if first else (0, 0)
