"""A stamp distinguishes two contents of a file, and data derived from a file is cached in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.blobs.stamp import Stamp, cached_path, user_cache, write_cached


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "/tmp/mine")
    assert user_cache() == Path("/tmp/mine")
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/penstock")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache() == Path("/home/me/.cache/penstock")


def test_a_stamp_changes_with_the_content_and_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    before = Stamp.of(path.stat())
    assert before == Stamp.of(path.stat())
    os.utime(path, ns=(0, before.mtime_ns + 1))
    assert Stamp.of(path.stat()) != before
    (tmp_path / "b").write_bytes(b"one")
    os.utime(tmp_path / "b", ns=(0, before.mtime_ns))
    assert Stamp.of((tmp_path / "b").stat()) != before, "another inode"


def test_derived_data_is_cached_by_family_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    write_cached("index", "/data/a.tar", b"index of a")
    write_cached("offsets", "/data/a.tar", b"offsets of a")
    assert cached_path("index", "/data/a.tar").read_bytes() == b"index of a"
    assert cached_path("offsets", "/data/a.tar").read_bytes() == b"offsets of a"
    assert not cached_path("index", "/data/b.tar").exists()


def test_a_cache_that_cannot_be_written_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    write_cached("index", "/data/a.tar", b"index of a")
    assert (tmp_path / "file").read_bytes() == b""
