from __future__ import annotations

import mmap
import time

from penstock.engines.local.heartbeat import SIZE, Heartbeat


def test_a_board_says_which_item_is_at_hand_and_for_how_long() -> None:
    board = Heartbeat()
    assert board.read() is None
    board.enter(2, 17)
    time.sleep(0.02)
    read = board.read()
    assert read is not None
    assert read[:2] == (2, 17)
    assert 0.02 <= read[2] < 1


def test_a_new_item_begins_its_own_time() -> None:
    board = Heartbeat()
    board.enter(0, 1)
    time.sleep(0.05)
    board.enter(0, 2)
    read = board.read()
    assert read is not None
    assert read[1] == 2
    assert read[2] < 0.04


def test_a_board_that_was_left_says_nothing() -> None:
    board = Heartbeat()
    board.enter(0, 0)
    assert board.read() is not None
    board.leave()
    assert board.read() is None


def test_two_boards_on_one_memory_are_one() -> None:
    with mmap.mmap(-1, SIZE) as memory:
        writer, reader = Heartbeat(memory), Heartbeat(memory)
        writer.enter(1, 5)
        read = reader.read()
        assert read is not None
        assert read[:2] == (1, 5)
