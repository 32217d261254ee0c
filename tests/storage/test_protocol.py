from __future__ import annotations

import os
import pickle
import threading
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from penstock.errors import PlanError, StorageError
from penstock.storage import (
    HTTP,
    S3,
    FsspecStorage,
    Local,
    Memory,
    NotFound,
    Storage,
    open_storage,
    protocol,
    redacted,
    register,
)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("a/b.tar", Local),
        ("/a:b/c", Local),
        ("file:///a", Local),
        ("memory://a", Memory),
        ("http://host/a", HTTP),
        ("HTTPS://host/a", HTTP),
        ("s3://bucket/a", S3),
        ("gs://bucket/a", FsspecStorage),
    ],
)
def test_the_scheme_selects_the_storage(url: str, kind: type) -> None:
    assert type(open_storage(url)) is kind


def test_every_storage_has_the_methods_of_the_protocol() -> None:
    for storage in (Local(), Memory(), HTTP(), S3(), FsspecStorage()):
        assert isinstance(storage, Storage)


def test_a_storage_that_is_given_is_used() -> None:
    storage = S3(region="eu-north-1")
    assert open_storage("memory://a", storage) is storage


def test_a_value_that_is_not_a_storage_is_refused() -> None:
    with pytest.raises(PlanError, match="storage=3 is not a storage"):
        open_storage("memory://a", 3)  # type: ignore[arg-type]


def test_a_registered_scheme_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_registered", {})
    register("Lab", Memory)
    assert isinstance(open_storage("lab://a"), Memory)


def test_an_entry_point_serves_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("lab9", "penstock.storage.memory:Memory", "penstock.storages")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **params: EntryPoints([point]).select(**params))
    assert isinstance(open_storage("lab9://a"), Memory)


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("https://user:pw@host:8/a.tar?X-Amz-Signature=pw#pw", "https://host:8/a.tar?..."),
        ("https://pw@host/a@b", "https://host/a@b"),
        ("gs://pw@bucket/a?pw", "gs://bucket/a?..."),
        ("s3://key:pw@bucket/a?b#c", "s3://bucket/a?b#c"),
        ("s3://anonymous@bucket/a", "s3://anonymous@bucket/a"),
        ("/path/a?b@c", "/path/a?b@c"),
        ("file:///a?b", "file:///a?b"),
    ],
)
def test_secrets_are_removed_from_urls(url: str, want: str) -> None:
    assert redacted(url) == want


def test_not_found_is_a_storage_error_that_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(NotFound("there is no such object", "s3://a/b")))
    assert isinstance(error, StorageError)
    assert (type(error), error.url) == (NotFound, "s3://a/b")


def test_an_upload_that_cannot_be_committed_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Local().put(str(tmp_path / "a"))
    upload.write(b"x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="permission denied"):
        upload.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_made_once_per_process_and_again_in_a_child() -> None:
    maker_pids: list[int] = []

    def make() -> object:
        maker_pids.append(os.getpid())
        return object()

    key = object()
    threads = [threading.Thread(target=protocol.per_process, args=(key, make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maker_pids == [os.getpid()]
    child = os.fork()
    if not child:
        protocol.per_process(key, make)
        os._exit(0 if maker_pids[1:] == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
