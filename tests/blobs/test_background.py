"""Calls run in order in one thread, submissions are bounded, and the first failure is raised to the submitter."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.blobs.background import BackgroundThread, run_now

DEADLINE_S = 30


def test_calls_run_in_order_in_one_other_thread() -> None:
    ran: list[tuple[int, int]] = []
    thread = BackgroundThread("background", 3)
    for number in range(100):
        thread(lambda number=number: ran.append((number, threading.get_ident())))  # type: ignore[misc]
    thread.finish()
    assert [number for number, _ in ran] == list(range(100))
    (ident,) = {ident for _, ident in ran}
    assert ident != threading.get_ident()


def test_after_a_failure_later_calls_are_skipped_and_the_failure_is_raised() -> None:
    ran: list[int] = []
    thread = BackgroundThread("background", 2)
    thread(lambda: 1 / 0)

    def submit() -> None:
        for number in range(1000):
            thread(lambda number=number: ran.append(number))  # type: ignore[misc]
            time.sleep(0.0001)

    with pytest.raises(ZeroDivisionError):
        submit()
    with pytest.raises(ZeroDivisionError):
        thread.finish()
    assert ran == []


def test_a_submission_blocks_while_the_queue_is_full() -> None:
    gate, submitted = threading.Event(), threading.Event()
    thread = BackgroundThread("background", 1)
    thread(gate.wait)
    thread(time.time)

    def submit() -> None:
        thread(time.time)
        submitted.set()

    submitter = threading.Thread(target=submit)
    submitter.start()
    assert not submitted.wait(0.1)
    gate.set()
    submitter.join(DEADLINE_S)
    thread.finish()
    assert submitted.is_set()


@pytest.mark.parametrize(("after_all", "expected"), [(False, []), (True, [0, 1, 2])])
def test_stopping_skips_the_queued_calls_unless_they_are_requested(after_all: bool, expected: list[int]) -> None:
    ran: list[int] = []
    thread, gate = BackgroundThread("background", 5), threading.Event()
    thread(gate.wait)
    for number in range(3):
        thread(lambda number=number: ran.append(number))  # type: ignore[misc]
    threading.Timer(0.05, gate.set).start()
    thread.stop(after_all=after_all)
    assert ran == expected


def test_stopping_raises_no_failure() -> None:
    thread = BackgroundThread("background", 1)
    thread(lambda: 1 / 0)
    thread.stop(after_all=True)


def test_run_now_runs_in_the_calling_thread() -> None:
    idents: list[int] = []
    run_now(lambda: idents.append(threading.get_ident()))
    assert idents == [threading.get_ident()]
