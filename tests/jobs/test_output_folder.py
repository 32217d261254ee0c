from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.jobs.output_folder import LocalOutputFolder, RemoteOutputFolder
from penstock.storage import Memory


def _draft(folder: Path, **files: str) -> str:
    draft = folder / ".draft"
    for name, text in files.items():
        (draft / "below").mkdir(parents=True, exist_ok=True)
        (draft / "below" / name).write_text(text)
    return str(draft)


def test_outputs_are_published_and_the_draft_is_removed(tmp_path: Path) -> None:
    folder = LocalOutputFolder(str(tmp_path))
    folder.publish(_draft(tmp_path, a="12"), (("below/a", 2),))
    assert (tmp_path / "below" / "a").read_text() == "12"
    assert os.listdir(tmp_path) == ["below"]
    assert folder.holds((("below/a", 2),))
    assert not folder.holds((("below/a", 3),))
    assert folder.existing(["below/a", "b"]) == ["below/a"]
    folder.remove(["below/a", "never/was"])
    assert os.listdir(tmp_path) == []
    assert not folder.holds((("below/a", 2),))
    folder.publish(_draft(tmp_path, a="12"), (("below/a", 2),))  # into a parent that it has removed
    assert folder.holds((("below/a", 2),))


def test_outputs_are_copied_to_a_folder_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os_replace = os.replace

    def replace(source: str, target: str) -> None:
        if ".draft" in str(source):
            raise OSError(errno.EXDEV, "another disk")
        os_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    LocalOutputFolder(str(tmp_path)).publish(_draft(tmp_path, a="12"), (("below/a", 2),))
    assert os.listdir(tmp_path / "below") == ["a"]


def test_a_remote_folder_has_the_files_of_its_listing() -> None:
    folder = RemoteOutputFolder("memory://folder/out", Memory())
    with Memory().put("memory://folder/out/a/b") as upload:
        upload.write(b"12")
        upload.commit()
    assert folder.holds((("a/b", 2),))
    assert not folder.holds((("a/b", 3),))
    assert not folder.holds((("a/c", 2),))
    folder.remove(["a/b"])
    assert not RemoteOutputFolder("memory://folder/out", Memory()).holds((("a/b", 2),))
