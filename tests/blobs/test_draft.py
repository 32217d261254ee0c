"""A file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.blobs.draft import (
    Draft,
    FileDraft,
    UploadDraft,
    partial_path,
    put_object,
    read_object,
    replace_file,
)
from penstock.storage import Forbidden, Memory


def test_replacing_a_file_leaves_nothing_else_in_its_folder(tmp_path: Path) -> None:
    target = tmp_path / "a"
    for data in (b"one", b"two"):
        replace_file(target, data)
        assert target.read_bytes() == data
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    replace_file(target, b"old")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_partial_names_are_hidden_unique_and_within_255_bytes(tmp_path: Path) -> None:
    first, second = partial_path(tmp_path / "a.tar"), partial_path(tmp_path / "a.tar")
    assert first != second
    assert first.name.startswith(".a.tar.")
    assert first.name.endswith(".partial")
    assert len(partial_path(tmp_path / ("x" * 250)).name) < 255


def test_a_small_object_is_written_and_read_back() -> None:
    assert read_object(Memory(), "memory://publish/a") is None
    put_object(Memory(), "memory://publish/a", b"one")
    assert read_object(Memory(), "memory://publish/a") == b"one"


@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_a_draft_becomes_visible_only_by_publishing(storage: str, tmp_path: Path) -> None:
    seen: list[bytes | None] = []

    def record() -> None:
        seen.append(read_object(Memory(), "memory://publish/d") if storage == "memory" else _content(tmp_path / "d"))

    def new_draft() -> Draft:
        if storage == "disk":
            return FileDraft(tmp_path / "d", record)
        return UploadDraft(Memory().put("memory://publish/d"), record)

    dropped = new_draft()
    dropped.write(b"never")
    dropped.drop()
    draft = new_draft()
    draft.write(b"one")
    draft.write(memoryview(b" two"))
    record()
    draft.publish()
    record()
    assert seen == [None, None, b"one two"]
    if storage == "disk":
        assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_draft_on_disk_is_created_by_its_first_write(tmp_path: Path) -> None:
    draft = FileDraft(tmp_path / "d", lambda: None)
    assert list(tmp_path.iterdir()) == []
    draft.drop()
    draft.drop()
    draft.write(b"x")
    assert [path.name.startswith(".d.") for path in tmp_path.iterdir()] == [True]
    draft.drop()
    assert list(tmp_path.iterdir()) == []
    FileDraft(tmp_path / "empty", lambda: None).publish()
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_missing_folder_is_an_error_of_the_first_write(tmp_path: Path) -> None:
    draft = FileDraft(tmp_path / "missing" / "d", lambda: None)
    with pytest.raises(FileNotFoundError):
        draft.write(b"x")
    draft.drop()


def test_a_forbidden_object_counts_as_missing_only_if_it_is_optional() -> None:
    class ForbiddingMemory(Memory):
        def stream(self, url: str) -> Iterator[bytes]:
            raise Forbidden("access denied", url)

    with pytest.raises(Forbidden, match="access denied"):
        read_object(ForbiddingMemory(), "memory://publish/guarded")
    assert read_object(ForbiddingMemory(), "memory://publish/guarded", optional=True) is None


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
