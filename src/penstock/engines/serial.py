"""The serial engine: one sample at a time, in a plain loop. It *is* the meaning of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engines.cursor import Start
from penstock.engines.flow import BlockSizer, flow
from penstock.engines.meter import Meters
from penstock.engines.program import Program, Segment, run_segment
from penstock.order import Order
from penstock.plan import Block


def run(program: Program, order: Order | None, epoch: int, start: Start, meters: Meters) -> Iterator[Block]:
    """Run the plan in the caller's thread, sample by sample, stage by stage."""

    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        contexts = program.contexts(segment, epoch)
        try:
            for block in blocks:
                for part, _ in run_segment(segment, contexts, block):
                    yield part
        finally:
            for placed, ctx in zip(segment.stages, contexts, strict=True):
                placed.stage.finish(ctx)

    return flow(program, order, epoch, start, each, BlockSizer(count=1, most=1), meters)
