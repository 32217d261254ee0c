"""Which positions of a run were delivered, where blocks are delivered in the order they are finished.

In order, one cursor says it. Out of order, what is left of an epoch has gaps: one for each block that was begun and
not delivered yet, so there are never more gaps than blocks in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.engines.cursor import AnyCursor, Cursor, Start
from penstock.engines.lineage import GroupOrigin
from penstock.engines.program import Program
from penstock.engines.read_stage import Span
from penstock.order import Piece, total
from penstock.plan import Batched, Block


def can_run_unordered(program: Program, start: Start) -> bool:
    """Return whether a run can say what is left of it while its blocks are delivered out of order.

    It can where every block comes from the source, or is a batch of the last stage.
    """
    later = program.levels[1:]
    batches = len(later) == 1 and not later[0].segments and later[0].head and isinstance(later[0].head.stage, Batched)
    return (not later or bool(batches)) and start.pad is None and not start.opens


@dataclass(slots=True)
class Delivered:
    """The positions that were delivered of each piece of a start."""

    start: Start
    _ranges: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # piece -> first -> (until, sub)

    def record(self, block: Block, delivered: int) -> None:
        """Record that the first ``delivered`` items of a block were delivered."""
        origin = block.origin
        if isinstance(origin, GroupOrigin):
            if delivered == len(block):
                for lineage in origin.members[:-1]:
                    self._record_range(lineage.origin, None)
                self._record_range(origin.members[-1].origin, origin.end)
        elif delivered == len(block) and not block.more and block.error is None:
            self._record_range(origin, None)  # with the inputs at its end that gave no output
        else:
            self._record_range(origin, block.cursor(delivered))

    def _record_range(self, origin: object, until: AnyCursor | None) -> None:
        """Record that the positions of a block were delivered, up to a cursor or all of them."""
        assert isinstance(origin, Span)
        end = (origin.after, 0)
        if until is not None:
            assert isinstance(until, Cursor)
            end = (until.position, until.sub)
        self._ranges.setdefault(origin.piece, {})[int(origin.positions[0])] = end

    def remaining(self) -> Start:
        """Return the start of a run that delivers the rest."""
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
    """Return what is left of a piece."""
    at, stop, step, sub = piece
    gaps: list[Piece] = []
    for first in sorted(ranges):
        if at < first:
            gaps.append([at, first, step, sub])
        at, sub = ranges[first]
    if at < stop:
        gaps.append([at, stop, step, sub])
    return gaps
