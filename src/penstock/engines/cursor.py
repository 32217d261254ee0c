"""Cursors, which record how much of a stream was delivered, and starts, from which a run begins or resumes.

A cursor is small and can be computed for any item, on request. At the source it is a position of the order and the
number of outputs of that position already delivered. Inside a group it is the cursor at the start of the group and the
number of outputs of the group already delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.order import Piece, head, size, tail, total


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next position of the order to deliver.

    Attributes:
        part: The number of the start part: open windows first, then the remaining pieces.
        piece: The number of the piece in that part.
        position: The position in the order.
        sub: How many outputs of that position were delivered already.
        key: The key of the sample at the position; it is the same for orders with and without counts.
    """

    part: int
    piece: int
    position: int
    sub: int
    key: int = field(default=0, compare=False)

    def hash_words(self) -> tuple[int, ...]:
        """Return integers that identify this cursor on every rank and engine, to be hashed."""
        return (self.key, self.sub)


@dataclass(frozen=True, slots=True)
class GroupCursor:
    """The next output of a group to deliver.

    Attributes:
        level: The level whose head collects the group.
        start: The cursor before the first item of the group.
        end: The cursor after its last item.
        n: The number of items in the group.
        done: How many outputs of the group were delivered already.
        sub: How many of the outputs that later stages make of the next one were delivered already.
    """

    level: int
    start: AnyCursor
    end: AnyCursor
    n: int
    done: int
    sub: int

    def hash_words(self) -> tuple[int, ...]:
        """Return integers that identify this cursor on every rank and engine, to be hashed."""
        return (*self.start.hash_words(), self.done, self.sub)


@dataclass(frozen=True, slots=True)
class CountedCursor:
    """The next item to deliver after a stage that counts the stream.

    Attributes:
        level: The level whose head counts the stream.
        inner: The cursor before that stage.
        seen: How many items the stage had seen.
        sub: How many of the outputs that later stages make of the next item were delivered already.
    """

    level: int
    inner: AnyCursor
    seen: int
    sub: int

    def hash_words(self) -> tuple[int, ...]:
        """Return integers that identify this cursor on every rank and engine, to be hashed."""
        return self.inner.hash_words()


AnyCursor = Cursor | GroupCursor | CountedCursor


@dataclass(frozen=True, slots=True)
class StartPart:
    """Pieces of the order to run: all remaining ones, or one open window to replay.

    Attributes:
        pieces: The positions.
        n: The number of items of an open window; the remaining outputs of its last position belong to the next window.
            None if this is not an open window.
        done: How many outputs of the window were delivered already.
        sub: How many of the outputs that later stages make of the next one were delivered already.
    """

    pieces: list[Piece]
    n: int | None = None
    done: int = 0
    sub: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins or resumes.

    Attributes:
        left: All positions that this rank has not delivered yet.
        opens: Windows that were delivered in part, to be replayed first.
        groups: Level -> (outputs, sub-outputs) of its first group that were delivered already.
        seen: Level -> items that its counting stage has seen.
        quota: How many positions to deliver if ranks must be equal; positions beyond ``left`` are padding.
        pad: The piece that is repeated as padding.
        traced: Blocks also report the inputs that produced no output, for lineage.
    """

    left: list[Piece]
    opens: tuple[StartPart, ...] = ()
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    quota: int | None = None
    pad: Piece | None = None
    traced: bool = False

    def parts(self) -> list[StartPart]:
        """Return what to run, in order: the open windows, then the remaining pieces."""
        pieces = self.left
        if self.quota is not None:
            short = self.quota - total(self.left)
            pieces = head(self.left, self.quota) + ([self.pad] if short > 0 and self.pad else [])
        return [*self.opens, StartPart(pieces)]

    def only(self, number: int) -> Start:
        """Return the start of a run of one position alone: number ``number`` of the remaining ones."""
        return Start(head(tail(self.left, number), 1))

    def left_out(self, here: Start) -> list[Piece]:
        """Return the positions that are dropped, so that ranks are equal, if a run from this start ends ``here``."""
        if self.quota is not None:
            return tail(self.left, self.quota)
        return [*here.left, *(piece for part in here.opens for piece in part.pieces)]

    def repeated(self) -> list[Piece]:
        """Return the positions that a run from this start repeats as padding, so that ranks are equal."""
        short = 0 if self.quota is None else self.quota - total(self.left)
        return [self.pad] if short > 0 and self.pad else []

    def padded_from(self) -> int:
        """Return the number of the first piece of the last part that is padding."""
        return len(self.left) if self.quota is not None and self.quota > total(self.left) else 1 << 60

    def after(self, cursor: AnyCursor | None, window_level: int | None) -> Start:
        """Return the start of a run that resumes at a cursor.

        Args:
            cursor: How far this run was delivered; None if it was delivered completely.
            window_level: The level whose group becomes an open window if it was delivered in part, so that the
                positions after it can go to other ranks; groups of other levels are replayed from their start.
        """
        if cursor is None:
            return Start([], quota=None if self.quota is None else 0, pad=self.pad)
        groups: dict[int, tuple[int, int]] = {}
        seen: dict[int, int] = {}
        window: GroupCursor | None = None
        for inner in _path(cursor, window_level):
            if isinstance(inner, CountedCursor):
                seen[inner.level] = inner.seen
                groups.update({inner.level: (0, inner.sub)} if inner.sub else {})
            elif isinstance(inner, GroupCursor) and inner.level == window_level:
                window = inner
            elif isinstance(inner, GroupCursor):
                groups[inner.level] = (inner.done, inner.sub)
            else:
                base = inner
        opens, left = self._rest(base)
        if window is not None:
            opens = (self._open_window(window), *opens)
        return Start(left, opens, groups, seen, self._quota_left(left, base), self.pad)

    def _rest(self, cursor: Cursor) -> tuple[tuple[StartPart, ...], list[Piece]]:
        """Return the open windows and the pieces at or after a cursor."""
        if cursor.part < len(self.opens):
            # The cursor is at the end of an open window: inside one it would be a ``GroupCursor``.
            return self.opens[cursor.part + 1 :], self.left
        return (), pieces_from(self.left, cursor)

    def _open_window(self, window: GroupCursor) -> StartPart:
        """Return a window that was delivered in part as a start part."""
        start, end = _base(window.start), _base(window.end)
        if start.part < len(self.opens):
            before = self.opens[start.part]
            return StartPart(before.pieces, before.n, window.done, window.sub)
        return StartPart(pieces_between(self.left, start, end), window.n, window.done, window.sub)

    def _quota_left(self, left: list[Piece], cursor: Cursor) -> int | None:
        if self.quota is None:
            return None
        delivered = total(self.left) - total(left)
        if self.pad is not None and cursor.piece >= self.padded_from():
            delivered += size([self.pad[0], cursor.position, self.pad[2], 0])
        return max(0, self.quota - delivered)


def _path(cursor: AnyCursor, window_level: int | None) -> Iterator[AnyCursor]:
    """Yield a cursor and the cursors inside it, down to the source; for an open window, follow the window's end."""
    while True:
        yield cursor
        if isinstance(cursor, CountedCursor):
            cursor = cursor.inner
        elif isinstance(cursor, GroupCursor):
            cursor = cursor.end if cursor.level == window_level else cursor.start
        else:
            return


def _base(cursor: AnyCursor) -> Cursor:
    while not isinstance(cursor, Cursor):
        cursor = cursor.inner if isinstance(cursor, CountedCursor) else cursor.start
    return cursor


def pieces_from(pieces: list[Piece], cursor: Cursor) -> list[Piece]:
    """Return the pieces at and after a cursor."""
    if cursor.piece >= len(pieces):
        return []
    _, stop, step, _ = pieces[cursor.piece]
    first = [[cursor.position, stop, step, cursor.sub]] if cursor.position < stop else []
    return first + pieces[cursor.piece + 1 :]


def pieces_between(pieces: list[Piece], start: Cursor, end: Cursor) -> list[Piece]:
    """Return the pieces from ``start`` to ``end``, with the position of ``end`` if it was delivered in part."""
    out = [list(piece) for piece in pieces_from(pieces[: end.piece + 1], start)]
    if out and end.piece < len(pieces):
        out[-1][1] = min(out[-1][1], end.position + (1 if end.sub else 0))
    return [piece for piece in out if piece[0] < piece[1]]
