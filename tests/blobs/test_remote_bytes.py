"""Streams are read while they arrive, and never fill the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.blobs.remote_bytes import ChunkReader, StreamedBytes, limited
from penstock.errors import DataError, StorageError


def gated(gate: threading.Event, *parts: bytes) -> Iterator[bytes]:
    """Yield the first part at once, and the others when the gate is opened."""
    yield parts[0]
    gate.wait(30)
    yield from parts[1:]


def test_bytes_can_be_read_before_the_end_has_arrived() -> None:
    gate = threading.Event()
    content = StreamedBytes(gated(gate, b"a" * 5000, b"b" * 5000), "x")
    assert content[10:20] == b"a" * 10
    window = content.window(512)
    assert (window.start, window.stop, bytes(window.data[:3])) == (0, 5000, b"aaa")
    assert content.reach(5000) == 5000
    gate.set()
    assert content[4999:5001] == b"ab"
    assert content.cut([0, 9_990], [2, 20_000]) == [b"aa", b"b" * 10]
    assert len(content) == 10_000
    assert bytes(content.mapped()[9_998:]) == b"bb"


def test_a_stream_that_never_ends_is_an_error() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 16)

    content = StreamedBytes(limited(endless(), 1 << 20, "http://h/a.tar"), "http://h/a.tar")
    assert content[:10] == bytes(10)
    with pytest.raises(StorageError, match=r"more than 1,048,576 bytes.*http://h/a\.tar"):
        content.reach(1 << 30)


def test_damage_ends_the_bytes_and_a_failure_is_raised_where_they_are_read() -> None:
    def damaged() -> Iterator[bytes]:
        yield b"good"
        raise DataError("the gz stream is damaged")

    def failing() -> Iterator[bytes]:
        yield b"good"
        raise StorageError("the connection broke", "x")

    content = StreamedBytes(damaged(), "x")
    assert (len(content), content.problem) == (4, "the gz stream is damaged")
    content = StreamedBytes(failing(), "x")
    assert content[:4] == b"good"
    with pytest.raises(StorageError, match="the connection broke"):
        content.reach(5)


def test_a_closed_stream_ends_its_thread_and_its_readers() -> None:
    gate = threading.Event()
    content = StreamedBytes(gated(gate, b"a", b"b"), "x")
    content.reach(1)
    content.close()
    with pytest.raises(StorageError, match="cancelled"):
        content.reach(2)
    gate.set()


def test_chunks_are_read_like_a_file() -> None:
    reader = ChunkReader(iter([b"abc", b"de"]))
    assert [reader.read(2), reader.read(2), reader.read(9), reader.read(9)] == [b"ab", b"c", b"de", b""]
