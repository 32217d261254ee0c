"""A line does its jobs in order, holds back whoever is too quick, and tells of the first failure."""

from __future__ import annotations

import hashlib
import threading
import time
import zlib

import pytest

from penstock.blobs.background import BackgroundThread
from penstock.blobs.checksums import CELL
from penstock.formats.tar.sink import Sink


def test_jobs_are_done_in_order_by_one_thread() -> None:
    done: list[int] = []
    line = BackgroundThread("line", 3)
    for number in range(100):
        line(lambda number=number: done.append(number))  # type: ignore[misc]
    line.finish()
    assert done == list(range(100))


def test_after_a_failure_nothing_is_done_and_nobody_waits_for_ever() -> None:
    done: list[int] = []
    line = BackgroundThread("line", 2)
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
    line = BackgroundThread("line", 1)
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
    line = BackgroundThread("line", 5)
    line(go.wait)
    line(lambda: done.append(1))
    threading.Timer(0.05, go.set).start()
    line.stop()
    assert done == []


def test_a_line_may_end_after_all_that_waits_and_tells_no_failure() -> None:
    done: list[int] = []
    for after_all, many in ((True, 3), (False, 0)):
        line, gate = BackgroundThread("line", 5), threading.Event()
        line(gate.wait)
        for number in range(3):
            line(lambda number=number: done.append(number))  # type: ignore[misc]
        threading.Timer(0.05, gate.set).start()
        line.stop(after_all=after_all)
        assert len(done) == many
        done.clear()
    line = BackgroundThread("line", 1)
    line(lambda: 1 / 0)
    line.stop(after_all=True)


def test_checksums_are_those_of_what_was_written_whoever_makes_them() -> None:
    got: list[bytes] = []

    class Kept:
        def write(self, data: bytes | memoryview) -> None:
            got.append(bytes(data))

        def publish(self) -> None: ...

        def drop(self) -> None: ...

    line = BackgroundThread("line", 5)
    sink, buffer = Sink(Kept(), line), bytearray(b"a" * 2_000_000)
    sink.write(memoryview(buffer))
    buffer[:] = b"b" * len(buffer)  # as a compressor does that uses its buffer again
    sink.write(b"end")
    line.finish()
    want = b"a" * 2_000_000 + b"end"
    assert b"".join(got) == want
    assert (sink.count, sink.hash.hexdigest()) == (len(want), hashlib.sha256(want).hexdigest())
    assert sink.grid.values().tolist() == [zlib.crc32(want[at : at + CELL]) for at in range(0, len(want), CELL)]
