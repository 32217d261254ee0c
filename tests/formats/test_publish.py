"""A file appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.formats.publish import partial_path, replace_file


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
