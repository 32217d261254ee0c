from __future__ import annotations

import os
import pickle
import threading
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.storage import (
    S3,
    FsspecStorage,
    Http,
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
        ("http://host/a", Http),
        ("HTTPS://host/a", Http),
        ("s3://bucket/a", S3),
        ("gs://bucket/a", FsspecStorage),
    ],
)
def test_the_scheme_chooses_the_storage(url: str, kind: type) -> None:
    assert type(open_storage(url)) is kind


def test_every_storage_keeps_the_protocol() -> None:
    for storage in (Local(), Memory(), Http(), S3(), FsspecStorage()):
        assert isinstance(storage, Storage)


def test_a_given_storage_wins() -> None:
    given = S3(region="eu-north-1")
    assert open_storage("memory://a", given) is given


def test_a_registered_scheme_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_registered", {})
    register("Lab", Memory)
    assert isinstance(open_storage("lab://a"), Memory)


def test_an_entry_point_serves_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("lab9", "penstock.storage.memory:Memory", "penstock.storages")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: EntryPoints([point]).select(**asked))
    assert isinstance(open_storage("lab9://a"), Memory)


@pytest.mark.parametrize(
    ("url", "seen"),
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
def test_a_url_is_shown_without_what_is_secret(url: str, seen: str) -> None:
    assert redacted(url) == seen


def test_not_found_is_a_storage_error_that_crosses_processes() -> None:
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


def test_what_a_process_made_is_made_once_and_again_in_a_child() -> None:
    made: list[int] = []

    def make() -> object:
        made.append(os.getpid())
        return object()

    key = object()
    threads = [threading.Thread(target=protocol.own, args=(key, make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [os.getpid()]
    child = os.fork()
    if not child:
        protocol.own(key, make)
        os._exit(0 if made[1:] == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
