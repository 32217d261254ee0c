"""Copied samples go to a pipe or to an archive with an index; a failure leaves no archive behind."""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import DataError, StorageError
from penstock.formats.tar import load_index
from penstock.formats.tar.archive import encode_sample
from penstock.tarstream.gather import gather_runs, gather_samples
from penstock.tarstream.stream_writer import DescriptorStreamWriter, open_stream_writer

MakeArchive = Callable[..., str]
KEYS = [f"k{n:03}" for n in range(300)]


def read_all(fd: int, into: list[bytes]) -> None:
    with open(fd, "rb") as file:
        into.append(file.read())


@pytest.mark.parametrize("mapped", [False, True])
def test_a_pipe_gets_every_byte_in_order(mapped: bool, make_archive: MakeArchive, tmp_path: Path) -> None:
    path = make_archive("in.tar", KEYS, tarfile.USTAR_FORMAT, size=30_000)
    read, write = os.pipe()
    received: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(read, received))
    reader.start()
    with DescriptorStreamWriter(write) as writer:
        written = sum(
            writer.write_encoded(encoded) for run in gather_runs([path], mapped=mapped) for encoded in run.encode()
        )
    os.close(write)
    reader.join()
    assert len(received[0]) == written + 1024
    (tmp_path / "out.tar").write_bytes(received[0])
    stored = [(sample["__key__"], sample["jpg"]) for sample in ps.read_tar(path)]
    assert [(sample["__key__"], sample["jpg"]) for sample in ps.read_tar(str(tmp_path / "out.tar"))] == stored


def test_a_closed_pipe_is_raised() -> None:
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError), DescriptorStreamWriter(write) as writer:
        writer.write_encoded(encode_sample("k", {"bin": bytes(3_000_000)}))
    os.close(write)


@pytest.mark.parametrize("name", ["out.tar", "out.tar.gz"])
def test_an_archive_appears_with_its_index(name: str, make_archive: MakeArchive, tmp_path: Path) -> None:
    target = tmp_path / "new folder" / name
    with open_stream_writer(str(target)) as writer:
        for raw in gather_samples([make_archive("in.tar", KEYS[:20])]):
            writer.write_encoded(raw.encode())
        assert not target.exists()
    assert (tmp_path / "new folder" / f"{name}.index").exists()
    assert load_index(str(target)).keys() == KEYS[:20]


def test_a_failure_leaves_no_archive(tmp_path: Path) -> None:
    def run() -> None:
        with open_stream_writer(str(tmp_path / "out.tar")) as writer:
            writer.write_encoded(encode_sample("k", {"txt": b"x"}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


@pytest.mark.parametrize("named", [False, True])
def test_a_repeated_key_is_refused(named: bool, tmp_path: Path) -> None:
    encoded = encode_sample("k", {"txt": b"x"})
    with open(tmp_path / "stream.tar", "wb") as file:
        target = open_stream_writer(str(tmp_path / "a.tar")) if named else DescriptorStreamWriter(file.fileno())
        with target as writer:
            writer.write_encoded(encoded)
            with pytest.raises(DataError, match=r"the key was written before.*key: k"):
                writer.write_encoded(encoded)


def test_a_folder_that_cannot_be_created_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot create the folder"):
        open_stream_writer(str(tmp_path / "file" / "out.tar"))
