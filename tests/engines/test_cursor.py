"""A run resumes at a cursor: in the order, inside a group, and after a stage that counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.cursor import (
    CountedCursor,
    Cursor,
    GroupCursor,
    Start,
    StartPart,
    pieces_between,
    pieces_from,
)

WINDOW_LEVEL = 1


def positions(pieces: list[list[int]]) -> list[int]:
    return [position for start, stop, step, _ in pieces for position in range(start, stop, step)]


def at(position: int, sub: int = 0, piece: int = 0, part: int = 0) -> Cursor:
    return Cursor(part, piece, position, sub)


def test_a_start_without_quota_runs_the_open_windows_and_then_the_remaining_pieces() -> None:
    window = StartPart([[0, 4, 1, 0]], n=4, done=2)
    left = [[4, 10, 1, 0]]
    assert Start(left, (window,)).parts() == [window, StartPart(left)]


def test_a_quota_below_the_remaining_positions_drops_the_end() -> None:
    start = Start([[0, 6, 1, 0], [8, 20, 2, 0]], quota=8)
    assert positions(start.parts()[0].pieces) == [0, 1, 2, 3, 4, 5, 8, 10]
    assert start.padded_from() > len(start.parts()[0].pieces)


def test_a_quota_beyond_the_remaining_positions_is_filled_with_padding() -> None:
    start = Start([[0, 3, 1, 0]], quota=4, pad=[0, 1, 1, 0])
    assert positions(start.parts()[0].pieces) == [0, 1, 2, 0]
    assert start.padded_from() == 1


def test_only_one_position_is_run_if_one_is_requested() -> None:
    assert positions(Start([[0, 3, 1, 0], [10, 20, 5, 0]]).only(4).left) == [15]


def test_a_run_that_was_delivered_to_its_end_has_nothing_left() -> None:
    assert Start([[0, 9, 1, 0]]).after(None, None) == Start([])
    assert Start([[0, 9, 1, 0]], quota=5).after(None, None) == Start([], quota=0)


def test_the_positions_from_a_cursor_on_remain() -> None:
    start = Start([[0, 6, 1, 0], [10, 20, 5, 0]], quota=7)
    assert start.after(at(4, sub=2), None) == Start([[4, 6, 1, 2], [10, 20, 5, 0]], quota=3)
    assert start.after(at(15, piece=1), None) == Start([[15, 20, 5, 0]], quota=0)
    assert start.after(at(6), None) == Start([[10, 20, 5, 0]], quota=1)


def test_padding_that_was_delivered_counts_towards_the_quota() -> None:
    start = Start([[0, 3, 1, 0]], quota=5, pad=[0, 2, 1, 0])
    assert start.after(at(1, piece=1), None).quota == 1


def test_a_group_is_replayed_from_its_start() -> None:
    start = Start([[0, 20, 1, 0]])
    cursor = GroupCursor(2, at(8), at(12), 4, done=1, sub=3)
    assert start.after(cursor, WINDOW_LEVEL) == Start([[8, 20, 1, 0]], groups={2: (1, 3)})


def test_a_window_that_another_rank_can_take_becomes_an_open_window() -> None:
    start = Start([[0, 20, 1, 0]])
    cursor = GroupCursor(WINDOW_LEVEL, at(8, sub=1), at(11, sub=2), 4, done=1, sub=3)
    window = StartPart([[8, 12, 1, 1]], n=4, done=1, sub=3)
    assert start.after(cursor, WINDOW_LEVEL) == Start([[11, 20, 1, 2]], (window,))


def test_an_open_window_that_is_replayed_stays_open() -> None:
    windows = (StartPart([[0, 4, 1, 0]], 4, 1), StartPart([[4, 8, 1, 0]], 4, 2))
    start = Start([[8, 20, 1, 0]], windows)
    inside = GroupCursor(WINDOW_LEVEL, at(0, part=0), at(4, part=0), 4, done=3, sub=0)
    assert start.after(inside, WINDOW_LEVEL).opens == (StartPart([[0, 4, 1, 0]], 4, 3), windows[1])
    assert start.after(at(4, part=0), WINDOW_LEVEL) == Start([[8, 20, 1, 0]], windows[1:])


def test_a_counting_stage_resumes_with_what_it_has_seen() -> None:
    start = Start([[0, 20, 1, 0]])
    cursor = CountedCursor(3, GroupCursor(2, at(8), at(12), 4, done=1, sub=0), seen=7, sub=2)
    want = Start([[8, 20, 1, 0]], groups={3: (0, 2), 2: (1, 0)}, seen={3: 7})
    assert start.after(cursor, None) == want


def test_cursors_of_orders_with_and_without_counts_have_the_same_hash_words() -> None:
    counted, uncounted = Cursor(0, 0, 5, 2, key=99), Cursor(0, 1, 1 << 40, 2, key=99)
    assert counted.hash_words() == uncounted.hash_words() == (99, 2)
    assert GroupCursor(1, counted, counted, 4, 3, 1).hash_words() == (99, 2, 3, 1)
    assert CountedCursor(2, counted, 7, 0).hash_words() == (99, 2)


pieces_ = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=4).map(
    lambda rows: [[start, start + length, step, 0] for start, length, step in rows]
)


@given(pieces_, st.data())
def test_pieces_before_between_and_after_two_cursors_cover_every_position_once(
    pieces: list[list[int]], data: Any
) -> None:
    cursors = [Cursor(0, number, p, 0) for number, piece in enumerate(pieces) for p in range(*piece[:3])]
    low = data.draw(st.integers(0, len(cursors) - 1))
    high = data.draw(st.integers(low, len(cursors) - 1))
    every = [cursor.position for cursor in cursors]
    assert positions(pieces_from(pieces, cursors[low])) == every[low:]
    assert positions(pieces_between(pieces, cursors[low], cursors[high])) == every[low:high]


@pytest.mark.parametrize(("sub", "want"), [(0, [3, 4]), (1, [3, 4, 5])])
def test_a_position_delivered_in_part_belongs_to_the_pieces_before_it(sub: int, want: list[int]) -> None:
    assert positions(pieces_between([[0, 9, 1, 0]], at(3), at(5, sub=sub))) == want
