from __future__ import annotations

import secrets
import sys

import pytest

from penstock.errors import MissingExtra, StorageError
from penstock.storage import FsspecStorage, Storage, open_storage
from penstock.testing.storages import DATA, StorageTests, write


class TestFsspec(StorageTests):
    """fsspec's own memory file system: the one that needs no server."""

    @pytest.fixture
    def storage(self) -> Storage:
        return FsspecStorage()

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{secrets.token_hex(4)}"


def test_a_scheme_nobody_knows_is_named() -> None:
    with pytest.raises(StorageError, match="no storage for nfs9"):
        open_storage("nfs9://bucket/a").info("nfs9://bucket/a")


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"penstock\[fsspec\]"):
        open_storage("dropbox9://a/b").info("dropbox9://a/b")


def test_options_are_not_shown() -> None:
    assert "seen" not in repr(FsspecStorage(options=(("token", "never-to-be-seen"),)))


def test_a_stream_of_several_pieces_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.fsspec._PIECE", 1000)
    write(FsspecStorage(), "memory://pieces/a", DATA)
    assert b"".join(FsspecStorage().stream("memory://pieces/a")) == DATA
