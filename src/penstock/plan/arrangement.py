"""Flatten the tree of plans that the user wrote into what an engine runs: one order and one list of stages.

The stages of a branch are moved into the list, each with the sources that it applies to. Engines see only stages and
need not know about mix, union and zip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.order import I64, Order
from penstock.plan.block import Block, Context, Origin, Place, Slot
from penstock.plan.expressions import Condition, ConditionFilter
from penstock.plan.identity import Identity
from penstock.plan.order_stages import (
    Combination,
    Exclude,
    Mix,
    OrderFactory,
    OrderStage,
    Shuffle,
    Slice,
    Sort,
    SplitSide,
    Union,
    Zip,
)
from penstock.plan.plan import Plan
from penstock.plan.source import Source
from penstock.plan.stage import Map, Stage
from penstock.plan.stages import Drop, Select
from penstock.plan.values import EVERYTHING, Fields

LeafOrder = Callable[[int, int, int], Order]  # (leaf, seed, epoch)


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage with its number in the plan, which is part of its random keys."""

    stage: Stage
    number: int


@dataclass(slots=True)
class Arrangement:
    """A flattened plan."""

    leaves: list[Source] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # of the random numbers of each source's samples
    body: list[PlacedStage] = field(default_factory=list)
    slots: int = 1  # the number of zip operands: an item is a row of this many values until they are merged

    def fields(self, leaf: int) -> Fields:
        """Return the fields that the stages need from one source."""
        wanted = EVERYTHING
        for placed in reversed(self.body):
            if (stage := placed.stage.for_leaf(leaf)) is not None:
                wanted = stage.needs(wanted)
        where, required = self._condition(leaf)
        return replace(wanted, where=where, required=required)

    def _condition(self, leaf: int) -> tuple[Condition | None, frozenset[str]]:
        """Return the condition that the samples of a source must meet before any other stage sees them, if any.

        Also return the fields without which a sample fails in one of these stages.
        """
        condition: Condition | None = None
        present, required = EVERYTHING, frozenset[str]()
        for placed in self.body if self.slots == 1 else ():
            stage = placed.stage.for_leaf(leaf)
            used = frozenset[str]()
            if isinstance(stage, ConditionFilter):
                used = stage.condition.fields()
            elif isinstance(stage, Select):
                used = frozenset(stage.names)
            elif not isinstance(stage, Drop | None):
                break
            if not all(map(present.wants, used)):  # every sample that comes this far fails here
                break
            required |= used
            if isinstance(stage, ConditionFilter):
                condition = stage.condition if condition is None else condition & stage.condition
            elif isinstance(stage, Select):
                present = Fields(used)
            elif isinstance(stage, Drop):
                present = present.without(stage.names)
        return condition, required


def arrange(plan: Plan, leaf_order: LeafOrder) -> tuple[Arrangement, OrderFactory]:
    """Flatten ``plan``; also return the factory of its order, which calls ``leaf_order`` for the order of a source."""
    out = Arrangement()
    make = _flatten(plan, plan.seed or 0, 0, 0, out, leaf_order)
    return out, make


def _flatten(plan: Plan, seed: int, depth: int, slot: int, out: Arrangement, leaf_order: LeafOrder) -> OrderFactory:
    seed = seed if plan.seed is None else plan.seed
    first = len(out.leaves)
    if isinstance(plan.source, Combination):
        make = _flatten_branches(plan.source, seed, depth, slot, out, leaf_order)
    else:
        out.leaves.append(plan.source)
        out.seeds.append(seed)
        make = lambda epoch: leaf_order(first, seed, epoch)  # noqa: E731
    covered = range(first, len(out.leaves))
    number = 0
    for stage in plan.body:
        kind = BranchStage if stage.keeps_count else CountChangingBranchStage
        wrapped = kind(inner=stage, leaves=covered, slot=slot, resources=stage.resources) if depth else stage
        out.body.append(PlacedStage(wrapped, number + 1000 * (first + 1) * bool(depth) + 1_000_000 * depth))
        number += stage.numbered
    for order_stage in plan.ordering:
        if not (isinstance(order_stage, Slice) and order_stage.per_rank):
            make = order_stage.wrap(make, seed, first)
    return make


def _flatten_branches(
    source: Combination, seed: int, depth: int, slot: int, out: Arrangement, leaf_order: LeafOrder
) -> OrderFactory:
    factories, slots = [], [slot]
    for number, branch in enumerate(source.branches):
        if isinstance(source, Zip) and number:
            slots.append(out.slots)
            out.slots += 1
        factories.append(_flatten(branch, seed, depth + 1, slots[-1], out, leaf_order))
    if isinstance(source, Zip):
        merge = Merge(left=slots[0], right=slots[1], suffix=source.suffix, last=depth == 0)
        out.body.append(PlacedStage(merge, 0))
    return source.join(factories, seed)


@dataclass(frozen=True)
class PartStage(Stage):
    """A stage that runs another one on some items of some sources, and passes the others through."""

    inner: Stage
    leaves: range
    slot: int

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def group_size(self) -> int | None:
        return self.inner.group_size

    @property
    def wants_rng(self) -> bool:
        return self.inner.wants_rng

    def prepare(self, ctx: Context) -> None:
        self.inner.prepare(ctx)

    def describe(self) -> str:
        return self.inner.describe()

    def failure(self, exc: Exception, place: Place) -> Exception:
        return self.inner.failure(exc, place)

    def finish(self, ctx: Context) -> None:
        self.inner.finish(ctx)


class BranchStage(PartStage):
    """A stage of a branch: it processes the items of the branch's sources."""

    def for_leaf(self, leaf: int) -> Stage | None:
        return self.inner if leaf in self.leaves else None

    def run(self, block: Block, ctx: Context) -> Block:
        """Run the stage on the branch's own items, and merge the result with the other items in order."""
        lineage = block.lineage
        slot = lineage.origin.slot(self.slot)
        owner = lineage.owners(lineage.inputs)
        own = np.flatnonzero((slot.leaves[owner] >= self.leaves.start) & (slot.leaves[owner] < self.leaves.stop))
        if not len(own):
            return block
        rows = [block.items[i] for i in own.tolist()]
        part = block.keep(own, [row.values[self.slot] if isinstance(row, Row) else row for row in rows])
        part.lineage = replace(part.lineage, skips=(), origin=_SlotOrigin(slot, lineage.origin))
        if self.slot:
            part.keys = slot.keys[owner[own]]
        return _reassemble(block, owner, own, self.inner.run(part, ctx), self.slot)


class CountChangingBranchStage(BranchStage):
    """A stage of a branch that may change the number of items."""

    keeps_count = False


def _reassemble(block: Block, owner: I64, own: I64, part: Block, slot: int) -> Block:
    """Return the block with its items ``own`` replaced by ``part``, in the order of their inputs."""
    others = np.setdiff1d(np.arange(len(block.items)), own, assume_unique=True)
    lineage, result = block.lineage, part.lineage
    if result.error is not None:
        others = others[owner[others] < result.inputs]
        lineage = replace(lineage, inputs=result.inputs, error=result.error)
    items, keys = part.items, part.keys
    if block.items and isinstance(block.items[0], Row) and result.owner is not None:
        row_of_input = {int(owner[i]): block.items[i] for i in own.tolist()}
        items = [row_of_input[int(n)].with_value(slot, value) for n, value in zip(result.owner, items, strict=True)]
        keys = block.keys[own][np.searchsorted(owner[own], result.owner)]
    inputs = np.concatenate([owner[others], result.owner if result.owner is not None else owner[own]])
    order = np.argsort(inputs, kind="stable")
    merged = [*(block.items[i] for i in others.tolist()), *items]
    return Block(
        [merged[i] for i in order.tolist()],
        np.concatenate([block.keys[others], keys])[order],
        replace(lineage.with_skips(*result.skips), owner=inputs[order]),
    )


@dataclass(slots=True)
class _SlotOrigin:
    """The origin of a branch's part of a block, which knows the locations of the branch's samples."""

    operand: Slot
    whole: Origin

    def cursor(self, done: int, sub: int) -> Any:
        return self.whole.cursor(done, sub)

    def place(self, number: int) -> Place:
        return self.operand.place(number)

    def slot(self, number: int) -> Slot:
        return self.operand

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        return self.whole.trace(inputs, outputs, kind)


@dataclass(slots=True)
class Row:
    """The values of one position of a zip, before its operands are merged."""

    values: list[Any]

    def with_value(self, slot: int, value: Any) -> Row:
        """Return the row with another value in ``slot``."""
        values = list(self.values)
        values[slot] = value
        return Row(values)


@dataclass(frozen=True)
class Merge(Map):
    """Merges the fields of two operands of a zip; ``__`` fields come from the left one."""

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
        return after if self.suffix is None else EVERYTHING

    def failure(self, exc: Exception, place: Place) -> Exception:
        return DataError(str(exc), place.shard, place.key)

    def function(self, ctx: Context) -> Callable[..., Any]:
        return self._merge

    def _merge(self, row: Row) -> Any:
        left, right = row.values[self.left], row.values[self.right]
        if not (isinstance(left, dict) and isinstance(right, dict)):
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            raise TypeError(f"zip needs samples with fields on both sides, not {kinds}")
        added = {name: value for name, value in right.items() if not name.startswith("__")}
        if clash := sorted(added.keys() & left.keys()):
            if self.suffix is None:
                raise ValueError(f"zip: both sides have {', '.join(clash)}; rename one, or pass suffix=")
            renamed = {name + self.suffix if name in clash else name: value for name, value in added.items()}
            if len(renamed) < len(added) or renamed.keys() & left.keys():
                raise ValueError(
                    f"zip: suffix={self.suffix!r} produces a field name that already exists; choose another"
                )
            added = renamed
        merged = {**left, **added}
        return merged if self.last else row.with_value(self.left, merged)


def resolved(plan: Plan, read: Callable[[str], Iterable[Identity]]) -> Plan:
    """Return the plan with the files given to ``exclude`` replaced by the samples that they list.

    Args:
        plan: The plan.
        read: Returns the samples that a file lists.
    """
    source = plan.source
    if isinstance(source, Combination):
        source = replace(source, branches=tuple(resolved(branch, read) for branch in source.branches))
    stages = tuple(stage.resolve(read) if isinstance(stage, Exclude) else stage for stage in plan.stages)
    return replace(plan, source=source, stages=stages)


def unshuffled(plan: Plan) -> Plan:
    """Return the plan without its shuffles: positions number the samples as they are stored, or as they are sorted."""
    source = plan.source
    if isinstance(source, Combination):
        source = replace(source, branches=tuple(unshuffled(branch) for branch in source.branches))
    kept = (stage for stage in plan.stages if not isinstance(stage, Shuffle))
    stages = tuple(Sort(stage.find.unshuffled()) if isinstance(stage, Sort) else stage for stage in kept)
    return replace(plan, source=source, stages=stages)


def with_choice(plan: Plan, choice: SplitSide | Exclude) -> Plan:
    """Return the plan with a choice of samples before every shuffle and repeat: it is the same in every epoch."""
    depth = _choice_depth(plan)
    if isinstance(plan.source, Mix | Union) and not depth:
        chosen = map(with_choice, plan.source.branches, _choices(plan, choice))
        return replace(plan, source=replace(plan.source, branches=tuple(chosen)))
    return replace(plan, stages=(*plan.stages[:depth], choice, *plan.stages[depth:]))


def chosen_from(plan: Plan) -> Plan:
    """Return the plan of the samples among which ``with_choice`` chooses, with all stages on items."""
    depth = _choice_depth(plan)
    kept = (stage for at, stage in enumerate(plan.stages) if at < depth or not isinstance(stage, OrderStage))
    return replace(plan, stages=tuple(kept), cut=None)


def _choice_depth(plan: Plan) -> int:
    """Return the number of stages before a choice of samples."""
    return max(
        (at for at, stage in enumerate(plan.stages, 1) if isinstance(stage, Slice | Sort | SplitSide)), default=0
    )


def _choices(plan: Plan, choice: SplitSide | Exclude) -> Iterator[SplitSide | Exclude]:
    """Yield the choice for each branch, in which sources are numbered from 0."""
    seen = 0
    for number, branch in enumerate(plan.branches()):
        before, seen = seen, seen + sum(1 for _ in branch.leaves())
        last = number == len(plan.branches()) - 1
        yield choice.for_branch(before, None if last else seen) if isinstance(choice, Exclude) else choice
