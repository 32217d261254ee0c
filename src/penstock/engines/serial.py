"""The serial engine: one sample at a time, in a plain loop. What it yields defines what a plan means."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engines.cursor import Start
from penstock.engines.flow import BlockSizer, flow
from penstock.engines.meter import Meters
from penstock.engines.program import Program
from penstock.engines.segments import Segment, run_segment
from penstock.order import Order
from penstock.plan import Block


def run(program: Program, order: Order | None, epoch: int, start: Start, meters: Meters) -> Iterator[Block]:
    """Run a plan in the calling thread, sample by sample and stage by stage."""

    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        contexts = program.contexts(segment, epoch)
        try:
            for block in blocks:
                for part, _ in run_segment(segment, contexts, block):
                    yield part
        finally:
            for placed, ctx in zip(segment.stages, contexts, strict=True):
                placed.stage.finish(ctx)

    return flow(program, order, epoch, start, each, BlockSizer(count=1, max_samples=1), meters)
