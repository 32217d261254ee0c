from __future__ import annotations

import secrets
import sys

import pytest

from penstock.errors import MissingExtra, StorageError
from penstock.storage import FsspecStorage, Storage, open_storage
from penstock.testing.storages import DATA, StorageTests, write


class TestFsspec(StorageTests):
    """Uses fsspec's memory file system, which needs no server."""

    @pytest.fixture
    def storage(self) -> Storage:
        return FsspecStorage()

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{secrets.token_hex(4)}"


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(StorageError, match="no storage for nfs9"):
        open_storage("nfs9://bucket/a").info("nfs9://bucket/a")


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"penstock\[fsspec\]"):
        open_storage("dropbox9://a/b").info("dropbox9://a/b")


def test_the_repr_does_not_show_options() -> None:
    assert "secret" not in repr(FsspecStorage(options=(("token", "secret"),)))


def test_a_stream_of_several_pieces_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.fsspec._PIECE_BYTES", 1000)
    write(FsspecStorage(), "memory://pieces/a", DATA)
    assert b"".join(FsspecStorage().stream("memory://pieces/a")) == DATA
