"""The content of a local file is mapped; a compressed one is decompressed within limits first."""

from __future__ import annotations

import gc
import gzip
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from penstock.blobs.compression import ArchiveLimits
from penstock.blobs.content import Content, MappedFile, memory_file, open_content, room_for, temporary_copy
from penstock.errors import StorageError

DATA = bytes(range(256)) * 4000


def test_a_file_is_mapped_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(DATA)
    content = open_content(str(path), "a")
    assert isinstance(content.buffer, mmap.mmap)
    assert content.buffer[:] == DATA
    assert content.problem is None


def test_an_empty_file_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert open_content(str(tmp_path / "a"), "a") == Content(b"")


def test_a_compressed_file_is_decompressed_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spill))
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(DATA))
    content = open_content(str(path), "a.gz")
    assert content.buffer[:] == DATA
    assert content.problem is None
    assert list(spill.iterdir()) == []


def test_a_fetched_copy_has_no_name_that_a_killed_process_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_copy([DATA[:1000], DATA[1000:]], "a.tar", len(DATA)) as path:
        assert list(tmp_path.iterdir()) == []
        assert Path(path).read_bytes() == DATA


def test_compression_is_recognised_by_the_given_function(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(DATA))
    content = open_content(str(path), "a.gz", detect=lambda head: None)
    assert content.buffer[:] == path.read_bytes()


def test_a_damaged_stream_keeps_the_bytes_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    packed = gzip.compress(DATA)
    path.write_bytes(packed[: len(packed) // 2])
    content = open_content(str(path), "a.gz")
    assert 0 < len(content.buffer) < len(DATA)
    assert DATA.startswith(content.buffer[:])
    assert "the gz stream is damaged" in (content.problem or "")


def test_a_stream_beyond_the_limits_has_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(DATA))
    content = open_content(str(path), "a.gz", ArchiveLimits(max_bytes=600_000))
    assert content == Content(b"", "refused: it decompresses to more than 600000 bytes")


def test_a_missing_file_is_a_storage_error_with_its_url(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read the file: No such file.*\(url: shown\.tar\)"):
        open_content(str(tmp_path / "missing"), "shown.tar")


def test_a_temporary_folder_that_is_full_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk())
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(DATA))
    with pytest.raises(StorageError, match=r"cannot decompress the file to .*: No space left on device"):
        open_content(str(path), "a.gz")


def test_a_change_of_size_after_mapping_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(DATA)
    content = open_content(str(path), "a")
    assert not content.resized()
    with open(path, "ab") as file:
        file.write(b"more")
    assert content.resized()


def mapped(tmp_path: Path, data: bytes) -> MappedFile:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
    path.write_bytes(data)
    content = open_content(str(path), "a").bytes
    assert isinstance(content, MappedFile)
    return content


def test_a_range_is_copied_to_a_buffer_unless_it_is_too_large(tmp_path: Path) -> None:
    content = mapped(tmp_path, DATA * 5)
    copy = content.copied(1000, 900_000)
    assert copy is not None
    assert copy[: 900_000 - 1000] == content[1000:900_000]
    assert content.copied(0, 10) is copy, "each thread has one buffer"
    assert content.copied(0, len(content)) is None


def test_a_file_that_became_shorter_is_not_copied(tmp_path: Path) -> None:
    content = mapped(tmp_path, DATA)
    os.truncate(tmp_path / "0.bin", 5000)
    assert content.copied(0, 5000) is not None
    assert content.copied(0, 5001) is None


def test_a_forked_process_copies_to_a_buffer_of_its_own(tmp_path: Path) -> None:
    content, other = mapped(tmp_path, DATA), mapped(tmp_path, bytes(len(DATA)))
    copy = content.copied(0, 10_000)
    assert copy is not None
    if not (pid := os.fork()):
        os._exit(other.copied(0, 10_000) is not copy)
    assert os.waitpid(pid, 0)[1] == 0
    assert copy[:10_000] == DATA[:10_000]


def test_a_mapped_file_closes_its_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    content = mapped(tmp_path, DATA)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2, "one is that of the map"
    del content
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_a_size_that_does_not_fit_is_refused_at_once() -> None:
    assert room_for(1000, "x") == 1000
    with pytest.raises(StorageError, match="do not fit"):
        room_for(10**18, "x")


def test_a_memory_file_has_no_name_that_could_be_left_behind() -> None:
    fd = memory_file(5000)
    try:
        status = os.fstat(fd)
        assert status.st_size == 5000
        assert status.st_nlink == 0
        device = os.stat("/dev/shm").st_dev
        with os.scandir("/dev/shm") as entries:  # which other processes use too
            assert (status.st_dev, status.st_ino) not in {(device, entry.inode()) for entry in entries}
    finally:
        os.close(fd)
