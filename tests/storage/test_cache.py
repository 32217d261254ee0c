from __future__ import annotations

import pickle
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError, StorageError
from penstock.storage import Listed, Local, Memory, NotFound, Storage
from penstock.storage.cache import Cache, CachedStorage, wrap_with_cache
from penstock.storage.cached_object import CHUNK_BYTES as CHUNK
from penstock.testing.storages import DATA, StorageTests, write
from tests.storage.conftest import CONTENT, URL, RemoteFolder, suffixes

pytestmark = pytest.mark.usefixtures("no_flush")


class TestCachedStorage(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return Cache(tmp_path / "cache", max_bytes="1GB").wrap(Memory())

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{secrets.token_hex(4)}"


def test_a_cache_is_a_value_whose_repr_has_folder_and_size(cache_dir: Path) -> None:
    cache = Cache(cache_dir, max_bytes="200GB")
    assert repr(cache) == f"Cache(folder={str(cache_dir)!r}, max_bytes=200000000000, fresh_s=300.0)"
    assert pickle.loads(pickle.dumps(cache)) == cache == Cache(str(cache_dir), 2e11)
    assert Cache(cache_dir).max_bytes is None
    assert not cache_dir.exists()


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Cache("here").folder == str(tmp_path / "here")


@pytest.mark.parametrize(
    ("name", "size"), [("x", "many"), ("x", 0), ("x", -1), ("", 1), ("s3://bucket/cache", 1), (None, 1), (b"x", 1)]
)
def test_invalid_folders_and_sizes_are_refused(name: Any, size: str | int) -> None:
    with pytest.raises(PlanError):
        Cache(name, size)


def test_contents_are_never_mixed(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    tag = cached.info(URL).tag
    cached.read(URL, 0, CHUNK)
    Path(remote.folder, "shard.tar").write_bytes(CONTENT[::-1])
    assert cached.read(URL, 0, CHUNK, tag=tag) == CONTENT[:CHUNK]
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, CHUNK // 2, 2 * CHUNK)
    assert cached.read(URL, CHUNK // 2, 2 * CHUNK) == CONTENT[::-1][CHUNK // 2 : 2 * CHUNK]
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, 0, 10, tag=tag)


def test_a_read_beyond_the_known_size_asks_the_server_again(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    cached.read(URL, 0, 1)
    Path(remote.folder, "shard.tar").write_bytes(CONTENT * 2)
    assert cached.read(URL, 0, 2 * len(CONTENT)) == CONTENT * 2


def test_size_and_tag_are_trusted_for_fresh_s(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cache(cache_dir, fresh_s=60).shared(remote)
    assert cached.stream(URL)
    for _ in range(3):
        assert Cache(cache_dir, fresh_s=60).shared(remote).local_path(URL) is None
    assert len(remote.requests("info")) == 1
    after = time.monotonic() + 61
    monkeypatch.setattr("penstock.storage.cache.time.monotonic", lambda: after)
    cached.info(URL)
    assert len(remote.requests("info")) == 2


def test_with_fresh_s_of_zero_every_call_asks_the_server(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir, fresh_s=0).wrap(remote)
    for calls in range(1, 4):
        cached.info(URL)
        assert len(remote.requests("info")) == calls


def test_a_change_of_one_object_or_an_error_makes_the_server_be_asked_about_all(
    remote: RemoteFolder, cache_dir: Path
) -> None:
    cached = Cache(cache_dir).wrap(remote)
    Path(remote.folder, "shard.tar.index").write_bytes(b"index")
    tag = cached.info(f"{URL}.index").tag
    cached.read(URL, 0, CHUNK)
    Path(remote.folder, "shard.tar.index").write_bytes(b"other")
    assert cached.info(f"{URL}.index").tag == tag
    Path(remote.folder, "shard.tar").write_bytes(CONTENT[::-1])
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, CHUNK, 2 * CHUNK)
    assert cached.info(f"{URL}.index").tag != tag


def test_a_dataset_that_is_opened_anew_asks_the_server(remote: RemoteFolder, cache_dir: Path) -> None:
    cache = Cache(cache_dir)
    for count in (1, 2):
        cached = wrap_with_cache(cache, [URL], remote)
        assert isinstance(cached, CachedStorage)
        cached.info(URL)
        cached.info(URL)
        assert len(remote.requests("info")) == count


@pytest.mark.parametrize("seconds", [-1, float("nan"), "3", True])
def test_a_fresh_s_that_is_not_a_time_is_refused(cache_dir: Path, seconds: Any) -> None:
    with pytest.raises(PlanError, match="fresh_s"):
        Cache(cache_dir, fresh_s=seconds)


def test_an_object_without_a_tag_is_not_cached(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(replace(remote, tagged=False))
    assert cached.read(URL, 5, 9) == CONTENT[5:9]
    assert b"".join(cached.stream(URL)) == CONTENT
    assert cached.local_path(URL) is None
    assert suffixes(cache_dir) == []


def test_put_and_delete_remove_the_copy(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    b"".join(cached.stream(URL))
    write(cached, URL, DATA)
    assert suffixes(cache_dir) == []
    assert b"".join(cached.stream(URL)) == DATA
    cached.delete(URL)
    assert suffixes(cache_dir) == []
    with pytest.raises(NotFound):
        cached.read(URL, 0, 1)
    assert cached.local_path(URL) is None
    assert list(cached.list("remote://host")) == [Listed("remote://host/listed", 1)]


def test_local_files_are_not_copied(tmp_path: Path, cache_dir: Path) -> None:
    path = str(tmp_path / "x")
    cached = Cache(cache_dir).wrap(Local())
    write(cached, path, DATA)
    assert cached.local_path(path) == path
    assert cached.read(path, 1, 5) == DATA[1:5]
    assert b"".join(cached.stream(path)) == DATA
    assert cached.info(path) == Local().info(path)
    assert not cache_dir.exists()


def test_wrapping_a_cached_storage_replaces_its_cache(remote: RemoteFolder, cache_dir: Path) -> None:
    assert Cache(cache_dir).wrap(Cache(cache_dir / "other").wrap(remote)) == Cache(cache_dir).wrap(remote)


def test_a_cache_serves_remote_urls_of_one_scheme(cache_dir: Path) -> None:
    cache, storage = Cache(cache_dir), Memory()
    assert wrap_with_cache(cache, ["/a/b.tar", "memory://a"], storage) == cache.wrap(storage)
    assert wrap_with_cache(cache, ["/a/b.tar"], storage) is storage
    assert wrap_with_cache(None, ["memory://a"], None) is None
    with pytest.raises(PlanError, match="one scheme, not of memory, s3"):
        wrap_with_cache(cache, ["memory://a", "s3://bucket/b"], None)


def test_no_secret_is_written_to_disk(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    for url in (
        "remote://me:opensesame@host/shard.tar",
        "remote://host/shard.tar?token=opensesame&X-Amz-Signature=opensesame",
    ):
        cached.read(url, 0, 1)
        b"".join(cached.stream(url))
    assert "opensesame" not in repr(cached)
    for path in cache_dir.iterdir():
        assert "opensesame" not in path.name
        assert b"opensesame" not in path.read_bytes()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("https://a:b@host/x", "https://c:d@host/x", True),
        ("https://host/x?token=1", "https://host/x?token=2", True),
        ("https://host/x?X-Amz-Date=1&X-Amz-Signature=1", "https://host/x?X-Amz-Date=2&X-Amz-Signature=2", True),
        ("https://host/x?se=1&sp=r&sig=1", "https://host/x?se=2&sp=r&sig=2", True),
        ("https://host/x?file=1&se=1&sig=1", "https://host/x?file=2&se=1&sig=1", False),
        ("https://host/x?file=1", "https://host/x?file=2", False),
        ("https://host/x?key=1", "https://host/x?key=2", False),
        ("https://host/x", "https://other/x", False),
        ("s3://bucket/x?1", "s3://bucket/x?2", False),
    ],
)
def test_urls_that_differ_in_credentials_only_share_a_copy(
    remote: RemoteFolder, cache_dir: Path, first: str, second: str, same: bool
) -> None:
    for name in ("x", "x?1", "x?2"):
        Path(remote.folder, name).write_bytes(b"x")
    cached = Cache(cache_dir).wrap(remote)
    cached.read(first, 0, 1)
    cached.read(second, 0, 1)
    assert len(suffixes(cache_dir)) == (1 if same else 2)
