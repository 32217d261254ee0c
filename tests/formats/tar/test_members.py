"""The members of a file, walked and from their cached table."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

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


def read(path: Path, *renamed: Any) -> tuple[list[tuple[str, bytes]], list[DataError]]:
    found, errors = [], []
    with open(path, "rb") as file:
        for run in members.archive_members(file, str(path), *renamed):
            if isinstance(run, DataError):
                errors.append(run)
            else:
                found += list(zip(*run, strict=True))
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


def test_only_the_members_that_are_wanted_are_read_under_their_new_names(shard: Path) -> None:
    def renamed(names: list[str]) -> list[str]:
        return [name.upper() if name.endswith("cls") else "" for name in names]

    chosen = [(name.upper(), data) for name, data in expected(shard) if name.endswith("cls")]
    assert [read(shard, renamed) for _ in range(2)] == [(chosen, [])] * 2
    (shard.parent / "a.tgz").write_bytes(gzip.compress(shard.read_bytes()))
    assert read(shard.parent / "a.tgz", renamed) == (chosen, [])


@pytest.mark.parametrize("walked", [True, False])
@pytest.mark.parametrize("some", [True, False])
def test_a_file_that_is_cut_off_while_it_is_read_ends_there_with_an_error(
    tmp_path: Path, walked: bool, some: bool
) -> None:
    path, cut = tmp_path / "a.tar", 3_000_000
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(6000):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = 1024
            tar.addfile(member, io.BytesIO(b"%4d" % number * 256))
    if not walked:
        read(path)
    names: list[str] = []
    with open(path, "rb") as file:
        runs = members.archive_members(file, "s", lambda names: [n if n[0] != "7" or not some else "" for n in names])
        for run in runs:
            if isinstance(run, DataError):
                break
            assert all(data == b"%4d" % int(name[:-4]) * 256 for name, data in zip(*run, strict=True))
            if not names:
                os.truncate(path, cut)
            names += run[0]
        assert list(runs) == []
    assert str(run) == "the file was cut to 3,000,000 bytes while it was read (shard: s)"
    whole = [name for name in (f"{number}.jpg" for number in range(cut // 1536)) if name[0] != "7" or not some]
    assert names == whole[: len(names)]
    assert len(whole) - len(names) <= (512 if walked else 0), "headers are walked 512 ahead"


def test_no_page_of_a_file_is_mapped(shard: Path) -> None:
    with open(shard, "rb") as file:
        next(members.archive_members(file, "s"))
        assert str(shard) not in Path("/proc/self/maps").read_text()
