"""Items of a stream collected into groups, and a stage run on each; where a run stands inside a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.engines.cursor import AnyCursor, Start
from penstock.engines.lineage import Members, Trail, nothing
from penstock.engines.program import Program
from penstock.errors import DataError, PenstockError, StageError
from penstock.order import ENDLESS, I64, U64
from penstock.plan import Block, Context, GroupStage, Map, PlacedStage, Skipped, join_columns


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


def take_skips(block: Block, until: int) -> list[Skipped]:
    """Take those that lie before input ``until``."""
    taken = [skip for skip in block.skips if skip.input < until]
    block.skips = [skip for skip in block.skips if skip.input >= until]
    return taken


@dataclass(slots=True)
class Grouping:
    """Collects items into groups and runs a stage on each; between groups it holds nothing."""

    program: Program
    placed: PlacedStage
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
            self.behind += take_skips(block, ENDLESS)

    def _join(self, block: Block, low: int, high: int) -> None:
        skips = self.behind + take_skips(block, block.input_of(low))
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
        self.skips += take_skips(block, until)

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
        group = Block(join_columns(self.held), keys, origin, n)
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
