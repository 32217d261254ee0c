"""A sink computes checksums in a background thread, which runs jobs in order and reports its first failure."""

from __future__ import annotations

import hashlib
import random
import threading
import time
import zlib
from pathlib import Path

import pytest

from penstock.blobs.background import BackgroundThread
from penstock.blobs.checksums import CELL
from penstock.blobs.draft import FileDraft
from penstock.formats.tar.sink import HashingSink


def test_jobs_run_in_order() -> None:
    done: list[int] = []
    thread = BackgroundThread("test", 3)
    for number in range(100):
        thread(lambda number=number: done.append(number))  # type: ignore[misc]
    thread.finish()
    assert done == list(range(100))


def test_after_a_failure_no_job_runs_and_submitting_raises() -> None:
    done: list[int] = []
    thread = BackgroundThread("test", 2)
    thread(lambda: 1 / 0)

    def submit() -> None:
        for number in range(1000):
            thread(lambda number=number: done.append(number))  # type: ignore[misc]
            time.sleep(0.0001)

    with pytest.raises(ZeroDivisionError):
        submit()
    with pytest.raises(ZeroDivisionError):
        thread.finish()
    assert done == []


def test_submitting_to_a_full_queue_waits() -> None:
    go = threading.Event()
    thread = BackgroundThread("test", 1)
    thread(go.wait)
    thread(time.time)
    submitted = threading.Event()

    def submit() -> None:
        thread(time.time)
        submitted.set()

    other = threading.Thread(target=submit)
    other.start()
    assert not submitted.wait(0.1)
    go.set()
    other.join()
    thread.finish()
    assert submitted.is_set()


def test_stopping_skips_the_jobs_that_wait() -> None:
    go, done = threading.Event(), []
    thread = BackgroundThread("test", 5)
    thread(go.wait)
    thread(lambda: done.append(1))
    threading.Timer(0.05, go.set).start()
    thread.stop()
    assert done == []


def test_stopping_after_all_runs_the_jobs_that_wait_and_raises_nothing() -> None:
    done: list[int] = []
    for after_all, count in ((True, 3), (False, 0)):
        thread, gate = BackgroundThread("test", 5), threading.Event()
        thread(gate.wait)
        for number in range(3):
            thread(lambda number=number: done.append(number))  # type: ignore[misc]
        threading.Timer(0.05, gate.set).start()
        thread.stop(after_all=after_all)
        assert len(done) == count
        done.clear()
    thread = BackgroundThread("test", 1)
    thread(lambda: 1 / 0)
    thread.stop(after_all=True)


def test_checksums_are_those_of_the_bytes_written() -> None:
    got: list[bytes] = []

    class Kept:
        def write(self, data: bytes | memoryview) -> None:
            got.append(bytes(data))

        def publish(self) -> None: ...

        def drop(self) -> None: ...

    thread = BackgroundThread("test", 5)
    sink, buffer = HashingSink(Kept(), thread), bytearray(b"a" * 2_000_000)
    sink.write(memoryview(buffer))
    buffer[:] = b"b" * len(buffer)  # as a compressor that reuses its buffer does
    sink.write(b"end")
    thread.finish()
    want = b"a" * 2_000_000 + b"end"
    assert b"".join(got) == want
    assert (sink.nbytes, sink.sha256.hexdigest()) == (len(want), hashlib.sha256(want).hexdigest())
    assert sink.checksums.values().tolist() == [zlib.crc32(want[at : at + CELL]) for at in range(0, len(want), CELL)]


def test_buffers_are_gathered_in_memory_that_is_used_again(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(3 * CELL)
    thread = BackgroundThread("test", 4)
    draft = FileDraft(tmp_path / "file", lambda: None)
    sink = HashingSink(draft, thread)
    for start in range(0, len(content), 70_000):
        sink.write_pieces([content[start : start + 30_000], memoryview(content)[start + 30_000 : start + 70_000]])
    sink.write_pieces([content, content])  # too much to be gathered
    thread.finish()
    draft.publish()
    assert (tmp_path / "file").read_bytes() == 3 * content
    assert sink.sha256.digest() == hashlib.sha256(3 * content).digest()
    assert sink.nbytes == 9 * CELL
    assert len(sink._spare) <= 4 + 2  # queued, hashed, written
