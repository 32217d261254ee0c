"""Calls run in order in one thread, submissions are bounded, and the first failure is raised to the submitter."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import pytest

from penstock.blobs.background import BackgroundThread, BoundedQueue, join_thread, run_now

InterruptAt = Callable[[int], AbstractContextManager[list[int]]]

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


def submit_and_stop(line: int, interrupt_at: InterruptAt) -> int:
    """Submit calls, with an interrupt at the given line, and stop the thread; return the number of executed lines."""
    thread = BackgroundThread("background", 2)
    with suppress(KeyboardInterrupt), interrupt_at(line) as count:
        for _ in range(3):
            thread(time.time)
    stopper = threading.Thread(target=thread.stop, daemon=True)
    stopper.start()
    stopper.join(DEADLINE_S)
    assert not stopper.is_alive(), f"stop waits for ever after an interrupt at line {line} of a submission"
    return count[0]


def test_an_interrupt_at_any_line_of_a_submission_leaves_nothing_locked(interrupt_at: InterruptAt) -> None:
    lines = submit_and_stop(0, interrupt_at)
    assert lines >= 6
    for line in range(1, lines + 1):
        assert submit_and_stop(line, interrupt_at) == line


def test_a_bounded_queue_keeps_the_order_and_waits_for_room() -> None:
    queue: BoundedQueue[int] = BoundedQueue(2)

    def put_all() -> None:
        for number in range(5):
            queue.put(number)

    putting = threading.Thread(target=put_all)
    putting.start()
    queue.put_last(-1)
    got = [queue.get() for _ in range(6)]
    putting.join(DEADLINE_S)
    assert sorted(got) == [-1, 0, 1, 2, 3, 4]
    assert [number for number in got if number >= 0] == [0, 1, 2, 3, 4]


def test_run_now_runs_in_the_calling_thread() -> None:
    idents: list[int] = []
    run_now(lambda: idents.append(threading.get_ident()))
    assert idents == [threading.get_ident()]


def test_a_thread_is_waited_for_again_after_ctrl_c_has_interrupted_the_wait() -> None:
    gate, ran = threading.Event(), list[str]()
    thread = BackgroundThread("interrupted", 1)

    def call() -> None:
        gate.wait(DEADLINE_S)
        ran.append("ended")

    thread(call)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            thread.finish()
    finally:
        signal.signal(signal.SIGALRM, previous)
    threading.Timer(0.1, gate.set).start()
    thread.stop()
    assert ran == ["ended"]
    assert "interrupted" not in {one.name for one in threading.enumerate()}


def test_a_wait_with_a_timeout_ends() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    join_thread(thread, 0.05)
    assert thread.is_alive()
    gate.set()
    join_thread(thread)
    assert not thread.is_alive()
