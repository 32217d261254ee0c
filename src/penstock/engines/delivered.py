"""Which positions of a run are out, where blocks come in whatever order they are finished.

In order, one cursor says it all. Out of order the rest of an epoch has gaps: one for each block that was begun and not
delivered yet, so never more than are under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.engines.cursor import AnyCursor, Cursor, Start
from penstock.engines.lineage import Members
from penstock.engines.program import Program
from penstock.engines.read_stage import Span
from penstock.order import Piece
from penstock.plan import Batched, Block


def accountable(program: Program, start: Start) -> bool:
    """Whether what is left of a plan can be told when its blocks come out of order.

    It can where every block comes from the source, or is a batch at the very end.
    """
    later = program.levels[1:]
    batches = len(later) == 1 and not later[0].segments and later[0].head and isinstance(later[0].head.stage, Batched)
    return (not later or bool(batches)) and start.pad is None and not start.opens


@dataclass(slots=True)
class Delivered:
    """What was delivered of each piece of the order."""

    start: Start
    _out: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # piece -> first -> (until, sub)

    def note(self, block: Block, delivered: int) -> None:
        """Note that so many items of a block are out."""
        origin = block.origin
        if isinstance(origin, Members):
            if delivered == len(block):
                for trail in origin.members[:-1]:
                    self._mark(trail.origin, None)
                self._mark(origin.members[-1].origin, origin.end)
        elif delivered == len(block) and not block.more and block.error is None:
            self._mark(origin, None)  # with the inputs at its end that gave nothing
        else:
            self._mark(origin, block.cursor(delivered))

    def _mark(self, origin: object, until: AnyCursor | None) -> None:
        """Note that a stretch of positions is out, to its end or until somewhere inside it."""
        assert isinstance(origin, Span)
        at = (origin.after, 0)
        if until is not None:
            assert isinstance(until, Cursor)
            at = (until.position, until.sub)
        self._out.setdefault(origin.piece, {})[int(origin.positions[0])] = at

    def left(self) -> Start:
        """Where a run would begin that delivers all the rest."""
        pieces: list[Piece] = []
        for number, piece in enumerate(self.start.left):
            pieces += _gaps(piece, self._out.get(number, {}))
        quota = self.start.quota
        if quota is not None:
            quota -= sum(map(_size, self.start.left)) - sum(map(_size, pieces))
        return replace(self.start, left=pieces, quota=quota)

    def tidy(self) -> None:
        """Join neighbours, so that it stays as small as what is under way."""
        for number, out in self._out.items():
            firsts = sorted(out)
            joined: dict[int, tuple[int, int]] = {}
            last: int | None = None
            for first in firsts:
                if last is not None and joined[last] == (first, 0):
                    joined[last] = out[first]
                else:
                    joined[first] = out[first]
                    last = first
            self._out[number] = joined


def _gaps(piece: Piece, out: dict[int, tuple[int, int]]) -> list[Piece]:
    """What is left of a piece."""
    at, stop, step, sub = piece
    gaps: list[Piece] = []
    for first in sorted(out):
        if at < first:
            gaps.append([at, first, step, sub])
        at, sub = out[first]
    if at < stop:
        gaps.append([at, stop, step, sub])
    return gaps


def _size(piece: Piece) -> int:
    return -(-(piece[1] - piece[0]) // piece[2])
