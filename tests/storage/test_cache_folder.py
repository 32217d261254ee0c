from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.storage.cache import Cache, CachedStorage
from penstock.storage.cache_folder import COMPLETE_SUFFIX, LOCK_FILE, _open_lock_files, cache_folder
from penstock.storage.cached_object import CHUNK_BYTES as CHUNK
from tests.storage.conftest import (
    CONTENT,
    URL,
    RemoteFolder,
    exit_status,
    random_bytes,
    read_objects,
    start_forked,
    used_bytes,
)

pytestmark = pytest.mark.usefixtures("no_flush")


def set_last_use(cached: CachedStorage, number: int, when: float) -> None:
    path = cached.local_path(f"remote://host/{number}")
    assert path is not None
    os.utime(path, ns=(int((1.5e9 + when) * 1e9), os.stat(path).st_mtime_ns))  # years after the time of a complete copy
    release_lent_paths(cached)


def release_lent_paths(cached: CachedStorage) -> None:
    """Release all lent paths, as happens when many others are lent."""
    folder = cache_folder(cached.cache.folder)
    for key in list(folder._pinned):
        del folder._pinned[key]
        folder._release_use(key)


def is_complete(cached: CachedStorage, number: int) -> bool:
    """Return whether an object is cached completely, without using it."""
    url = f"remote://host/{number}"
    copy = cached._cached_object(url, cached.info(url))
    assert copy is not None
    return os.path.exists(copy.folder.path(copy.key, COMPLETE_SUFFIX))


def test_the_least_recently_used_objects_are_evicted(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir, max_bytes=20 * CHUNK).wrap(ten_objects)
    read_objects(cached, 0, 1, 2, 3)
    for number, when in [(0, 300.0), (1, 100.0), (2, 400.0), (3, 200.0)]:
        set_last_use(cached, number, when)
    read_objects(cached, 4)
    assert [number for number in range(5) if is_complete(cached, number)] == [0, 2, 3, 4]
    assert cached.read("remote://host/3", 0, 1) == random_bytes(4 * CHUNK, 3)[:1]  # 0 is now the least recently used
    read_objects(cached, 5)
    assert [number for number in range(6) if is_complete(cached, number)] == [2, 3, 4, 5]


def test_several_processes_together_stay_within_the_limit(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    def add(*numbers: int) -> None:
        cached = Cache(cache_dir, max_bytes=12 * CHUNK).wrap(ten_objects)
        for number in numbers:
            read_objects(cached, number)
            assert used_bytes(cache_dir) <= 12 * CHUNK + 100_000

    children = [start_forked(lambda numbers=numbers: add(*numbers)) for numbers in ((0, 1, 2, 3), (4, 5, 6, 7))]  # type: ignore[misc]
    assert [exit_status(pid) for pid in children] == [0, 0]
    add(8, 9)
    assert used_bytes(cache_dir) > 4 * CHUNK


def test_an_object_larger_than_the_cache_is_read_without_it(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir, max_bytes=2 * CHUNK).wrap(ten_objects)
    read_objects(cached, 0, 0)
    assert used_bytes(cache_dir) <= 2 * CHUNK


def test_an_object_that_another_process_has_open_is_not_evicted(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    """A child has its path: the object stays while the child lives, and can be evicted after its death."""
    cached = Cache(cache_dir, max_bytes=9 * CHUNK).wrap(ten_objects)
    read_objects(cached, 0)
    ready, done = os.pipe()

    def use() -> None:
        path = Cache(cache_dir).wrap(ten_objects).local_path("remote://host/0")
        assert path is not None
        os.write(done, b"x")
        time.sleep(60)

    pid = start_forked(use)
    assert os.read(ready, 1) == b"x"
    read_objects(cached, 1, 2, 3)
    still_cached = [is_complete(cached, 0), is_complete(cached, 1)]
    os.kill(pid, signal.SIGKILL)
    exit_status(pid)
    os.close(ready)
    os.close(done)
    assert still_cached == [True, False]
    read_objects(cached, 4, 5)
    assert not is_complete(cached, 0)


def test_lent_paths_are_in_use_while_they_are_mapped_or_recent(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.cache_folder._MAX_PINNED", 3)
    for number in range(10):
        (tmp_path / str(number)).write_bytes(b"x")
    cached = Cache(cache_dir).wrap(RemoteFolder(str(tmp_path)))
    paths = []
    for number in range(10):
        b"".join(cached.stream(f"remote://host/{number}"))
        paths.append(Path(cached.local_path(f"remote://host/{number}") or ""))
        if number == 0:
            with paths[0].open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    in_use = [not cache_folder(str(cache_dir)).drop(path.stem) for path in paths]
    assert in_use == [True, *[False] * 6, True, True, True]
    mapped.close()


def test_files_that_the_cache_did_not_create_are_left_alone(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    cache_dir.mkdir()
    names = [
        "notes.txt",
        "0" * 32,
        "0" * 32 + ".data",
        "1" * 31 + ".penstock",
        "x" * 32 + ".penstock",
        "a.penstock-part",
    ]
    for name in names:
        (cache_dir / name).write_bytes(b"x" * 3 * CHUNK)
        os.utime(cache_dir / name, (1, 1))
    read_objects(Cache(cache_dir, max_bytes=6 * CHUNK).wrap(ten_objects), 0, 1, 2, 3)
    for name in names:
        assert (cache_dir / name).stat().st_size == 3 * CHUNK


def test_an_emptied_folder_is_filled_again(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(ten_objects)
    read_objects(cached, 0, 1)
    assert cached.local_path("remote://host/0") is not None
    for path in cache_dir.iterdir():
        path.unlink()
    read_objects(cached, 0)
    assert LOCK_FILE in [path.name for path in cache_dir.iterdir()]
    assert cached.local_path("remote://host/0") is not None

    def drop_in_use() -> None:
        dropped = cache_folder(str(cache_dir)).drop(Path(complete_path(cached, 0)).stem)
        os._exit(6 if dropped else 5)

    assert exit_status(start_forked(drop_in_use)) == 5


def complete_path(cached: CachedStorage, number: int) -> str:
    path = cached.local_path(f"remote://host/{number}")
    assert path is not None
    return path


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_one_warning_and_reading_continues(
    ten_objects: RemoteFolder,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    call: str,
) -> None:
    cached = Cache(cache_dir).wrap(ten_objects)
    read_objects(cached, 0)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with caplog.at_level(logging.WARNING, "penstock.storage"):
        read_objects(cached, 0, 1, 2)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)
        read_objects(cached, 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"the cache in {cache_dir} cannot be written: {os.strerror(code)}; continuing without adding to it"
    ]
    assert cached.local_path("remote://host/1") is None
    assert cached.local_path("remote://host/0") is not None


def test_a_full_disk_is_tried_again_after_a_pause(
    ten_objects: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cache(cache_dir).wrap(ten_objects)
    cache_folder(str(cache_dir)).pause(OSError(errno.ENOSPC, "no space"))
    read_objects(cached, 0)
    assert not is_complete(cached, 0)
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)
    read_objects(cached, 0)
    assert is_complete(cached, 0)


def test_an_unbounded_cache_leaves_free_space_on_the_disk(
    ten_objects: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(ten_objects.folder)
    nearly_full = os.statvfs_result((4096, 4096, 1000, 40, 40, *tuple(real)[5:]))  # 4% is free
    cached = Cache(cache_dir).wrap(ten_objects)
    monkeypatch.setattr(os, "statvfs", lambda path: nearly_full)
    read_objects(cached, 0)
    assert used_bytes(cache_dir) < CHUNK


def test_a_folder_that_cannot_be_created_is_an_error_on_first_use(remote: RemoteFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cached = Cache(tmp_path / "file" / "cache").wrap(remote)
    for use in (
        lambda: cached.read(URL, 0, 1),
        lambda: list(cached.stream(URL)),
        lambda: cached.local_path(URL),
        lambda: cached.put(URL),
    ):
        with pytest.raises(StorageError, match="the cache folder cannot be used: Not a directory") as caught:
            use()
        assert caught.value.url == str(tmp_path / "file" / "cache")


def exit_status_without_permissions(work: Callable[[], object]) -> int:
    """Call ``work`` in a child that has no write permissions, and return its exit status."""

    def drop_permissions() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        _open_lock_files.clear()  # opened by the parent, which may write
        work()

    return exit_status(start_forked(drop_permissions))


@pytest.fixture
def world_readable() -> Iterator[Path]:
    """A folder that other users can read, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_read_only_cache_is_read(world_readable: Path) -> None:
    cache_dir = world_readable / "cache"
    (world_readable / "shard.tar").write_bytes(CONTENT)
    (world_readable / "other").write_bytes(CONTENT)
    (world_readable / "requests.log").touch()
    os.chmod(world_readable / "requests.log", 0o666)
    remote = RemoteFolder(str(world_readable))
    filled = Cache(cache_dir).wrap(remote)
    b"".join(filled.stream(URL))
    filled.read("remote://host/other", 0, 1)
    os.chmod(cache_dir, 0o555)

    def read() -> None:
        cached = Cache(cache_dir).wrap(remote)
        assert cached.local_path(URL) is not None
        assert cached.read(URL, 3, 2 * CHUNK) == CONTENT[3 : 2 * CHUNK]
        assert cached.read("remote://host/other", 0, 2 * CHUNK) == CONTENT[: 2 * CHUNK]
        assert cached.read("remote://host/other", 5, 9) == CONTENT[5:9]

    assert exit_status_without_permissions(read) == 0
    assert remote.fetch_counts() == [1, 1, 1, 1]
    assert remote.requests("read other") == [f"read other 0 {CHUNK}", f"read other {CHUNK} {2 * CHUNK}"]


def test_a_read_only_folder_without_a_cache_is_an_error(world_readable: Path) -> None:
    (world_readable / "shard.tar").write_bytes(CONTENT)
    (world_readable / "requests.log").touch()
    os.chmod(world_readable / "requests.log", 0o666)

    def read() -> None:
        with pytest.raises(StorageError, match="the cache folder cannot be used: Permission denied"):
            Cache(world_readable / "cache").wrap(RemoteFolder(str(world_readable))).read(URL, 0, 1)

    os.chmod(world_readable, 0o555)
    assert exit_status_without_permissions(read) == 0


def test_a_disk_without_locks_is_an_error(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with pytest.raises(StorageError, match="the cache cannot be locked: No locks available"):
        Cache(cache_dir).wrap(remote).read(URL, 0, 1)


def test_a_claim_is_for_consecutive_chunks_that_are_not_being_fetched(cache_dir: Path) -> None:
    folder, key = cache_folder(str(cache_dir)), "0" * 32
    assert folder.claim(key, [3, 4, 6], 8) == [3, 4]
    assert folder.claim(key, [2, 3, 4, 5], 8) == [2]
    assert folder.claim(key, [4, 5, 6, 7], 2) == [5, 6]
    folder.release(key, [3, 4])
    assert folder.claim(key, [2, 3, 4, 5], 8) == [3, 4]
    assert exit_status(start_forked(lambda: os._exit(len(cache_folder(str(cache_dir)).claim(key, [2, 3, 7], 8))))) == 1


def test_an_object_in_use_is_not_dropped(cache_dir: Path) -> None:
    folder, key = cache_folder(str(cache_dir)), "ab" * 16
    Path(folder.path(key, COMPLETE_SUFFIX)).write_bytes(b"x")
    with folder.using(key):
        assert not folder.drop(key)
        folder.drop_all(key[:2])
    folder.drop_all(key[:2], except_key=key)
    assert Path(folder.path(key, COMPLETE_SUFFIX)).exists()
    assert folder.drop(key)
    assert not Path(folder.path(key, COMPLETE_SUFFIX)).exists()


def test_a_lock_file_that_is_a_link_is_refused(remote: RemoteFolder, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/penstock-cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="the cache folder cannot be used"):
        Cache(tmp_path / "shared").wrap(remote).read(URL, 0, 10)
    assert not (tmp_path / "elsewhere").exists()
