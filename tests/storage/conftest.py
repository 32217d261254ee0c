"""Fixtures and helpers that the cache's tests share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from penstock.storage import Info, Listed, Local, Upload
from penstock.storage.cache import CachedStorage
from penstock.storage.cache_folder import LOCK_FILE
from penstock.storage.cached_object import CHUNK_BYTES as CHUNK

URL = "remote://host/shard.tar"


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A storage that serves a folder as if it were remote, and logs the requests of all processes."""

    folder: str
    delay_s: float = 0.0
    ranges: bool = True
    tagged: bool = True

    def info(self, url: str) -> Info:
        self._log(f"info {base_name(url)}")
        info = Local().info(self._path(url))
        return Info(info.size, info.tag if self.tagged else None, self.ranges)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        self._log(f"read {base_name(url)} {start} {stop}")
        time.sleep(self.delay_s)
        return Local().read(self._path(url), start, stop, into=into, tag=tag)

    def stream(self, url: str) -> Iterator[bytes]:
        self._log(f"stream {base_name(url)}")
        time.sleep(self.delay_s)
        return Local().stream(self._path(url))

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return Local().put(self._path(url))

    def delete(self, url: str) -> None:
        Local().delete(self._path(url))

    def local_path(self, url: str) -> str | None:
        return None

    def requests(self, kind: str = "read") -> list[str]:
        """Return the logged requests of a kind, in order."""
        log = Path(self.folder, "requests.log")
        return [line for line in log.read_text().splitlines() if line.startswith(kind)] if log.exists() else []

    def fetch_counts(self, name: str = "shard.tar") -> list[int]:
        """Return how often each chunk of an object was fetched."""
        size = Path(self.folder, name).stat().st_size
        counts = [0] * -(-size // CHUNK)
        for _, _, start, stop in (line.split() for line in self.requests(f"read {name} ")):
            assert int(start) % CHUNK == 0
            assert int(stop) == size or int(stop) % CHUNK == 0
            for chunk in range(int(start) // CHUNK, -(-int(stop) // CHUNK)):
                counts[chunk] += 1
        return counts

    def list(self, prefix: str) -> Iterator[Listed]:
        return iter([Listed("remote://host/listed", 1)])

    def _path(self, url: str) -> str:
        return os.path.join(self.folder, base_name(url))

    def _log(self, line: str) -> None:
        fd = os.open(os.path.join(self.folder, "requests.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)


def base_name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


@lru_cache
def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


CONTENT = random_bytes(3 * CHUNK + 12_345)


@pytest.fixture
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip flushes to disk, which are slow: a killed process loses nothing that it has written."""
    monkeypatch.setattr("penstock.storage.cached_object._flush", lambda fd: None)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteFolder:
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "shard.tar").write_bytes(CONTENT)
    return RemoteFolder(str(folder))


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def suffixes(cache_dir: Path) -> list[str]:
    """Return the suffixes of the cached files."""
    return sorted(path.suffix for path in cache_dir.iterdir() if path.name != LOCK_FILE)


def start_forked(work: Callable[[], object]) -> int:
    """Call ``work`` in a forked child, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="module")
def ten_objects(tmp_path_factory: pytest.TempPathFactory) -> RemoteFolder:
    """A storage of ten objects of four chunks each, named 0 to 9. The tests of a module share it."""
    folder = tmp_path_factory.mktemp("objects")
    for number in range(10):
        (folder / str(number)).write_bytes(random_bytes(4 * CHUNK, number))
    return RemoteFolder(str(folder))


def used_bytes(cache_dir: Path) -> int:
    """Return the disk space that a cache takes."""
    total = 0
    for path in cache_dir.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def read_objects(cached: CachedStorage, *numbers: int) -> None:
    """Stream objects of ``ten_objects`` and check their bytes."""
    for number in numbers:
        assert b"".join(cached.stream(f"remote://host/{number}")) == random_bytes(4 * CHUNK, number)
