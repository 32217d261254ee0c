"""A plan made ready to run: sources opened, the order of an epoch at hand, stages fused into segments and levels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.engines.cursor import Start
from penstock.engines.read_stage import Finder, Read
from penstock.errors import PlanError
from penstock.order import ENDLESS, Order, Piece, Refs, ShardOrder, UncountedOrder, head, name_hash, tail
from penstock.plan import (
    Arrangement,
    Batched,
    Block,
    BranchStage,
    Combination,
    Context,
    Cut,
    EachStage,
    Fields,
    LateShuffle,
    Located,
    PlacedStage,
    Plan,
    Quarantine,
    Reader,
    Resources,
    Scope,
    Shuffle,
    Slice,
    Stage,
    StreamLimit,
    StreamReader,
    arrange,
    resolved,
)

ANY = Resources()  # a stage that asks for nothing in particular: it goes with its neighbours


@dataclass(slots=True)
class Segment:
    """Neighbouring stages that run in one call, in one pool."""

    stages: list[PlacedStage]
    resources: Resources | None = None

    def __post_init__(self) -> None:
        self.resources = self.resources and self.resources.pooled()

    @property
    def heavy(self) -> bool:
        """Whether it is worth workers of its own: it holds a function of the user's, or decodes."""
        return self.resources is not None

    def describe(self) -> str:
        """Its stages, in words."""
        return " -> ".join(placed.stage.describe() for placed in self.stages)

    def takes(self, resources: Resources | None) -> bool:
        """Whether a stage with these needs can join."""
        own = self.resources
        resources = resources and resources.pooled()
        return resources is None or own is None or own == resources or _either(own, resources)

    def add(self, placed: PlacedStage) -> None:
        """Join a stage."""
        self.stages.append(placed)
        mine, its = self.resources, placed.stage.resources and placed.stage.resources.pooled()
        self.resources = its if mine is None or (its is not None and mine == ANY) else mine


def _either(own: Resources, other: Resources) -> bool:
    """One of them asks for nothing, and the other for nothing but threads."""
    return ANY in (own, other) and own.on == other.on == "threads" and not (own.gpus or other.gpus)


@dataclass(slots=True)
class Level:
    """A stretch of the pipeline between two stages that see more than one item: its head, then its segments."""

    head: PlacedStage | None  # None: the source
    segments: list[Segment] = field(default_factory=list)


def levels_of(body: list[PlacedStage], reading: Resources | None) -> list[Level]:
    """Cut a list of stages into levels and fuse what can be fused."""
    levels = [Level(None, [Segment([PlacedStage(Read(), -1)], reading)])]
    for placed in body:
        if placed.stage.scope is not Scope.EACH:
            levels.append(Level(placed))
        elif levels[-1].segments and levels[-1].segments[-1].takes(placed.stage.resources):
            levels[-1].segments[-1].add(placed)
        else:
            levels[-1].segments.append(Segment([placed], placed.stage.resources))
    return levels


class Program:
    """A plan with its sources open."""

    def __init__(self, plan: Plan) -> None:
        """Flatten ``plan``; sources are opened when something asks for them."""
        self.plan = plan
        self.arrangement: Arrangement
        self._settled = resolved(plan)  # once, so that one run has one order while files grow
        self.arrangement, self._make = arrange(self._settled, self._leaf_order)
        leaves = self.arrangement.leaves
        self.fields: list[Fields] = [self.arrangement.fields(leaf) for leaf in range(len(leaves))]
        self._identities: dict[bool, str] = {}
        readings = {leaf.resources for leaf in leaves}
        self.levels = levels_of(self.arrangement.body, readings.pop() if len(readings) == 1 else None)

    @cached_property
    def opened(self) -> list[Reader | StreamReader]:
        """The open sources.

        Raises:
            StorageError: one is not there.
        """
        return [leaf.open() for leaf in self.arrangement.leaves]

    @property
    def columnar(self) -> bool:
        """Whether samples come as columns, and are cheap in numbers."""
        return all(getattr(leaf, "columnar", False) for leaf in self.arrangement.leaves)

    @cached_property
    def remote(self) -> bool:
        """Whether a source is far away, so that finding a sample takes time."""
        return any(getattr(reader, "remote", False) for reader in self.readers)

    def rest(self) -> None:
        """Have the sources do nothing in the background any more."""
        for reader in self.__dict__.get("opened", ()):
            if (rest := getattr(reader, "rest", None)) is not None:
                rest()

    @cached_property
    def stream(self) -> StreamReader | None:
        """The source, where it can only be read once from the front.

        Raises:
            PlanError: the plan asks for more of it.
        """
        if not any(isinstance(reader, StreamReader) for reader in self.opened):
            return None
        slices = all(isinstance(stage, Slice) for stage in self.plan.ordering)
        if len(self.opened) > 1 or not slices or self.plan.cut is not None:
            raise PlanError("a stream is read once, front to back: it cannot be shuffled, cut, repeated or combined")
        reader = self.opened[0]
        assert isinstance(reader, StreamReader)
        return reader

    @cached_property
    def quarantine(self) -> Quarantine | None:
        """Where samples that fail are listed.

        Raises:
            StorageError: it cannot be written.
        """
        path = self.plan.errors.quarantine
        return None if path is None else Quarantine(path)

    @property
    def readers(self) -> list[Reader]:
        """The open sources, where all of them can be read anywhere.

        Raises:
            PlanError: one is a stream.
        """
        if self.stream is not None:
            raise PlanError("a stream has no length, no positions and no state; store it in a file first")
        return self.opened  # type: ignore[return-value]

    @cached_property
    def _hashes(self) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        return [np.array([name_hash(name) for name in reader.names], np.uint64) for reader in self.readers]

    def _leaf_order(self, leaf: int, seed: int, epoch: int) -> Order:
        counts = self.readers[leaf].counts(scan=True)
        if counts is None:
            raise PlanError(f"{self.arrangement.leaves[leaf].describe()}: counts are not known; run `penstock index`")
        return ShardOrder(self._hashes[leaf], counts, leaf, seed, epoch)

    @cached_property
    def _lazy(self) -> bool:
        """Whether the order can do without counts."""
        stages = [s for s in self.plan.ordering if not (isinstance(s, Slice) and s.per_rank)]
        plain = not stages or (len(stages) == 1 and isinstance(stages[0], Shuffle) and not stages[0].all)
        return plain and not isinstance(self.plan.source, Combination)

    def order(self, epoch: int, *, counts: bool = True) -> Order:
        """The order of an epoch; with ``counts`` shards are looked into to know them where that is cheap.

        Raises:
            PlanError: the plan needs counts that cannot be had.
        """
        if self._lazy and self.readers[0].counts(scan=counts) is None:
            shuffle = next((stage for stage in self.plan.ordering if isinstance(stage, Shuffle)), None)
            params = shuffle or Shuffle()
            return UncountedOrder(
                self._hashes[0],
                self.readers[0].count,
                0,
                self.seed,
                epoch,
                window=params.window,
                shards=params.shards,
                shuffle=shuffle is not None,
            )
        return self._make(epoch)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.plan.seed or 0

    def start(self, order: Order, cut: Cut | None) -> Start:
        """Where a rank begins the epoch."""
        cut = cut or Cut(0, 1)
        pieces = order.cut(order.whole(), cut.rank, cut.world, cut.how)
        quota, padding = _quota(order, cut)
        for stage in self.plan.ordering:
            if isinstance(stage, Slice) and stage.per_rank:
                pieces = tail(pieces, stage.start) if stage.stop is None else head(pieces, stage.stop)
                quota = None if quota is None else _sliced(quota, stage)
        return Start(pieces, quota=quota, pad=padding)

    def front(self) -> Start:
        """The beginning of a stream."""
        return Start([[0, ENDLESS, 1, 0]])

    @cached_property
    def finder(self) -> Finder:
        """Finds samples in the open sources."""
        return Finder(self.readers, self.fields, self.arrangement.slots)

    def locate(self, refs: Refs) -> Located:
        """Find the samples that ``refs`` name, for every operand of a zip."""
        return self.finder.locate(refs)

    def contexts(self, segment: Segment, epoch: int) -> list[Context]:
        """Fresh contexts for one worker of ``segment``."""
        return [self.context(placed, epoch) for placed in segment.stages]

    def context(self, placed: PlacedStage, epoch: int) -> Context:
        """A fresh context for one stage."""
        stage = placed.stage.inner if isinstance(placed.stage, BranchStage) else placed.stage
        features = self.features(placed) if stage.follows_features else {}
        return Context(placed.place, self.seed, epoch, self.plan.errors.action == "skip", "cpu", features=features)

    def features(self, upto: PlacedStage | None = None) -> dict[str, Any]:
        """What the sources say of the fields that come to a stage, or out of the last one.

        Raises:
            PlanError: two sources say different things of one field.
        """
        out: dict[str, Any] = {}
        leaves = (
            upto.stage.leaves if upto is not None and isinstance(upto.stage, BranchStage) else range(len(self.opened))
        )
        for leaf in leaves:
            for name, what in self._features_of(leaf, upto).items():
                if out.setdefault(name, what) != what and self.arrangement.slots == 1:
                    problem = f"field {name!r} is {out[name]} in one source and {what} in another"
                    raise PlanError(f"{problem}: call decode() on each of them, before they are combined")
        return out

    def _features_of(self, leaf: int, upto: PlacedStage | None) -> dict[str, Any]:
        known: dict[str, Any] = getattr(self.opened[leaf], "features", None) or {}
        for placed in self.arrangement.body:
            if placed is upto:
                break
            if not isinstance(placed.stage, BranchStage):
                known = placed.stage.typed(known)
            elif leaf in placed.stage.leaves:
                known = placed.stage.inner.typed(known)
        return known

    @cached_property
    def window_level(self) -> int | None:
        """The level of the late shuffle whose half-delivered window another rank can take over."""
        heads = [level.head.stage for level in self.levels if level.head]
        return 1 if heads and isinstance(heads[0], LateShuffle) and self.recut_problem is None else None

    @cached_property
    def recut_problem(self) -> str | None:
        """Why this plan cannot be restored under another number of ranks; ``None``: it can."""
        stages = [placed.stage for placed in self.arrangement.body]
        late = 0
        for number, stage in enumerate(stages):
            late += isinstance(stage, LateShuffle)
            last = number == len(stages) - 1
            plain = stage.scope is Scope.EACH or (isinstance(stage, LateShuffle) and late == 1)
            if not (plain or (isinstance(stage, Batched) and last)):
                return f"{stage.describe()} keeps this plan from being restored under another number of ranks"
        return None

    def identity(self, *, counts: bool) -> str:
        """A short name for the order and what changes its count: equal where states can be exchanged."""
        if counts not in self._identities:
            self._identities[counts] = self._identify(counts)
        return self._identities[counts]

    def _identify(self, counts: bool) -> str:
        leaves = []
        for reader in self.readers:
            known = reader.counts(scan=True) if counts else None
            leaves.append([reader.names, reader.sizes() if known is None else known.tolist()])
        text = json.dumps([leaves, _shape(self._settled), self._kinds()], separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _kinds(self) -> list[str]:
        stages = [placed.stage for placed in self.arrangement.body]
        last = [stages[-1]] if stages and isinstance(stages[-1], Batched) else []
        kinds = [s.name if s.scope is Scope.EACH else s.describe() for s in stages if not s.keeps_count or _late(s)]
        return kinds[: len(kinds) - len(last)]

    @property
    def endless(self) -> bool:
        """Whether an epoch never ends."""
        limited = any(isinstance(placed.stage, StreamLimit) for placed in self.arrangement.body)
        return self.stream is None and not limited and self.order(0, counts=False).size >= ENDLESS

    def check_end(self) -> None:
        """Require that an epoch ends, for those who need all of it.

        Raises:
            PlanError: it does not.
        """
        if self.endless:
            raise PlanError("the dataset has no end: repeat(n), or limit(n) behind it, give it one")

    def length(self, cut: Cut | None) -> int | None:
        """How many items one rank's epoch gives, where that is known without running it, or fetching all it reads."""
        if self.remote and not all(reader.countable() for reader in self.readers if hasattr(reader, "countable")):
            return None
        order = self.order(0)
        items: int | None = None  # not counted, or without end
        if 0 <= order.size < ENDLESS:
            items = sum(_size(piece) for part in self.start(order, cut).parts() for piece in part.pieces)
        for placed in self.arrangement.body:
            items = None if items is None else placed.stage.length(items)
        return items


def _late(stage: Any) -> bool:
    return isinstance(stage, LateShuffle)


def _size(piece: Piece) -> int:
    return max(0, -(-(piece[1] - piece[0]) // piece[2]))


def _quota(order: Order, cut: Cut) -> tuple[int | None, Piece | None]:
    """How many positions every rank gets where ranks must be equal, and the one that is repeated to fill up."""
    if cut.uneven == "keep":
        return None, None
    if isinstance(order, UncountedOrder):
        raise PlanError(f"uneven={cut.uneven!r} needs to know the counts; run `penstock index`, or uneven='keep'")
    if cut.uneven == "drop" or not order.size:
        return order.size // cut.world, None
    first = cut.rank % order.size
    return -(-order.size // cut.world), [first, first + 1, 1, 0]


def _sliced(quota: int, stage: Slice) -> int:
    """What is left of so many positions after a limit or skip of the rank's own."""
    return max(0, quota - stage.start) if stage.stop is None else min(quota, stage.stop)


def _shape(plan: Plan) -> list[Any]:
    """What orders a plan, for its identity."""
    own: list[Any] = [stage.describe() for stage in plan.ordering]
    if isinstance(plan.source, Combination):
        own.append([plan.source.describe(), [_shape(branch) for branch in plan.source.branches]])
    return own


def prepare(segment: Segment, contexts: list[Context]) -> None:
    """Make the functions of a segment, before there is a sample that could be blamed for what happens."""
    for placed, ctx in zip(segment.stages, contexts, strict=True):
        stage = placed.stage.inner if isinstance(placed.stage, BranchStage) else placed.stage
        if isinstance(stage, EachStage):
            stage.function(ctx)


def run_segment(segment: Segment, contexts: list[Context], block: Block) -> Iterator[tuple[Block, bool]]:
    """Take a block through the stages of a segment.

    What grows too large comes out in parts: each with whether another one follows.
    """
    stages = [placed.stage for placed in segment.stages]
    outer, block.more = block.more, False
    for part in _through(list(zip(stages, contexts, strict=True)), block):
        again = part.more
        part.more = again or (outer and part.error is None)
        yield part, again


def _through(steps: list[tuple[Stage, Context]], block: Block) -> Iterator[Block]:
    if block.inputs or block.items:  # else it only marks the end of a part
        for number, (stage, ctx) in enumerate(steps):
            parts = stage.parts(block, ctx)
            block = next(parts)
            if block.more:
                yield from _through(steps[number + 1 :], block)
                for part in parts:
                    yield from _through(steps[number + 1 :], part)
                return
    yield block
