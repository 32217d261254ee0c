from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.storage import Local, Storage
from penstock.testing.storages import DATA, StorageTests, write


class TestPaths(StorageTests):
    @pytest.fixture
    def storage(self) -> Storage:
        return Local()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestFileUrls(StorageTests):
    @pytest.fixture
    def storage(self) -> Storage:
        return Local()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}"


def test_a_file_that_changes_while_it_is_streamed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(3 << 20))
    stream = Local().stream(str(path))
    next(stream)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StorageError, match="changed"):
        list(stream)


def test_an_aborted_upload_leaves_no_file(tmp_path: Path) -> None:
    with Local().put(str(tmp_path / "a")) as upload:
        upload.write(DATA)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_an_object(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="folder"):
        Local().info(str(tmp_path))


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        Local().put(str(tmp_path / "file" / "below"))
    assert "below" in str(caught.value)


def test_a_written_file_replaces_the_old_one(tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    write(Local(), url, b"old")
    write(Local(), url, DATA)
    assert (tmp_path / "a").read_bytes() == DATA


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write(Local(), str(tmp_path / "link"), DATA)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() == DATA


def test_a_device_is_written_to() -> None:
    reader, terminal = os.openpty()
    try:
        write(Local(), os.ttyname(terminal), b"text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
        os.close(terminal)
