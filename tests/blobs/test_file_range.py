"""Ranges of files are copied by the kernel where it can, and merged where they are adjacent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.blobs import file_range
from penstock.blobs.file_range import FileRange, joined, runs
from penstock.errors import StorageError

DATA = os.urandom((2 << 20) + 123)
OWNER = object()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def test_a_range_is_appended_to_a_file(source: int, tmp_path: Path) -> None:
    with open(tmp_path / "target", "wb", buffering=0) as target:
        target.write(b"head")
        FileRange(OWNER, source, 5, len(DATA) - 5).copy_to(target.fileno())
    assert (tmp_path / "target").read_bytes() == b"head" + DATA[5:-5]


def test_a_range_is_copied_to_a_pipe(source: int) -> None:
    reading, writing = os.pipe()
    FileRange(OWNER, source, 10, 1010).copy_to(writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == DATA[10:1010]


def test_copies_that_the_kernel_refuses_are_done_by_reading_and_writing(
    source: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(file_range, "_COPIES", (refuse, refuse, file_range._read_and_write))
    with open(tmp_path / "target", "wb", buffering=0) as target:
        FileRange(OWNER, source, 0, len(DATA)).copy_to(target.fileno())
    assert (tmp_path / "target").read_bytes() == DATA


def test_a_system_without_copy_file_range_copies_in_other_ways(
    source: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    with open(tmp_path / "target", "wb", buffering=0) as target:
        FileRange(OWNER, source, 0, len(DATA)).copy_to(target.fileno())
    assert (tmp_path / "target").read_bytes() == DATA


def test_a_target_that_no_copy_can_write_is_an_error(source: int, tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    target = os.open(tmp_path / "target", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            FileRange(OWNER, source, 0, 100).copy_to(target)
    finally:
        os.close(target)


def test_a_file_that_became_shorter_is_an_error(source: int, tmp_path: Path) -> None:
    past_end = FileRange(OWNER, source, len(DATA) - 10, len(DATA) + 10)
    with open(tmp_path / "target", "wb", buffering=0) as target, pytest.raises(StorageError, match="shorter"):
        past_end.copy_to(target.fileno())
    with pytest.raises(StorageError, match="shorter"):
        list(past_end.chunks())


def test_chunks_are_views_of_the_given_buffer(source: int) -> None:
    buffer = bytearray(1000)
    chunks = [bytes(chunk) for chunk in FileRange(OWNER, source, 7, 2507).chunks(buffer)]
    assert [len(chunk) for chunk in chunks] == [1000, 1000, 500]
    assert b"".join(chunks) == DATA[7:2507]


def test_adjacent_ranges_of_one_file_become_one_and_buffers_between_ranges_one_list(source: int) -> None:
    pieces: list[Any] = [
        b"a",
        FileRange(OWNER, source, 0, 10),
        FileRange(OWNER, source, 10, 30),
        FileRange(OWNER, source, 40, 50),
        b"b",
        b"c",
        FileRange(OWNER, source, 50, 60),
        FileRange(object(), source, 60, 70),
    ]
    merged = [(run.start, run.stop) if isinstance(run, FileRange) else run for run in runs(pieces)]
    assert merged == [[b"a"], (0, 30), (40, 50), [b"b", b"c"], (50, 60), (60, 70)]
    assert len(pieces[1]) == 10, "the given ranges are not changed"
    assert joined(pieces) == b"a" + DATA[:30] + DATA[40:50] + b"bc" + DATA[50:70]
