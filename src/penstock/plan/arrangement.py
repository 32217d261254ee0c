"""From the tree the user wrote to what an engine runs: one order, one list of stages.

Stages of a branch are lifted into the list and marked with the sources they apply to, so that mix, union and zip cost
an engine nothing: it sees stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.order import I64, Order
from penstock.plan.block import Block, Context, Origin, Place, Slot
from penstock.plan.expressions import Condition, ConditionFilter
from penstock.plan.order_stages import Combination, Exclude, Make, Shuffle, Slice, Zip
from penstock.plan.plan import Plan, Source
from penstock.plan.stage import Map, Stage
from penstock.plan.stages import Drop, Select
from penstock.plan.values import EVERYTHING, Fields

LeafOrder = Callable[[int, int, int], Order]  # (leaf, seed, epoch)


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage with its place in the plan, which is part of its random keys."""

    stage: Stage
    place: int


@dataclass(slots=True)
class Arrangement:
    """A plan, flattened."""

    leaves: list[Source] = field(default_factory=list)
    body: list[PlacedStage] = field(default_factory=list)
    slots: int = 1  # operands of zips: an item is a row of so many values until they are merged

    def fields(self, leaf: int) -> Fields:
        """What anybody asks of the samples of one source."""
        wanted = EVERYTHING
        for placed in reversed(self.body):
            stage = placed.stage
            if not isinstance(stage, BranchStage):
                wanted = stage.needs(wanted)
            elif leaf in stage.leaves:
                wanted = stage.inner.needs(wanted)
        return replace(wanted, where=self._where(leaf))

    def _where(self, leaf: int) -> Condition | None:
        """The condition that every sample of a source must fulfil before anybody else sees it."""
        found: Condition | None = None
        for placed in self.body if self.slots == 1 else ():
            at = placed.stage
            stage = at.inner if isinstance(at, BranchStage) else at
            if isinstance(at, BranchStage) and leaf not in at.leaves:
                continue
            if isinstance(stage, ConditionFilter):
                found = stage.condition if found is None else found & stage.condition
            elif not isinstance(stage, Select | Drop):
                break
        return found


def arrange(plan: Plan, leaf_order: LeafOrder) -> tuple[Arrangement, Make]:
    """Flatten ``plan``; the second value makes the order of an epoch, asking ``leaf_order`` for the sources' own."""
    out = Arrangement()
    make = _visit(plan, plan.seed or 0, 0, 0, out, leaf_order)
    return out, make


def _visit(plan: Plan, seed: int, depth: int, slot: int, out: Arrangement, leaf_order: LeafOrder) -> Make:
    seed = seed if plan.seed is None else plan.seed
    first = len(out.leaves)
    if isinstance(plan.source, Combination):
        make = _join(plan.source, seed, depth, slot, out, leaf_order)
    else:
        out.leaves.append(plan.source)
        make = lambda epoch: leaf_order(first, seed, epoch)  # noqa: E731
    covered = range(first, len(out.leaves))
    for number, stage in enumerate(plan.body):
        kind = BranchStage if stage.keeps_count else CountAt
        lifted = kind(inner=stage, leaves=covered, slot=slot, resources=stage.resources) if depth else stage
        out.body.append(PlacedStage(lifted, number + 1000 * (first + 1) * bool(depth) + 1_000_000 * depth))
    for order_stage in plan.ordering:
        if not (isinstance(order_stage, Slice) and order_stage.per_rank):
            make = order_stage.wrap(make, seed, first)
    return make


def _join(source: Combination, seed: int, depth: int, slot: int, out: Arrangement, leaf_order: LeafOrder) -> Make:
    makes, slots = [], [slot]
    for number, branch in enumerate(source.branches):
        if isinstance(source, Zip) and number:
            slots.append(out.slots)
            out.slots += 1
        makes.append(_visit(branch, seed, depth + 1, slots[-1], out, leaf_order))
    if isinstance(source, Zip):
        merge = Merge(left=slots[0], right=slots[1], suffix=source.suffix, last=depth == 0)
        out.body.append(PlacedStage(merge, 0))
    return source.join(makes, seed)


@dataclass(frozen=True)
class BranchStage(Stage):
    """A branch's stage: works on the items of its own sources, in its own slot, and leaves the others alone."""

    inner: Stage
    leaves: range
    slot: int

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def prefers(self) -> int:
        return self.inner.prefers

    def describe(self) -> str:
        return self.inner.describe()

    def failure(self, exc: Exception, place: Place) -> Exception:
        """As the stage itself words it."""
        return self.inner.failure(exc, place)

    def finish(self, ctx: Context) -> None:
        """Let go of what the stage kept."""
        self.inner.finish(ctx)

    def run(self, block: Block, ctx: Context) -> Block:
        """Run the stage on the part of the block that is its own, and put the parts together in order."""
        slot = block.origin.slot(self.slot)
        owner = np.arange(block.inputs) if block.owner is None else block.owner
        mine = np.flatnonzero((slot.leaves[owner] >= self.leaves.start) & (slot.leaves[owner] < self.leaves.stop))
        if not len(mine):
            return block
        rows = [block.items[i] for i in mine.tolist()]
        part = block.keep(mine, [row.values[self.slot] if isinstance(row, Row) else row for row in rows])
        part.skips, part.origin = [], _SlotOrigin(slot, block.origin)
        if self.slot:
            part.keys = slot.keys[owner[mine]]
        return _together(block, owner, mine, self.inner.run(part, ctx), self.slot)


class CountAt(BranchStage):
    """The same for a stage that may give more or fewer."""

    keeps_count = False


def _together(block: Block, owner: I64, mine: I64, part: Block, slot: int) -> Block:
    """The block with its items ``mine`` replaced by ``part``, in the order of their inputs."""
    others = np.setdiff1d(np.arange(len(block.items)), mine, assume_unique=True)
    if part.error is not None:
        others = others[owner[others] < part.inputs]
        block.inputs, block.error = part.inputs, part.error
    block.skips = sorted(block.skips + part.skips, key=lambda skip: skip.input)
    items = part.items
    if block.items and isinstance(block.items[0], Row) and part.owner is not None:
        back = {int(owner[i]): block.items[i] for i in mine.tolist()}
        items = [back[int(n)].put(slot, value) for n, value in zip(part.owner, part.items, strict=True)]
        part.keys = block.keys[mine][np.searchsorted(owner[mine], part.owner)]
    inputs = np.concatenate([owner[others], part.owner if part.owner is not None else owner[mine]])
    order = np.argsort(inputs, kind="stable")
    merged = [*(block.items[i] for i in others.tolist()), *items]
    out = block.become([merged[i] for i in order.tolist()])
    out.keys = np.concatenate([block.keys[others], part.keys])[order]
    out.owner = inputs[order]
    return out


@dataclass(slots=True)
class _SlotOrigin:
    """The origin of a branch's part of a block: places are those of its own samples."""

    own: Slot
    whole: Origin

    def cursor(self, done: int, sub: int) -> Any:
        return self.whole.cursor(done, sub)

    def place(self, number: int) -> Place:
        return self.own.place(number)

    def slot(self, number: int) -> Slot:
        return self.own

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        return self.whole.trace(inputs, outputs, kind)


@dataclass(slots=True)
class Row:
    """One position of a zip before its operands are merged."""

    values: list[Any]

    def put(self, slot: int, value: Any) -> Row:
        """The row with another value in ``slot``."""
        values = list(self.values)
        values[slot] = value
        return Row(values)


@dataclass(frozen=True)
class Merge(Map):
    """Joins the fields of two operands of a zip; ``__`` fields are the left one's."""

    left: int
    right: int
    suffix: str | None
    last: bool

    @property
    def name(self) -> str:
        return "zip"

    def describe(self) -> str:
        return "zip(merge)"

    def needs(self, after: Fields) -> Fields:
        """The same fields of both, unless they are renamed here."""
        return after if self.suffix is None else EVERYTHING

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        return DataError(str(exc), place.shard, place.key)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Merge two values of the row."""
        return self._merge

    def _merge(self, row: Row) -> Any:
        left, right = row.values[self.left], row.values[self.right]
        if not (isinstance(left, dict) and isinstance(right, dict)):
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            raise TypeError(f"zip joins samples with fields, not {kinds}")
        own = {name: value for name, value in right.items() if not name.startswith("__")}
        if clash := sorted(own.keys() & left.keys()):
            if self.suffix is None:
                raise ValueError(f"zip: both sides have {', '.join(clash)}; rename one, or pass suffix=")
            renamed = {name + self.suffix if name in clash else name: value for name, value in own.items()}
            if len(renamed) < len(own) or renamed.keys() & left.keys():
                raise ValueError(f"zip: suffix={self.suffix!r} gives a name that is there already; choose another")
            own = renamed
        merged = {**left, **own}
        return merged if self.last else row.put(self.left, merged)


def resolved(plan: Plan) -> Plan:
    """The plan with the files read that list what is excluded.

    Raises:
        StorageError: such a file is not there.
        DataError: a line of it is damaged.
    """
    source = plan.source
    if isinstance(source, Combination):
        source = replace(source, branches=tuple(map(resolved, source.branches)))
    stages = tuple(stage.settle() if isinstance(stage, Exclude) else stage for stage in plan.stages)
    return replace(plan, source=source, stages=stages)


def unshuffled(plan: Plan) -> Plan:
    """The plan without what shuffles it: positions count the samples as they are stored."""
    source = plan.source
    if isinstance(source, Combination):
        source = replace(source, branches=tuple(unshuffled(branch) for branch in source.branches))
    return replace(plan, source=source, stages=tuple(s for s in plan.stages if not isinstance(s, Shuffle)))
