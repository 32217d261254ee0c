from __future__ import annotations

import errno
import os
import pickle
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.storage import NotFound, Storage
from penstock.storage.cache import Cache, CachedStorage
from penstock.storage.cache_folder import COMPLETE_SUFFIX, CacheFolder
from penstock.storage.cached_object import CHUNK_BYTES as CHUNK
from penstock.storage.cached_object import CHUNKS_PER_REQUEST, CachedObject, _Copy, chunk_count
from tests.storage.conftest import (
    CONTENT,
    URL,
    RemoteFolder,
    base_name,
    exit_status,
    random_bytes,
    read_objects,
    start_forked,
    suffixes,
)

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("PENSTOCK_FULL") == "1"

pytestmark = pytest.mark.usefixtures("no_flush")


def test_a_range_fetches_whole_chunks_once(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    for start, stop in [(10, 20), (CHUNK - 5, CHUNK + 5), (0, 2 * CHUNK), (3 * CHUNK, len(CONTENT)), (7, len(CONTENT))]:
        buffer = bytearray(stop - start)
        assert cached.read(URL, start, stop) == CONTENT[start:stop]
        cached.read(URL, start, stop, into=memoryview(buffer))
        assert buffer == CONTENT[start:stop]
    assert remote.fetch_counts() == [1, 1, 1, 1]
    assert remote.requests("info") == ["info shard.tar"]


def test_a_partial_copy_takes_the_space_of_its_chunks_only(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(b"")
    os.truncate(tmp_path / "shard.tar", 1 << 32)
    Cache(cache_dir).wrap(RemoteFolder(str(tmp_path))).read(URL, 1 << 31, (1 << 31) + 1)
    (partial,) = cache_dir.glob("*-part")
    assert partial.stat().st_size > 1 << 32
    assert partial.stat().st_blocks * 512 < 4 * CHUNK


def test_one_request_fetches_a_bounded_number_of_chunks(tmp_path: Path, cache_dir: Path) -> None:
    content = random_bytes((CHUNKS_PER_REQUEST + 2) * CHUNK)
    (tmp_path / "shard.tar").write_bytes(content)
    remote = RemoteFolder(str(tmp_path))
    assert Cache(cache_dir).wrap(remote).read(URL, 0, len(content)) == content
    assert remote.requests() == [
        f"read shard.tar 0 {CHUNKS_PER_REQUEST * CHUNK}",
        f"read shard.tar {CHUNKS_PER_REQUEST * CHUNK} {len(content)}",
    ]


def test_an_object_has_a_local_path_once_it_is_complete(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    assert cached.local_path(URL) is None
    cached.read(URL, 0, 3 * CHUNK)
    assert cached.local_path(URL) is None
    assert suffixes(cache_dir) == [".penstock-part"]
    cached.read(URL, 3 * CHUNK, 3 * CHUNK + 1)
    path = cached.local_path(URL)
    assert path is not None
    assert Path(path).read_bytes() == CONTENT
    assert suffixes(cache_dir) == [".penstock"]


def test_a_stream_fills_the_cache_for_the_next_process(remote: RemoteFolder, cache_dir: Path) -> None:
    assert b"".join(Cache(cache_dir).wrap(remote).stream(URL)) == CONTENT
    unpickled: Storage = pickle.loads(pickle.dumps(Cache(cache_dir).wrap(remote)))
    assert b"".join(unpickled.stream(URL)) == CONTENT
    assert remote.fetch_counts() == [1, 1, 1, 1]
    assert remote.requests("info") == ["info shard.tar"] * 2


def test_a_read_updates_the_access_time_and_keeps_the_modification_time(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cache(cache_dir).wrap(remote)
    b"".join(cached.stream(URL))
    path = cached.local_path(URL)
    assert path is not None
    os.utime(path, (10**9, 10**9))
    later = time.time_ns() + 10**12  # not now: the file system may set that by itself
    monkeypatch.setattr(time, "time_ns", lambda: later)
    cached.read(URL, 0, 1)
    assert os.stat(path).st_mtime == 10**9
    assert os.stat(path).st_atime_ns == later


def test_new_content_replaces_the_old_copy(remote: RemoteFolder, cache_dir: Path) -> None:
    b"".join(Cache(cache_dir).wrap(remote).stream(URL))
    new_content = CONTENT[::-1]
    Path(remote.folder, "shard.tar").write_bytes(new_content)
    cached = Cache(cache_dir).wrap(remote)
    assert cached.local_path(URL) is None
    assert b"".join(cached.stream(URL)) == new_content
    assert suffixes(cache_dir) == [".penstock"]


def test_an_object_without_ranges_is_fetched_once(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(replace(remote, ranges=False))
    assert cached.read(URL, 5, 9) == CONTENT[5:9]
    assert b"".join(cached.stream(URL)) == CONTENT
    assert cached.local_path(URL) is not None
    assert remote.requests("stream") == ["stream shard.tar"]
    assert remote.requests("read") == []


def test_an_object_that_changes_while_it_is_fetched_is_not_cached(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(replace(remote, ranges=False))
    cached.info(URL)
    Path(remote.folder, "shard.tar").write_bytes(CONTENT[::-1])
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, 0, 5)
    assert cached.local_path(URL) is None
    assert cached.read(URL, 0, 5) == CONTENT[::-1][:5]


def read_all(cached: CachedStorage, seed: int) -> None:
    """Read the whole object in pieces, in an order that depends on ``seed``."""
    starts = list(range(0, len(CONTENT), 400_000))
    random.Random(seed).shuffle(starts)
    for start in starts:
        stop = min(len(CONTENT), start + 400_000)
        assert cached.read(URL, start, stop) == CONTENT[start:stop]
    path = cached.local_path(URL)
    assert path is not None
    assert Path(path).read_bytes() == CONTENT


def read_in_threads(cached: CachedStorage) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read_all, [cached] * 4, range(4)))


def test_threads_fetch_a_chunk_once(remote: RemoteFolder, cache_dir: Path) -> None:
    read_in_threads(Cache(cache_dir).wrap(replace(remote, delay_s=0.05)))
    assert remote.fetch_counts() == [1, 1, 1, 1]


def test_forked_processes_fetch_a_chunk_once(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(replace(remote, delay_s=0.05))
    cached.read(URL, 0, 1)  # the children inherit a cache that is in use
    children = [start_forked(lambda seed=seed: read_all(cached, seed)) for seed in range(4)]  # type: ignore[misc]
    assert [exit_status(pid) for pid in children] == [0] * 4
    assert remote.fetch_counts() == [1, 1, 1, 1]


def test_unrelated_processes_fetch_a_chunk_once(remote: RemoteFolder, cache_dir: Path, warm_python: str) -> None:
    data = pickle.dumps(Cache(cache_dir).wrap(replace(remote, delay_s=0.05)))
    script = f"import pickle; from {__name__} import read_in_threads; read_in_threads(pickle.loads({data!r}))"
    children = [subprocess.Popen([warm_python, "-c", script], cwd=ROOT) for _ in range(2)]
    assert [child.wait(300) for child in children] == [0, 0]
    assert remote.fetch_counts() == [1, 1, 1, 1]


def test_threads_fetch_an_object_without_ranges_once(remote: RemoteFolder, cache_dir: Path) -> None:
    slow = replace(remote, ranges=False, delay_s=0.05)
    read_in_threads(Cache(cache_dir).wrap(slow))
    assert remote.requests("stream") == ["stream shard.tar"]


def test_a_failed_fetch_releases_its_chunks(remote: RemoteFolder, cache_dir: Path) -> None:
    cached = Cache(cache_dir).wrap(remote)
    cached.info(URL)
    os.rename(f"{remote.folder}/shard.tar", f"{remote.folder}/away")
    with pytest.raises(NotFound):
        cached.read(URL, 0, 1)
    os.rename(f"{remote.folder}/away", f"{remote.folder}/shard.tar")
    assert cached.read(URL, 0, 1) == CONTENT[:1]


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_dead_process_releases_the_chunks_it_was_fetching(remote: RemoteFolder, cache_dir: Path) -> None:
    pid = start_forked(lambda: Cache(cache_dir).wrap(replace(remote, delay_s=60)).read(URL, 0, 1))
    wait_until(lambda: remote.requests("read"))
    os.kill(pid, signal.SIGKILL)
    assert exit_status(pid) == -signal.SIGKILL
    assert Cache(cache_dir).wrap(remote).read(URL, 0, 1) == CONTENT[:1]


def test_a_process_waits_for_chunks_that_another_is_fetching(remote: RemoteFolder, cache_dir: Path) -> None:
    pid = start_forked(lambda: Cache(cache_dir).wrap(replace(remote, delay_s=0.3)).read(URL, 0, 1))
    wait_until(lambda: remote.requests("read"))
    assert Cache(cache_dir).wrap(remote).read(URL, 0, CHUNK) == CONTENT[:CHUNK]
    assert exit_status(pid) == 0
    assert remote.fetch_counts() == [1, 0, 0, 0]


def test_chunks_that_arrive_while_others_are_claimed_are_not_fetched_again(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = CacheFolder.claim

    def read_then_claim(self: CacheFolder, key: str, chunks: Iterable[int], limit: int) -> list[int]:
        monkeypatch.setattr(CacheFolder, "claim", claim)
        Cache(cache_dir).wrap(remote).read(URL, CHUNK, CHUNK + 1)
        return claim(self, key, chunks, limit)

    monkeypatch.setattr(CacheFolder, "claim", read_then_claim)
    assert Cache(cache_dir).wrap(remote).read(URL, 0, len(CONTENT)) == CONTENT
    assert remote.fetch_counts() == [1, 1, 1, 1]


def test_concurrent_readers_create_one_file(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, create = [], CachedObject._create

    def create_slowly(self: CachedObject) -> Any:
        created.append(self.key)
        time.sleep(0.05)
        return create(self)

    monkeypatch.setattr(CachedObject, "_create", create_slowly)
    read_in_threads(Cache(cache_dir).wrap(remote))
    assert len(created) == 1


def test_the_flag_of_a_chunk_is_set_after_the_flush_of_its_data_and_checksum(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations: list[str] = []
    cached = Cache(cache_dir).wrap(remote)
    cached.read(URL, 0, 1)
    pwrite = os.pwrite

    def recorded_pwrite(fd: int, data: memoryview, offset: int) -> int:
        checksums = len(CONTENT) + 16 + chunk_count(len(CONTENT))
        operations.append("data" if offset < len(CONTENT) else "flag" if offset < checksums else "checksum")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", recorded_pwrite)
    monkeypatch.setattr("penstock.storage.cached_object._flush", lambda fd: operations.append("flush"))
    cached.read(URL, CHUNK, CHUNK + 1)
    assert operations == ["data", "checksum", "flush", "flag"]


def test_a_chunk_without_its_flag_is_fetched_again(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cache(cache_dir).wrap(remote)
    cached.read(URL, 0, 1)
    (partial,) = cache_dir.glob("*-part")
    with partial.open("r+b") as file:
        file.seek(CHUNK)
        file.write(b"half of a chunk")
    assert cached.read(URL, CHUNK, CHUNK + 9) == CONTENT[CHUNK : CHUNK + 9]


@pytest.mark.parametrize("damage", ["empty", "short", "without flags", "ones"])
def test_a_damaged_partial_file_is_replaced(remote: RemoteFolder, cache_dir: Path, damage: str) -> None:
    Cache(cache_dir).wrap(remote).read(URL, 0, 2 * CHUNK)
    (partial,) = cache_dir.glob("*-part")
    if damage == "ones":
        partial.write_bytes(b"\x01" * partial.stat().st_size)
    else:
        os.truncate(partial, {"empty": 0, "short": 100}.get(damage, len(CONTENT)))
    assert b"".join(Cache(cache_dir).wrap(remote).stream(URL)) == CONTENT


def test_a_truncated_file_is_fetched_again(remote: RemoteFolder, cache_dir: Path) -> None:
    b"".join(Cache(cache_dir).wrap(remote).stream(URL))
    (complete,) = cache_dir.glob("*.penstock")
    os.truncate(complete, CHUNK)
    cached = Cache(cache_dir).wrap(remote)
    assert cached.local_path(URL) is None
    assert b"".join(cached.stream(URL)) == CONTENT
    assert Path(cached.local_path(URL) or "").read_bytes() == CONTENT


def flip_bit(path: Path, offset: int) -> None:
    """Damage a file as a failing disk does: its size and times stay."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("read", ["path", "range", "stream"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_copy_is_fetched_anew_by_the_next_process(
    remote: RemoteFolder, cache_dir: Path, whole: bool, read: str
) -> None:
    cached = Cache(cache_dir).wrap(remote)
    cached.read(URL, 0, len(CONTENT) if whole else 2 * CHUNK)
    (copy,) = cache_dir.glob("*.penstock*")
    flip_bit(copy, CHUNK + 5)

    def use() -> None:
        if read == "range":
            assert cached.read(URL, CHUNK, CHUNK + 10) == CONTENT[CHUNK : CHUNK + 10]
        elif read == "stream":
            assert b"".join(cached.stream(URL)) == CONTENT
        else:
            assert cached.local_path(URL) is None
            b"".join(cached.stream(URL))
            path = cached.local_path(URL)
            assert path is not None
            assert Path(path).read_bytes() == CONTENT

    assert exit_status(start_forked(use)) == 0
    assert remote.fetch_counts()[1] == 2


def test_a_damaged_copy_in_a_folder_that_cannot_be_written_is_read_around(
    remote: RemoteFolder, cache_dir: Path
) -> None:
    cached = Cache(cache_dir).wrap(remote)
    cached.read(URL, 0, len(CONTENT))
    (copy,) = cache_dir.glob("*.penstock")
    flip_bit(copy, 5)

    def use() -> None:
        cached._folder().writable = False
        assert cached.local_path(URL) is None
        assert cached.read(URL, 0, len(CONTENT)) == CONTENT

    assert exit_status(start_forked(use)) == 0


def test_a_process_checks_a_copy_once(remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = Cache(cache_dir).wrap(remote)
    b"".join(cached.stream(URL))

    def use() -> None:
        checked: list[int] = []
        compute = _Copy.compute_checksum

        def record(copy: _Copy, chunk: int) -> int:
            checked.append(chunk)
            return compute(copy, chunk)

        monkeypatch.setattr(_Copy, "compute_checksum", record)
        for _ in range(2):
            assert cached.local_path(URL) is not None
            assert cached.read(URL, 0, CHUNK) == CONTENT[:CHUNK]
        assert checked == [*range(chunk_count(len(CONTENT)))]

    assert exit_status(start_forked(use)) == 0


def test_a_file_system_without_nanoseconds_keeps_copies_without_checksum(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda fd, ns: utime(fd, ns=(ns[0], ns[1] // 10**9 * 10**9)))
    cached = Cache(cache_dir).wrap(remote)
    b"".join(cached.stream(URL))
    (copy,) = cache_dir.glob("*.penstock")
    assert copy.stat().st_mtime_ns == 10**18

    def use() -> None:
        assert cached.local_path(URL) == str(copy)

    assert exit_status(start_forked(use)) == 0


def test_completing_a_copy_does_not_rename_a_newer_partial_file(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partial file is deleted, and another one is created, while the last chunk is fetched."""
    cached = Cache(cache_dir).wrap(remote)
    cached.read(URL, 0, 3 * CHUNK)
    read = RemoteFolder.read

    def replace_file_then_read(
        self: RemoteFolder, url: str, start: int, stop: int, **options: Any
    ) -> bytes | memoryview:
        monkeypatch.setattr(RemoteFolder, "read", read)
        (partial,) = cache_dir.glob("*-part")
        partial.unlink()
        Cache(cache_dir).wrap(remote).read(URL, 0, 1)
        return read(self, url, start, stop, **options)

    monkeypatch.setattr(RemoteFolder, "read", replace_file_then_read)
    assert cached.read(URL, 3 * CHUNK, len(CONTENT)) == CONTENT[3 * CHUNK :]
    assert suffixes(cache_dir) == [".penstock-part"]
    assert cached.local_path(URL) is None
    assert cached.read(URL, 0, len(CONTENT)) == CONTENT


def test_after_a_crash_before_the_rename_nothing_is_fetched_again(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("penstock.storage.cached_object.CachedObject._complete", lambda self, copy: False)
        b"".join(Cache(cache_dir).wrap(remote).stream(URL))
    assert suffixes(cache_dir) == [".penstock-part"]
    path = Cache(cache_dir).wrap(remote).local_path(URL)
    assert path is not None
    assert Path(path).read_bytes() == CONTENT
    assert remote.fetch_counts() == [1, 1, 1, 1]


def test_local_path_waits_for_a_rename_in_progress(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str | None] = []
    cached, rename = Cache(cache_dir).wrap(remote), os.rename
    thread = threading.Thread(target=lambda: paths.append(cached.local_path(URL)))

    def rename_slowly(old: str, new: str) -> None:
        if new.endswith(COMPLETE_SUFFIX):
            thread.start()
            time.sleep(0.05)
        rename(old, new)

    monkeypatch.setattr(os, "rename", rename_slowly)
    b"".join(cached.stream(URL))
    thread.join()
    assert Path(paths[0] or "").read_bytes() == CONTENT


def test_processes_killed_at_any_moment_leave_no_wrong_bytes(tmp_path: Path, cache_dir: Path) -> None:
    contents = {f"remote://host/{number}": random_bytes(5 * CHUNK + number, number) for number in range(6)}
    for url, content in contents.items():
        (tmp_path / base_name(url)).write_bytes(content)
    remote = RemoteFolder(str(tmp_path))
    rng = random.Random(1)

    def read_for_ever() -> None:
        cached = Cache(cache_dir, max_bytes=24 * CHUNK).wrap(remote)
        while True:
            url = random.choice(list(contents))
            start = random.randrange(len(contents[url]))
            stop = min(len(contents[url]), start + 2 * CHUNK)
            if cached.read(url, start, stop) != contents[url][start:stop]:
                os._exit(3)
            path = cached.local_path(url)
            if path is not None and Path(path).read_bytes() != contents[url]:
                os._exit(4)

    for _ in range(15 if FULL else 5):
        children = [start_forked(read_for_ever) for _ in range(2)]
        time.sleep(rng.uniform(0.01, 0.15))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        assert [exit_status(pid) for pid in children] == [-signal.SIGKILL] * 2
    cached = Cache(cache_dir, max_bytes=24 * CHUNK).wrap(remote)
    for url, content in contents.items():
        path = cached.local_path(url)
        assert path is None or Path(path).read_bytes() == content
        assert cached.read(url, 0, len(content)) == content
    assert any(path.suffix == ".penstock" for path in cache_dir.iterdir())


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", disk_full)
    assert Cache(cache_dir).wrap(remote).read(URL, 0, CHUNK) == CONTENT[:CHUNK]
    assert remote.fetch_counts() == [1, 0, 0, 0]


def test_a_disk_without_fallocate_is_written_nonetheless(
    remote: RemoteFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_supported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", not_supported)
    cached = Cache(cache_dir).wrap(remote)
    assert b"".join(cached.stream(URL)) == CONTENT
    assert cached.local_path(URL) is not None


def test_a_limit_on_file_sizes_does_not_stop_reading(ten_objects: RemoteFolder, cache_dir: Path) -> None:
    def read_with_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, 2 * CHUNK))
        cached = Cache(cache_dir).wrap(ten_objects)
        read_objects(cached, 0, 1)
        assert cached.local_path("remote://host/0") is None

    assert exit_status(start_forked(read_with_limit)) == 0


@pytest.mark.parametrize("suffix", [".penstock", ".penstock-part", ".penstock-new"])
def test_a_link_planted_in_the_folder_is_replaced_and_never_followed(
    remote: RemoteFolder, cache_dir: Path, tmp_path: Path, suffix: str
) -> None:
    b"".join(Cache(cache_dir).wrap(remote).stream(URL))
    (complete,) = cache_dir.glob("*.penstock")
    complete.unlink()
    planted, target = complete.with_suffix(suffix), tmp_path / "target"
    wrong = b"x" * len(CONTENT)
    target.write_bytes(wrong)
    planted.symlink_to(target)
    cached = Cache(cache_dir).wrap(remote)
    assert cached.local_path(URL) is None
    assert b"".join(cached.stream(URL)) == CONTENT
    path = cached.local_path(URL) or ""
    assert not os.path.islink(path)
    assert Path(path).read_bytes() == CONTENT
    assert target.read_bytes() == wrong
    assert not [*cache_dir.glob("*-part"), *cache_dir.glob("*-new")]


def test_a_file_that_a_killed_process_was_creating_is_replaced(remote: RemoteFolder, cache_dir: Path) -> None:
    b"".join(Cache(cache_dir).wrap(remote).stream(URL))
    (complete,) = cache_dir.glob("*.penstock")
    complete.rename(complete.with_suffix(".penstock-new"))
    assert b"".join(Cache(cache_dir).wrap(remote).stream(URL)) == CONTENT
    assert not list(cache_dir.glob("*-new"))
