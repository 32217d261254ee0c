"""A file appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.formats.publish import (
    Draft,
    FileDraft,
    UploadDraft,
    partial_path,
    put_object,
    read_object,
    replace_file,
)
from penstock.storage import Memory


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "a"
    for data in (b"one", b"two"):
        replace_file(target, data)
        assert target.read_bytes() == data
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    replace_file(target, b"old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_partial_names_are_hidden_and_differ(tmp_path: Path) -> None:
    first, second = partial_path(tmp_path / "a.tar"), partial_path(tmp_path / "a.tar")
    assert first != second
    assert first.name.startswith(".a.tar.")
    assert first.name.endswith(".partial")
    assert len(partial_path(tmp_path / ("x" * 250)).name) < 255


def test_a_small_object_is_put_and_read() -> None:
    assert read_object(Memory(), "memory://publish/a") is None
    put_object(Memory(), "memory://publish/a", b"one")
    assert read_object(Memory(), "memory://publish/a") == b"one"


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_draft_appears_when_it_is_published_or_never(where: str, tmp_path: Path) -> None:
    seen: list[bytes | None] = []

    def look() -> None:
        seen.append(read_object(Memory(), "memory://publish/d") if where == "memory" else _content(tmp_path / "d"))

    def begun() -> Draft:
        if where == "disk":
            return FileDraft(tmp_path / "d", look)
        return UploadDraft(Memory().put("memory://publish/d"), look)

    dropped = begun()
    dropped.write(b"never")
    dropped.drop()
    draft = begun()
    draft.write(b"one")
    draft.write(memoryview(b" two"))
    look()
    draft.publish()
    look()
    assert seen == [None, None, b"one two"]
    if where == "disk":
        assert [path.name for path in tmp_path.iterdir()] == ["d"]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
