"""The members of a file, walked and from their cached table."""

from __future__ import annotations

import io
import mmap
import os
import tarfile
from pathlib import Path

import pytest

from penstock.blobs.stamp import cached_path
from penstock.errors import DataError
from penstock.formats.tar import members

NAMES = ["a.jpg", "./b.jpg", "dir/ü.cls", "noext", "x" * 300 + ".jpg", "a.jpg"]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "a.tar"
    write(path, NAMES * 200)
    return path


def write(path: Path, names: list[str], size: int = 700) -> None:
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = number % size
            tar.addfile(member, io.BytesIO(b"%d" % (number % 10) * member.size))


def read(path: Path) -> tuple[list[tuple[str, bytes]], list[DataError]]:
    found, errors = [], []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for run in members.file_members(content, file):
            if isinstance(run, DataError):
                errors.append(run)
            else:
                found += [(name, content[span]) for name, span in zip(*run, strict=True)]
    return found, errors


def expected(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def table(path: Path) -> Path:
    return cached_path("members", str(path))


def test_the_second_reading_parses_no_header_and_finds_the_same(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(shard) == (expected(shard), [])
    monkeypatch.setattr(members, "ArchiveWalker", None)
    assert read(shard) == (expected(shard), [])


def test_a_file_that_changed_is_walked_again(shard: Path) -> None:
    read(shard)
    write(shard, ["b.jpg", *NAMES], size=1000)
    assert read(shard) == (expected(shard), [])


@pytest.mark.parametrize("damage", [b"", b"PSTKMB01", b"x" * 500])
def test_a_damaged_table_is_not_used(shard: Path, damage: bytes) -> None:
    read(shard)
    table(shard).write_bytes(damage)
    assert read(shard) == (expected(shard), [])
    content = bytearray(table(shard).read_bytes())
    content[60] ^= 1
    table(shard).write_bytes(content)
    assert read(shard) == (expected(shard), [])


def test_damage_is_found_every_time(shard: Path) -> None:
    os.truncate(shard, 100_000)
    first = read(shard)
    assert [str(error) for error in first[1]] == [str(error) for error in read(shard)[1]] != []
    assert first[0] == read(shard)[0]
    assert not table(shard).exists()


def test_an_archive_without_members_has_a_table_too(tmp_path: Path) -> None:
    write(tmp_path / "empty.tar", [])
    assert [read(tmp_path / "empty.tar") for _ in range(2)] == [([], [])] * 2


def test_a_pass_over_a_large_file_maps_only_a_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "large.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(1200):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = 200_000
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    read(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for run in members.file_members(content, file):
            assert not isinstance(run, DataError)
            for span in run[1]:
                assert not content[span].strip(b"\0")
        mapped = next(line for line in _mapping(path) if line.startswith("Rss:"))
    assert int(mapped.split()[1]) < 180_000  # KiB, of 240,000: a run has 512 members


def _mapping(path: Path) -> list[str]:
    """Return the kernel's figures about the mapping of a file."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.endswith(str(path)))
    return lines[at : at + 24]
