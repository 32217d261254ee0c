"""Records which positions were delivered by a run that delivers blocks as they are finished, out of order.

For a run in order, one cursor is enough. Out of order, the remaining positions have gaps: one for each block that was
started and not delivered yet, so there are never more gaps than blocks in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.engines.cursor import AnyCursor, Cursor, Start
from penstock.engines.lineage import GroupOrigin
from penstock.engines.program import Program
from penstock.engines.read_stage import Span
from penstock.order import Piece, total
from penstock.plan import Block


def can_run_unordered(program: Program, start: Start) -> bool:
    """Return whether a run can report its remaining positions while its blocks are delivered out of order.

    It can if every block comes from the source, or is a batch of the last stage.
    """
    levels = program.levels[1:]
    batches = len(levels) == 1 and not levels[0].segments and levels[0].regroups
    return (not levels or batches) and start.pad is None and not start.opens


@dataclass(slots=True)
class Delivered:
    """The positions that were delivered of each piece of a start."""

    start: Start
    _ranges: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # piece -> first -> (until, sub)

    def record(self, block: Block, delivered: int) -> None:
        """Record that the first ``delivered`` items of a block were delivered."""
        origin = block.lineage.origin
        if isinstance(origin, GroupOrigin):
            if delivered == len(block):
                for lineage in origin.members[:-1]:
                    self._record_range(lineage.origin, None)
                self._record_range(origin.members[-1].origin, origin.end)
        elif delivered == len(block) and not block.lineage.more and block.lineage.error is None:
            self._record_range(origin, None)  # including inputs at its end that produced no output
        else:
            self._record_range(origin, block.cursor(delivered))

    def _record_range(self, origin: object, until: AnyCursor | None) -> None:
        """Record that the positions of a block were delivered, up to a cursor or all of them."""
        assert isinstance(origin, Span)
        assert isinstance(until, Cursor | None)
        for piece, first, end in origin.ranges(until):
            self._ranges.setdefault(piece, {})[first] = end

    def remaining(self) -> Start:
        """Return the start of a run that delivers the remaining positions."""
        pieces: list[Piece] = []
        for number, piece in enumerate(self.start.left):
            pieces += _gaps(piece, self._ranges.get(number, {}))
        quota = self.start.quota
        if quota is not None:
            quota -= total(self.start.left) - total(pieces)
        return replace(self.start, left=pieces, quota=quota)

    def compact(self) -> None:
        """Join adjacent ranges, so that there are no more of them than blocks in flight."""
        for number, ranges in self._ranges.items():
            firsts = sorted(ranges)
            joined: dict[int, tuple[int, int]] = {}
            last: int | None = None
            for first in firsts:
                if last is not None and joined[last] == (first, 0):
                    joined[last] = ranges[first]
                else:
                    joined[first] = ranges[first]
                    last = first
            self._ranges[number] = joined


def _gaps(piece: Piece, ranges: dict[int, tuple[int, int]]) -> list[Piece]:
    """Return the parts of a piece that are not in ``ranges``."""
    position, stop, step, sub = piece
    gaps: list[Piece] = []
    for first in sorted(ranges):
        if position < first:
            gaps.append([position, first, step, sub])
        position, sub = ranges[first]
    if position < stop:
        gaps.append([position, stop, step, sub])
    return gaps
