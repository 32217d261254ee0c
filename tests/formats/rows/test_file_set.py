"""Files of rows become visible together when they are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import PlanError, StorageError
from penstock.formats.rows.file_set import FileSet
from penstock.storage import open_storage

CSV = (".csv", ".txt")


def test_files_are_split_at_max_bytes_and_begin_with_the_header(tmp_path: Path) -> None:
    with FileSet(str(tmp_path), CSV, 12) as files:
        files.head = b"h\n"
        files.add([b"aaaa\n", b"bbbb\n", b"cccc\n", b"a row that is larger alone\n", b"d\n"])
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        names = files.publish()
    assert names == tuple(f"0000{n}-of-00004.csv" for n in range(4))
    assert [(tmp_path / name).read_bytes() for name in names] == [
        b"h\naaaa\nbbbb\n",
        b"h\ncccc\n",
        b"h\na row that is larger alone\n",
        b"h\nd\n",
    ]
    assert (files.rows, files.nbytes) == (5, sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert len(list(tmp_path.iterdir())) == 4


def test_files_that_are_not_published_leave_nothing_behind(tmp_path: Path) -> None:
    with FileSet(str(tmp_path / "new"), CSV, 4) as files:
        files.add([b"aaaa", b"bbbb"])
        assert [path.name for path in (tmp_path / "new").iterdir()] == [".rows.csv.partial"]
    assert not list(tmp_path.iterdir())


def test_a_run_completes_the_renames_of_one_killed_while_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FileSet(str(tmp_path), CSV, 4)
    files.add([b"aaaa", b"bbbb"])
    first_draft = files.drafts / "00000"
    monkeypatch.setattr(FileSet, "finish", lambda self: first_draft.replace(tmp_path / "00000-of-00002.csv"))
    files.publish()  # renames only the first draft
    monkeypatch.undo()
    with FileSet(str(tmp_path), CSV, 4) as next_run:
        next_run.finish()
        with pytest.raises(StorageError, match=r"holds \.csv files already"):
            next_run.check_empty()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "00000-of-00002.csv": b"aaaa",
        "00001-of-00002.csv": b"bbbb",
    }


def test_a_single_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with FileSet(str(path), CSV) as files:
        files.add([b"new"])
        assert path.read_text() == "old"
        assert files.publish() == ("out.txt",)
    assert path.read_text() == "new"


def test_a_set_without_rows_is_one_empty_file(tmp_path: Path) -> None:
    with FileSet(str(tmp_path), CSV) as files:
        assert files.publish() == ("00000-of-00001.csv",)
    assert (tmp_path / "00000-of-00001.csv").read_bytes() == b""


def test_remote_folders_get_the_same_files() -> None:
    url = "memory://fileset/out"
    with FileSet(url, CSV, 3) as files:
        files.add([b"aa\n", b"bb\n"])
        names = files.publish()
    storage = open_storage(url)
    assert [b"".join(storage.stream(f"{url}/{name}")) for name in names] == [b"aa\n", b"bb\n"]
    with pytest.raises(StorageError, match=r"holds \.csv files already"):
        FileSet(url, CSV).check_empty()


def test_a_folder_with_files_of_the_same_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("")
    with pytest.raises(StorageError, match=r"holds \.csv files already"):
        FileSet(str(tmp_path), CSV).check_empty()


def test_conflicting_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="give a folder"):
        FileSet("out.csv", CSV, 10)
    with pytest.raises(PlanError, match="compressed files cannot be written"):
        FileSet("out.csv.gz", CSV)
