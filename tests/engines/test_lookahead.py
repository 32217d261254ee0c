"""What is found in advance: the same things in the same order, one ahead, and nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from penstock.engines.flow import ahead
from penstock.storage.retry import wanted


def scouts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock ahead"]


def test_everything_is_found_in_order() -> None:
    assert list(ahead(range(100), str)) == [(i, str(i)) for i in range(100)]
    assert not scouts()


def test_the_next_is_found_while_the_one_before_is_used_and_no_more() -> None:
    found: list[int] = []
    things = ahead(range(10), found.append)
    for taken in range(4):
        next(things)
        until = time.monotonic() + 5
        while len(found) < taken + 2 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(found) == taken + 2
    things.close()  # type: ignore[attr-defined]
    assert not scouts()


def test_what_fails_is_raised_where_it_stands() -> None:
    def find(number: int) -> int:
        return 1 // (3 - number)

    found = ahead(range(10), find)
    assert [next(found)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert not scouts()


def test_a_source_that_fails_is_no_shorter_source() -> None:
    def things() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    found = ahead(things(), str)
    assert next(found) == (1, "1")
    with pytest.raises(OSError, match="gone"):
        next(found)


def test_closing_does_not_wait_for_what_takes_for_ever() -> None:
    stuck = threading.Event()

    def find(number: int) -> int:
        if number:
            stuck.wait(30)
        return number

    things = ahead(range(3), find)
    next(things)
    begun = time.monotonic()
    things.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begun < 5
    stuck.set()
    for thread in scouts():
        thread.join(5)
    assert not scouts()


def test_what_is_found_after_the_end_is_wanted_by_nobody() -> None:
    began, ended, seen = threading.Event(), threading.Event(), []

    def find(number: int) -> int:
        if number:
            began.set()
            ended.wait(30)
        seen.append(wanted())
        return number

    things = ahead(range(3), find)
    next(things)
    assert began.wait(5)
    things.close()  # type: ignore[attr-defined]
    ended.set()
    for thread in scouts():
        thread.join(5)
    assert seen == [True, False]
