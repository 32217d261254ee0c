"""Segments: neighbouring stages fused into one call on a block, and the levels of a pipeline, which consist of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.engines.read_stage import Read
from penstock.plan import Block, Context, PlacedStage, Recut, Resources, Scope, Stage

DEFAULT_RESOURCES = Resources()  # a stage with these is fused with its neighbours


@dataclass(slots=True)
class Segment:
    """Neighbouring stages that are fused: one call runs them all on a block, in one pool."""

    stages: list[PlacedStage]
    resources: Resources | None = None

    def __post_init__(self) -> None:
        self.resources = self.resources and self.resources.pooled()

    @property
    def rows(self) -> int:
        """How many rows a stage of the segment processes in one call; blocks are joined to multiples of that."""
        return max(placed.stage.group_size or 1 for placed in self.stages)

    @property
    def needs_pool(self) -> bool:
        """Whether the segment runs in a pool: it calls a user's function, or decodes."""
        return self.resources is not None

    @property
    def reading(self) -> int:
        """How many stages at the start of the segment read samples: 1 in the first segment of a plan, else 0."""
        return sum(placed.stage.reads_source for placed in self.stages)

    def describe(self) -> str:
        """Return the stages as text: ``read -> map(f)``."""
        return " -> ".join(placed.stage.describe() for placed in self.stages)

    def can_fuse(self, stage: Stage) -> bool:
        """Return whether a stage can be fused into the segment: its resources fit, and it gets the rows it asks for."""
        rows = stage.group_size or 1
        if rows > 1 and not (self.rows in (1, rows) and all(placed.stage.keeps_count for placed in self.stages)):
            return False
        own, resources = self.resources, stage.resources and stage.resources.pooled()
        return resources is None or own is None or own == resources or _compatible(own, resources)

    def fuse(self, placed: PlacedStage) -> None:
        """Append a stage, and adopt its resources if the segment has none or the default ones."""
        self.stages.append(placed)
        own, other = self.resources, placed.stage.resources and placed.stage.resources.pooled()
        self.resources = other if own is None or (other is not None and own == DEFAULT_RESOURCES) else own


def _compatible(own: Resources, other: Resources) -> bool:
    """Return whether one has the default resources, and neither requests processes or GPUs."""
    return DEFAULT_RESOURCES in (own, other) and own.on == other.on == "threads" and not (own.gpus or other.gpus)


@dataclass(slots=True)
class Level:
    """A part of the pipeline that begins with a stage that sees more than one item, followed by its segments.

    Attributes:
        head: The stage that sees more than one item; None for the first level, which begins with the source.
        segments: The stages after the head, which see one item at a time.
    """

    head: PlacedStage | None
    segments: list[Segment] = field(default_factory=list)

    @property
    def regroups(self) -> bool:
        """Whether the level forms groups that may begin at any item: batches."""
        return self.head is not None and self.head.stage.recut is Recut.REGROUP


def build_levels(body: list[PlacedStage], reading: Resources | None) -> list[Level]:
    """Cut the stages of a plan into levels, and fuse neighbours into segments.

    Args:
        body: The stages.
        reading: The resources that the source requests.
    """
    levels = [Level(None, [Segment([PlacedStage(Read(), -1)], reading)])]
    for placed in body:
        if placed.stage.scope is not Scope.EACH:
            levels.append(Level(placed))
        elif levels[-1].segments and levels[-1].segments[-1].can_fuse(placed.stage):
            levels[-1].segments[-1].fuse(placed)
        else:
            levels[-1].segments.append(Segment([placed], placed.stage.resources))
    return levels


def prepare(segment: Segment, contexts: list[Context]) -> None:
    """Construct the functions of a segment before the first block, so that a failure is not attributed to a sample.

    Raises:
        Exception: Whatever the construction raises.
    """
    for placed, ctx in zip(segment.stages, contexts, strict=True):
        placed.stage.prepare(ctx)


def run_segment(segment: Segment, contexts: list[Context], block: Block) -> Iterator[tuple[Block, bool]]:
    """Run the stages of a segment on a block; yield its parts, each with whether another one follows.

    A result that grows too large is yielded in parts.
    """
    stages = [placed.stage for placed in segment.stages]
    continues = block.lineage.more
    if continues:
        block = block.with_items(block.items)  # the caller may run the same block again
        block.lineage = replace(block.lineage, more=False)
    for part in _run_stages(list(zip(stages, contexts, strict=True)), block):
        follows = part.lineage.more
        if continues and not follows and part.lineage.error is None:
            part.lineage = replace(part.lineage, more=True)
        yield part, follows


def _run_stages(steps: list[tuple[Stage, Context]], block: Block) -> Iterator[Block]:
    if not block.is_marker:
        for number, (stage, ctx) in enumerate(steps):
            parts = stage.parts(block, ctx)
            block = next(parts)
            if block.lineage.more:
                yield from _run_stages(steps[number + 1 :], block)
                for part in parts:
                    yield from _run_stages(steps[number + 1 :], part)
                return
    yield block
