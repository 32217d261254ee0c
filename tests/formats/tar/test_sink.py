"""A line does its jobs in order, holds back whoever is too quick, and tells of the first failure."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.formats.tar.sink import Line


def test_jobs_are_done_in_order_by_one_thread() -> None:
    done: list[int] = []
    line = Line("line", 3)
    for number in range(100):
        line(lambda number=number: done.append(number))  # type: ignore[misc]
    line.finish()
    assert done == list(range(100))


def test_after_a_failure_nothing_is_done_and_nobody_waits_for_ever() -> None:
    done: list[int] = []
    line = Line("line", 2)
    line(lambda: 1 / 0)

    def give() -> None:
        for number in range(1000):
            line(lambda number=number: done.append(number))  # type: ignore[misc]
            time.sleep(0.0001)

    with pytest.raises(ZeroDivisionError):
        give()
    with pytest.raises(ZeroDivisionError):
        line.finish()
    assert done == []


def test_a_full_line_holds_back_who_gives_more() -> None:
    go = threading.Event()
    line = Line("line", 1)
    line(go.wait)
    line(time.time)
    given = threading.Event()

    def give() -> None:
        line(time.time)
        given.set()

    other = threading.Thread(target=give)
    other.start()
    assert not given.wait(0.1)
    go.set()
    other.join()
    line.finish()
    assert given.is_set()


def test_a_stopped_line_leaves_what_waits_undone() -> None:
    go, done = threading.Event(), []
    line = Line("line", 5)
    line(go.wait)
    line(lambda: done.append(1))
    threading.Timer(0.05, go.set).start()
    line.stop()
    assert done == []
