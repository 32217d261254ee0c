from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.jobs.output_folder import DiskFolder, FarFolder
from penstock.storage import Memory


def _draft(folder: Path, **files: str) -> str:
    draft = folder / ".draft"
    for name, text in files.items():
        (draft / "below").mkdir(parents=True, exist_ok=True)
        (draft / "below" / name).write_text(text)
    return str(draft)


def test_outputs_get_their_names_and_the_draft_goes(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path))
    folder.publish(_draft(tmp_path, a="12"), (("below/a", 2),))
    assert (tmp_path / "below" / "a").read_text() == "12"
    assert os.listdir(tmp_path) == ["below"]
    assert folder.holds((("below/a", 2),))
    assert not folder.holds((("below/a", 3),))
    assert folder.strangers(["below/a", "b"]) == ["below/a"]
    folder.remove(["below/a", "never/was"])
    assert os.listdir(tmp_path) == []
    assert not folder.holds((("below/a", 2),))
    folder.publish(_draft(tmp_path, a="12"), (("below/a", 2),))  # into a folder that it had seen and that was gone
    assert folder.holds((("below/a", 2),))


def test_a_folder_on_another_disk_is_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: str, target: str) -> None:
        if ".draft" in str(source):
            raise OSError(errno.EXDEV, "another disk")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    DiskFolder(str(tmp_path)).publish(_draft(tmp_path, a="12"), (("below/a", 2),))
    assert os.listdir(tmp_path / "below") == ["a"]


def test_what_lies_elsewhere_is_listed_once() -> None:
    folder = FarFolder("memory://folder/out", Memory())
    with Memory().put("memory://folder/out/a/b") as upload:
        upload.write(b"12")
        upload.commit()
    assert folder.holds((("a/b", 2),))
    assert not folder.holds((("a/b", 3),))
    assert not folder.holds((("a/c", 2),))
    folder.remove(["a/b"])
    assert not FarFolder("memory://folder/out", Memory()).holds((("a/b", 2),))
