"""Where a stream stands, and how that is written down as a state and taken up again.

A cursor after any item is small and made only when asked for. At the source it is a position and the outputs of that
position already delivered; inside a group it is the cursor at the group's start plus what was delivered of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.order import Piece, head, size, tail


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the order: the next position of a piece, and how many of its outputs are already out."""

    part: int  # open windows first, then what is left
    piece: int
    position: int
    sub: int
    key: int = field(default=0, compare=False)  # of the sample there, which has it with and without counts

    def marks(self) -> tuple[int, ...]:
        """The integers that name the place whoever reads it."""
        return (self.key, self.sub)


@dataclass(frozen=True, slots=True)
class Inside:
    """A place inside a group of ``n`` items: ``done`` of its outputs are out, and ``sub`` outputs of the next."""

    level: int
    start: AnyCursor
    end: AnyCursor
    n: int
    done: int
    sub: int

    def marks(self) -> tuple[int, ...]:
        """The integers that name the place whoever reads it."""
        return (*self.start.marks(), self.done, self.sub)


@dataclass(frozen=True, slots=True)
class Counted:
    """A place behind a stage that counts the stream: it had seen ``seen`` items, and ``sub`` outputs of the next."""

    level: int
    inner: AnyCursor
    seen: int
    sub: int

    def marks(self) -> tuple[int, ...]:
        """The integers that name the place whoever reads it."""
        return self.inner.marks()


AnyCursor = Cursor | Inside | Counted


@dataclass(frozen=True, slots=True)
class StartPart:
    """A stretch of the order to run: what is left, or an open window to replay."""

    pieces: list[Piece]
    n: int | None = None  # an open window: its items; the rest of its last position belongs to the next
    done: int = 0
    sub: int = 0

    def as_open(self) -> dict[str, Any]:
        """The window as a state writes it."""
        return {"of": self.pieces, "n": self.n, "done": self.done, "sub": self.sub}


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins."""

    left: list[Piece]  # all positions of this rank still to come
    opens: tuple[StartPart, ...] = ()
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)  # level -> (done, sub) of its first group
    seen: dict[int, int] = field(default_factory=dict)  # level -> items a counting stage has seen
    quota: int | None = None  # positions to deliver, where ranks must be equal; more than left: the rest is padding
    pad: Piece | None = None  # what is repeated as padding
    traced: bool = False  # inputs that give nothing are to be named

    def parts(self) -> list[StartPart]:
        """What to run, in order: the open windows, then what is left."""
        pieces = self.left
        if self.quota is not None:
            short = self.quota - sum(map(size, self.left))
            pieces = head(self.left, self.quota) + ([self.pad] if short > 0 and self.pad else [])
        return [*self.opens, StartPart(pieces)]

    def only(self, place: int) -> Start:
        """The run of one position alone, the ``place``-th to come."""
        return Start(head(tail(self.left, place), 1))

    def padded_from(self) -> int:
        """The number of the first piece that is padding."""
        return len(self.left) if self.quota is not None and self.quota > sum(map(size, self.left)) else 1 << 60

    def after(self, cursor: AnyCursor | None, window_level: int | None) -> Start:
        """Where a run would begin that goes on at ``cursor`` (``None``: at the end).

        ``window_level`` is the level whose half-delivered group becomes an open window of its own, so that other
        ranks can have what comes after it; groups of other levels are replayed from their start.
        """
        if cursor is None:
            return Start([], quota=None if self.quota is None else 0, pad=self.pad)
        groups: dict[int, tuple[int, int]] = {}
        seen: dict[int, int] = {}
        window: Inside | None = None
        for place in _path(cursor, window_level):
            if isinstance(place, Counted):
                seen[place.level] = place.seen
                groups.update({place.level: (0, place.sub)} if place.sub else {})
            elif isinstance(place, Inside) and place.level == window_level:
                window = place
            elif isinstance(place, Inside):
                groups[place.level] = (place.done, place.sub)
            else:
                base = place
        opens, left = self._rest(base)
        if window is not None:
            opens = (self._open(window), *opens)
        return Start(left, opens, groups, seen, self._quota(left, base), self.pad)

    def _rest(self, at: Cursor) -> tuple[tuple[StartPart, ...], list[Piece]]:
        """The open windows and the positions that come at or after ``at``."""
        if at.part < len(self.opens):
            # At the end of an open window: windows are never left half-way but through ``Inside``.
            return self.opens[at.part + 1 :], self.left
        return (), rest(self.left, at)

    def _open(self, window: Inside) -> StartPart:
        """The half-delivered window as a part of its own."""
        start, end = _base(window.start), _base(window.end)
        if start.part < len(self.opens):
            before = self.opens[start.part]
            return StartPart(before.pieces, before.n, window.done, window.sub)
        return StartPart(between(self.left, start, end), window.n, window.done, window.sub)

    def _quota(self, left: list[Piece], at: Cursor) -> int | None:
        if self.quota is None:
            return None
        given = sum(map(size, self.left)) - sum(map(size, left))
        if self.pad is not None and at.piece >= self.padded_from():
            given += size([self.pad[0], at.position, self.pad[2], 0])
        return max(0, self.quota - given)


def _path(cursor: AnyCursor, window_level: int | None) -> Iterator[AnyCursor]:
    """The cursor and those below it; below an open window it goes on at the window's end."""
    while True:
        yield cursor
        if isinstance(cursor, Counted):
            cursor = cursor.inner
        elif isinstance(cursor, Inside):
            cursor = cursor.end if cursor.level == window_level else cursor.start
        else:
            return


def _base(cursor: AnyCursor) -> Cursor:
    while not isinstance(cursor, Cursor):
        cursor = cursor.inner if isinstance(cursor, Counted) else cursor.start
    return cursor


def rest(pieces: list[Piece], at: Cursor) -> list[Piece]:
    """The pieces from ``at`` on."""
    if at.piece >= len(pieces):
        return []
    _, stop, step, _ = pieces[at.piece]
    first = [[at.position, stop, step, at.sub]] if at.position < stop else []
    return first + pieces[at.piece + 1 :]


def between(pieces: list[Piece], start: Cursor, end: Cursor) -> list[Piece]:
    """The pieces from ``start`` to ``end``, with the position that ``end`` lies in when it is half delivered."""
    out = [list(piece) for piece in rest(pieces[: end.piece + 1], start)]
    if out and end.piece < len(pieces):
        out[-1][1] = min(out[-1][1], end.position + (1 if end.sub else 0))
    return [piece for piece in out if piece[0] < piece[1]]
