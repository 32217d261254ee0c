from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import MissingExtra, PlanError, StorageError
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


def test_options_may_be_a_dict_and_hold_dicts() -> None:
    storage = FsspecStorage({"client_kwargs": {"region": "x"}})  # type: ignore[arg-type]
    assert storage == FsspecStorage((("client_kwargs", {"region": "x"}),))
    assert len({storage, FsspecStorage((("client_kwargs", {"region": "x"}),))}) == 1
    with pytest.raises(PlanError, match="options"):
        FsspecStorage(("token",))  # type: ignore[arg-type]


def test_a_stream_of_several_pieces_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.fsspec._PIECE_BYTES", 1000)
    write(FsspecStorage(), "memory://pieces/a", DATA)
    assert b"".join(FsspecStorage().stream("memory://pieces/a")) == DATA


def test_an_upload_has_no_named_file_that_a_killed_process_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage, url = FsspecStorage(), f"memory://{secrets.token_hex(4)}/a"
    with storage.put(url) as upload:
        upload.write(DATA)
        assert list(tmp_path.iterdir()) == []
        upload.commit()
    assert b"".join(storage.stream(url)) == DATA


GOOGLE = """
import sys
from gcp_storage_emulator.server import create_server
import penstock as ps
from penstock.storage import FsspecStorage

server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
try:
    address = "http://127.0.0.1:%d" % server._api._httpd.server_port
    storage = FsspecStorage((("token", "anon"), ("endpoint_url", address), ("project", "test")))
    items = [{"__key__": "%03d" % n, "txt": str(n)} for n in range(50)]
    ps.from_items(items).write_tar("gs://bucket/train", max_samples=20, storage=storage)
    ds = ps.read_tar("gs://bucket/train", storage=storage)
    print(len(ds), sorted(int(sample["txt"]) for sample in ds.shuffle()) == [*range(50)])
finally:
    server.stop()
"""


def test_shards_are_written_to_and_read_from_google_cloud_storage(tmp_path: Path, warm_python: str) -> None:
    """In a process of its own, because gcsfs keeps threads; without calls by gRPC, which the server does not know."""
    env = {**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    call = [warm_python, "-c", GOOGLE]
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=env, cwd=tmp_path, timeout=300)
    assert done.stdout == "50 True\n", done.stderr
