from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import pickle
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError, StorageError
from penstock.storage import Info, Listed, Local, Memory, NotFound, Storage, Upload
from penstock.storage.cache import Cache, Cached
from penstock.storage.cache_folder import MARKER, WHOLE, CacheFolder, _markers, cache_folder
from penstock.storage.cached_object import CELL, RUN, CachedObject
from penstock.testing.storages import DATA, StorageTests, write

URL = "far://host/shard.tar"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Origin:
    """A folder that looks remote and writes down what is asked of it, by whatever process."""

    folder: str
    delay_s: float = 0.0
    ranges: bool = True
    tagged: bool = True

    def info(self, url: str) -> Info:
        self._note(f"info {_last(url)}")
        info = Local().info(self._path(url))
        return Info(info.size, info.tag if self.tagged else None, self.ranges)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        self._note(f"read {_last(url)} {start} {stop}")
        time.sleep(self.delay_s)
        return Local().read(self._path(url), start, stop, into=into, tag=tag)

    def stream(self, url: str) -> Iterator[bytes]:
        self._note(f"stream {_last(url)}")
        time.sleep(self.delay_s)
        return Local().stream(self._path(url))

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return Local().put(self._path(url))

    def delete(self, url: str) -> None:
        Local().delete(self._path(url))

    def local_path(self, url: str) -> str | None:
        return None

    def asked(self, kind: str = "read") -> list[str]:
        """What was asked, in order."""
        notes = Path(self.folder, "notes")
        return [line for line in notes.read_text().splitlines() if line.startswith(kind)] if notes.exists() else []

    def fetched(self, name: str = "shard.tar") -> list[int]:
        """How often each cell of an object was fetched."""
        size = Path(self.folder, name).stat().st_size
        times = [0] * -(-size // CELL)
        for _, _, start, stop in (line.split() for line in self.asked(f"read {name} ")):
            assert int(start) % CELL == 0
            assert int(stop) == size or int(stop) % CELL == 0
            for cell in range(int(start) // CELL, -(-int(stop) // CELL)):
                times[cell] += 1
        return times

    def list(self, prefix: str) -> Iterator[Listed]:
        return iter([Listed("far://host/listed", 1)])

    def _path(self, url: str) -> str:
        return os.path.join(self.folder, _last(url))

    def _note(self, line: str) -> None:
        fd = os.open(os.path.join(self.folder, "notes"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)


def _last(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


@lru_cache
def _bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


CONTENT = _bytes(3 * CELL + 12_345)


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills of processes lose nothing that was written, and a busy disk would take most of the time."""
    monkeypatch.setattr("penstock.storage.cached_object._flush", lambda fd: None)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "shard.tar").write_bytes(CONTENT)
    return Origin(str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir() if path.name != MARKER)


class TestCached(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return Cache(tmp_path / "cache", max_bytes="1GB").over(Memory())

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{secrets.token_hex(4)}"


def test_a_cache_is_a_value_that_shows_folder_and_size(folder: Path) -> None:
    cache = Cache(folder, max_bytes="200GB")
    assert repr(cache) == f"Cache(folder={str(folder)!r}, max_bytes=200000000000, fresh_s=300.0)"
    assert pickle.loads(pickle.dumps(cache)) == cache == Cache(str(folder), 2e11)
    assert Cache(folder).max_bytes is None
    assert not folder.exists()


def test_a_relative_folder_means_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Cache("here").folder == str(tmp_path / "here")


@pytest.mark.parametrize(("name", "size"), [("x", "many"), ("x", 0), ("x", -1), ("", 1), ("s3://bucket/cache", 1)])
def test_a_cache_without_sense_is_refused(name: str, size: str | int) -> None:
    with pytest.raises(PlanError):
        Cache(name, size)


def test_a_range_brings_whole_cells_once(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    for start, stop in [(10, 20), (CELL - 5, CELL + 5), (0, 2 * CELL), (3 * CELL, len(CONTENT)), (7, len(CONTENT))]:
        buffer = bytearray(stop - start)
        assert cached.read(URL, start, stop) == CONTENT[start:stop]
        cached.read(URL, start, stop, into=memoryview(buffer))
        assert buffer == CONTENT[start:stop]
    assert origin.fetched() == [1, 1, 1, 1]
    assert origin.asked("info") == ["info shard.tar"]


def test_what_is_here_costs_its_blocks_not_the_size_of_the_object(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(b"")
    os.truncate(tmp_path / "shard.tar", 1 << 32)
    Cache(folder).over(Origin(str(tmp_path))).read(URL, 1 << 31, (1 << 31) + 1)
    (part,) = folder.glob("*-part")
    assert part.stat().st_size > 1 << 32
    assert part.stat().st_blocks * 512 < 4 * CELL


def test_the_cells_of_one_request_are_few(tmp_path: Path, folder: Path) -> None:
    content = _bytes((RUN + 2) * CELL)
    (tmp_path / "shard.tar").write_bytes(content)
    origin = Origin(str(tmp_path))
    assert Cache(folder).over(origin).read(URL, 0, len(content)) == content
    assert origin.asked() == [f"read shard.tar 0 {RUN * CELL}", f"read shard.tar {RUN * CELL} {len(content)}"]


def test_an_object_is_a_file_once_all_of_it_is_here(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    assert cached.local_path(URL) is None
    cached.read(URL, 0, 3 * CELL)
    assert cached.local_path(URL) is None
    assert _names(folder) == [".penstock-part"]
    cached.read(URL, 3 * CELL, 3 * CELL + 1)
    path = cached.local_path(URL)
    assert path is not None
    assert Path(path).read_bytes() == CONTENT
    assert _names(folder) == [".penstock"]


def test_a_stream_is_kept_for_the_next_process(origin: Origin, folder: Path) -> None:
    assert b"".join(Cache(folder).over(origin).stream(URL)) == CONTENT
    other: Storage = pickle.loads(pickle.dumps(Cache(folder).over(origin)))
    assert b"".join(other.stream(URL)) == CONTENT
    assert origin.fetched() == [1, 1, 1, 1]
    assert origin.asked("info") == ["info shard.tar"] * 2


def test_the_time_of_last_use_is_noted_and_that_of_change_stays(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cache(folder).over(origin)
    b"".join(cached.stream(URL))
    path = cached.local_path(URL)
    assert path is not None
    os.utime(path, (10**9, 10**9))
    later = time.time_ns() + 10**12  # not now: that is what the system itself may note
    monkeypatch.setattr(time, "time_ns", lambda: later)
    cached.read(URL, 0, 1)
    assert os.stat(path).st_mtime == 10**9
    assert os.stat(path).st_atime_ns == later


def test_another_content_drops_the_old_one(origin: Origin, folder: Path) -> None:
    b"".join(Cache(folder).over(origin).stream(URL))
    fresh = CONTENT[::-1]
    Path(origin.folder, "shard.tar").write_bytes(fresh)
    cached = Cache(folder).over(origin)
    assert cached.local_path(URL) is None
    assert b"".join(cached.stream(URL)) == fresh
    assert _names(folder) == [".penstock"]


def test_contents_are_never_mixed(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    tag = cached.info(URL).tag
    cached.read(URL, 0, CELL)
    Path(origin.folder, "shard.tar").write_bytes(CONTENT[::-1])
    assert cached.read(URL, 0, CELL, tag=tag) == CONTENT[:CELL]
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, CELL // 2, 2 * CELL)
    assert cached.read(URL, CELL // 2, 2 * CELL) == CONTENT[::-1][CELL // 2 : 2 * CELL]
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, 0, 10, tag=tag)


def test_an_object_that_grew_is_looked_at_again(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    cached.read(URL, 0, 1)
    Path(origin.folder, "shard.tar").write_bytes(CONTENT * 2)
    assert cached.read(URL, 0, 2 * len(CONTENT)) == CONTENT * 2


def test_what_was_seen_is_believed_for_a_while(origin: Origin, folder: Path) -> None:
    cached = Cache(folder, fresh_s=0.2).shared(origin)
    assert cached.stream(URL)
    for _ in range(3):
        assert Cache(folder, fresh_s=0.2).shared(origin).local_path(URL) is None
    assert len(origin.asked("info")) == 1
    time.sleep(0.25)
    cached.info(URL)
    assert len(origin.asked("info")) == 2


def test_with_no_time_to_believe_every_look_is_a_new_one(origin: Origin, folder: Path) -> None:
    cached = Cache(folder, fresh_s=0).over(origin)
    for many in range(1, 4):
        cached.info(URL)
        assert len(origin.asked("info")) == many


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_time_below_zero_is_refused(folder: Path, seconds: float) -> None:
    with pytest.raises(PlanError, match="fresh_s"):
        Cache(folder, fresh_s=seconds)


def test_what_nothing_tells_apart_is_not_kept(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(replace(origin, tagged=False))
    assert cached.read(URL, 5, 9) == CONTENT[5:9]
    assert b"".join(cached.stream(URL)) == CONTENT
    assert cached.local_path(URL) is None
    assert _names(folder) == []


def test_a_server_without_ranges_sends_an_object_once(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(replace(origin, ranges=False))
    assert cached.read(URL, 5, 9) == CONTENT[5:9]
    assert b"".join(cached.stream(URL)) == CONTENT
    assert cached.local_path(URL) is not None
    assert origin.asked("stream") == ["stream shard.tar"]
    assert origin.asked("read") == []


def test_what_changes_while_it_is_streamed_is_not_kept(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(replace(origin, ranges=False))
    cached.info(URL)
    Path(origin.folder, "shard.tar").write_bytes(CONTENT[::-1])
    with pytest.raises(StorageError, match="changed while it was being read"):
        cached.read(URL, 0, 5)
    assert cached.local_path(URL) is None
    assert cached.read(URL, 0, 5) == CONTENT[::-1][:5]


def test_what_is_put_or_deleted_is_forgotten(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    b"".join(cached.stream(URL))
    write(cached, URL, DATA)
    assert _names(folder) == []
    assert b"".join(cached.stream(URL)) == DATA
    cached.delete(URL)
    assert _names(folder) == []
    with pytest.raises(NotFound):
        cached.read(URL, 0, 1)
    assert cached.local_path(URL) is None
    assert list(cached.list("far://host")) == [Listed("far://host/listed", 1)]


def test_files_of_this_machine_are_not_copied(tmp_path: Path, folder: Path) -> None:
    path = str(tmp_path / "x")
    cached = Cache(folder).over(Local())
    write(cached, path, DATA)
    assert cached.local_path(path) == path
    assert cached.read(path, 1, 5) == DATA[1:5]
    assert b"".join(cached.stream(path)) == DATA
    assert cached.info(path) == Local().info(path)
    assert not folder.exists()


def test_a_cache_over_a_cache_is_one_cache(origin: Origin, folder: Path) -> None:
    assert Cache(folder).over(Cache(folder / "other").over(origin)) == Cache(folder).over(origin)


# Names


def test_no_secret_is_on_the_disk(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    for url in (
        "far://me:opensesame@host/shard.tar",
        "far://host/shard.tar?token=opensesame&X-Amz-Signature=opensesame",
    ):
        cached.read(url, 0, 1)
        b"".join(cached.stream(url))
    assert "opensesame" not in repr(cached)
    for path in folder.iterdir():
        assert "opensesame" not in path.name
        assert b"opensesame" not in path.read_bytes()


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_a_copy_belongs_to_what_a_url_names_not_to_what_opens_it(
    origin: Origin, folder: Path, one: str, other: str, same: bool
) -> None:
    for name in ("x", "x?1", "x?2"):
        Path(origin.folder, name).write_bytes(b"x")
    cached = Cache(folder).over(origin)
    cached.read(one, 0, 1)
    cached.read(other, 0, 1)
    assert len(_names(folder)) == (1 if same else 2)


# Together


def _read_all(cached: Cached, seed: int) -> None:
    """Read all of the object in pieces, each worker in an order of its own."""
    starts = list(range(0, len(CONTENT), 400_000))
    random.Random(seed).shuffle(starts)
    for start in starts:
        stop = min(len(CONTENT), start + 400_000)
        assert cached.read(URL, start, stop) == CONTENT[start:stop]
    path = cached.local_path(URL)
    assert path is not None
    assert Path(path).read_bytes() == CONTENT


def _read_by_threads(cached: Cached) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(_read_all, [cached] * 4, range(4)))


def test_threads_fetch_a_cell_once(origin: Origin, folder: Path) -> None:
    _read_by_threads(Cache(folder).over(replace(origin, delay_s=0.05)))
    assert origin.fetched() == [1, 1, 1, 1]


def test_forked_processes_fetch_a_cell_once(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(replace(origin, delay_s=0.05))
    cached.read(URL, 0, 1)  # the children inherit a cache in use
    children = [_forked(lambda seed=seed: _read_all(cached, seed)) for seed in range(4)]  # type: ignore[misc]
    assert [_status(pid) for pid in children] == [0] * 4
    assert origin.fetched() == [1, 1, 1, 1]


def test_processes_of_their_own_fetch_a_cell_once(origin: Origin, folder: Path) -> None:
    data = pickle.dumps(Cache(folder).over(replace(origin, delay_s=0.05)))
    script = f"import pickle; from {__name__} import _read_by_threads; _read_by_threads(pickle.loads({data!r}))"
    children = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert origin.fetched() == [1, 1, 1, 1]


def test_a_server_without_ranges_is_asked_once_by_all_threads(origin: Origin, folder: Path) -> None:
    slow = replace(origin, ranges=False, delay_s=0.05)
    _read_by_threads(Cache(folder).over(slow))
    assert origin.asked("stream") == ["stream shard.tar"]


def test_an_error_of_one_reader_lets_the_next_one_fetch(origin: Origin, folder: Path) -> None:
    cached = Cache(folder).over(origin)
    cached.info(URL)
    os.rename(f"{origin.folder}/shard.tar", f"{origin.folder}/away")
    with pytest.raises(NotFound):
        cached.read(URL, 0, 1)
    os.rename(f"{origin.folder}/away", f"{origin.folder}/shard.tar")
    assert cached.read(URL, 0, 1) == CONTENT[:1]


def _forked(work: Callable[[], object]) -> int:
    """Run something in a forked child: its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_process_that_dies_frees_what_it_was_fetching(origin: Origin, folder: Path) -> None:
    pid = _forked(lambda: Cache(folder).over(replace(origin, delay_s=60)).read(URL, 0, 1))
    _until(lambda: origin.asked("read"))
    os.kill(pid, signal.SIGKILL)
    assert _status(pid) == -signal.SIGKILL
    assert Cache(folder).over(origin).read(URL, 0, 1) == CONTENT[:1]


def test_another_process_waits_for_what_is_being_fetched(origin: Origin, folder: Path) -> None:
    pid = _forked(lambda: Cache(folder).over(replace(origin, delay_s=0.3)).read(URL, 0, 1))
    _until(lambda: origin.asked("read"))
    assert Cache(folder).over(origin).read(URL, 0, CELL) == CONTENT[:CELL]
    assert _status(pid) == 0
    assert origin.fetched() == [1, 0, 0, 0]


def test_what_came_while_a_cell_was_being_claimed_is_not_fetched(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = CacheFolder.claim

    def late(self: CacheFolder, key: str, cells: Iterable[int], most: int) -> list[int]:
        monkeypatch.setattr(CacheFolder, "claim", claim)
        Cache(folder).over(origin).read(URL, CELL, CELL + 1)
        return claim(self, key, cells, most)

    monkeypatch.setattr(CacheFolder, "claim", late)
    assert Cache(folder).over(origin).read(URL, 0, len(CONTENT)) == CONTENT
    assert origin.fetched() == [1, 1, 1, 1]


def test_a_file_is_begun_once(origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, new = [], CachedObject._new

    def slow(self: CachedObject) -> Any:
        begun.append(self.key)
        time.sleep(0.05)
        return new(self)

    monkeypatch.setattr(CachedObject, "_new", slow)
    _read_by_threads(Cache(folder).over(origin))
    assert len(begun) == 1


# Crashes


def test_a_cell_is_promised_after_it_was_flushed(origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    cached = Cache(folder).over(origin)
    cached.read(URL, 0, 1)
    write_at = os.pwrite

    def note_write(fd: int, data: memoryview, at: int) -> int:
        done.append("data" if at < len(CONTENT) else "promise")
        return write_at(fd, data, at)

    monkeypatch.setattr(os, "pwrite", note_write)
    monkeypatch.setattr("penstock.storage.cached_object._flush", lambda fd: done.append("flush"))
    cached.read(URL, CELL, CELL + 1)
    assert done == ["data", "flush", "promise"]


def test_a_cell_without_a_promise_is_fetched_again(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cache(folder).over(origin)
    cached.read(URL, 0, 1)
    (part,) = folder.glob("*-part")
    with part.open("r+b") as file:
        file.seek(CELL)
        file.write(b"half of a cell")
    assert cached.read(URL, CELL, CELL + 9) == CONTENT[CELL : CELL + 9]


@pytest.mark.parametrize("damage", ["empty", "short", "complete without a name", "ones"])
def test_a_damaged_part_is_begun_anew(origin: Origin, folder: Path, damage: str) -> None:
    Cache(folder).over(origin).read(URL, 0, 2 * CELL)
    (part,) = folder.glob("*-part")
    if damage == "ones":
        part.write_bytes(b"\x01" * part.stat().st_size)
    else:
        os.truncate(part, {"empty": 0, "short": 100}.get(damage, len(CONTENT)))
    assert b"".join(Cache(folder).over(origin).stream(URL)) == CONTENT


def test_a_file_that_somebody_cut_is_fetched_again(origin: Origin, folder: Path) -> None:
    b"".join(Cache(folder).over(origin).stream(URL))
    (whole,) = folder.glob("*.penstock")
    os.truncate(whole, CELL)
    cached = Cache(folder).over(origin)
    assert cached.local_path(URL) is None
    assert b"".join(cached.stream(URL)) == CONTENT
    assert Path(cached.local_path(URL) or "").read_bytes() == CONTENT


def test_a_part_of_another_is_not_taken_for_the_whole(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody empties the folder and begins anew while the last cell is on its way."""
    cached = Cache(folder).over(origin)
    cached.read(URL, 0, 3 * CELL)
    read = Origin.read

    def meddle(self: Origin, url: str, start: int, stop: int, **rest: Any) -> bytes | memoryview:
        monkeypatch.setattr(Origin, "read", read)
        (part,) = folder.glob("*-part")
        part.unlink()
        Cache(folder).over(origin).read(URL, 0, 1)
        return read(self, url, start, stop, **rest)

    monkeypatch.setattr(Origin, "read", meddle)
    assert cached.read(URL, 3 * CELL, len(CONTENT)) == CONTENT[3 * CELL :]
    assert _names(folder) == [".penstock-part"]
    assert cached.local_path(URL) is None
    assert cached.read(URL, 0, len(CONTENT)) == CONTENT


def test_a_crash_before_the_last_name_costs_nothing(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("penstock.storage.cached_object.CachedObject._complete", lambda self, copy: False)
        b"".join(Cache(folder).over(origin).stream(URL))
    assert _names(folder) == [".penstock-part"]
    path = Cache(folder).over(origin).local_path(URL)
    assert path is not None
    assert Path(path).read_bytes() == CONTENT
    assert origin.fetched() == [1, 1, 1, 1]


def test_a_path_is_given_also_while_the_file_gets_its_name(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []
    cached, rename = Cache(folder).over(origin), os.rename
    asker = threading.Thread(target=lambda: found.append(cached.local_path(URL)))

    def slow(old: str, new: str) -> None:
        if new.endswith(WHOLE):
            asker.start()
            time.sleep(0.05)
        rename(old, new)

    monkeypatch.setattr(os, "rename", slow)
    b"".join(cached.stream(URL))
    asker.join()
    assert Path(found[0] or "").read_bytes() == CONTENT


def test_no_wrong_byte_is_served_after_kills_at_any_moment(tmp_path: Path, folder: Path) -> None:
    contents = {f"far://host/{number}": _bytes(5 * CELL + number, number) for number in range(6)}
    for url, content in contents.items():
        (tmp_path / _last(url)).write_bytes(content)
    origin = Origin(str(tmp_path))
    dice = random.Random(1)

    def fill() -> None:
        cached = Cache(folder, max_bytes=24 * CELL).over(origin)
        while True:
            url = random.choice(list(contents))
            start = random.randrange(len(contents[url]))
            stop = min(len(contents[url]), start + 2 * CELL)
            if cached.read(url, start, stop) != contents[url][start:stop]:
                os._exit(3)
            path = cached.local_path(url)
            if path is not None and Path(path).read_bytes() != contents[url]:
                os._exit(4)

    for _ in range(15):
        children = [_forked(fill) for _ in range(2)]
        time.sleep(dice.uniform(0.01, 0.15))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        assert [_status(pid) for pid in children] == [-signal.SIGKILL] * 2
    cached = Cache(folder, max_bytes=24 * CELL).over(origin)
    for url, content in contents.items():
        path = cached.local_path(url)
        assert path is None or Path(path).read_bytes() == content
        assert cached.read(url, 0, len(content)) == content
    assert any(path.suffix == ".penstock" for path in folder.iterdir())


# Room


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    """Objects of 4 cells, called 0 to 9, to be read only."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(10):
        (folder / str(number)).write_bytes(_bytes(4 * CELL, number))
    return Origin(str(folder))


def _held(folder: Path) -> int:
    sizes = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            sizes += path.stat().st_blocks * 512
    return sizes


def _fill(cached: Cached, *numbers: int) -> None:
    for number in numbers:
        assert b"".join(cached.stream(f"far://host/{number}")) == _bytes(4 * CELL, number)


def _last_use(cached: Cached, number: int, when: float) -> None:
    path = cached.local_path(f"far://host/{number}")
    assert path is not None
    os.utime(path, (when, when))
    _give_back(cached)


def _give_back(cached: Cached) -> None:
    """Let go of the paths that were given away, as after many others."""
    here = cache_folder(cached.cache.folder)
    for key in list(here._lent):
        del here._lent[key]
        here._let_go(key)


def _is_whole(cached: Cached, number: int) -> bool:
    """Look without using it."""
    url = f"far://host/{number}"
    kept = cached._kept(url, cached.info(url))
    assert kept is not None
    return os.path.exists(kept.shelf.path(kept.key, WHOLE))


def test_what_was_not_used_for_longest_goes(many: Origin, folder: Path) -> None:
    cached = Cache(folder, max_bytes=20 * CELL).over(many)
    _fill(cached, 0, 1, 2, 3)
    for number, when in [(0, 300.0), (1, 100.0), (2, 400.0), (3, 200.0)]:
        _last_use(cached, number, when)
    _fill(cached, 4)
    assert [number for number in range(5) if _is_whole(cached, number)] == [0, 2, 3, 4]
    assert cached.read("far://host/3", 0, 1) == _bytes(4 * CELL, 3)[:1]  # the next to go is now 0
    _fill(cached, 5)
    assert [number for number in range(6) if _is_whole(cached, number)] == [2, 3, 4, 5]


def test_a_cache_stays_within_its_size_whoever_adds(many: Origin, folder: Path) -> None:
    def add(*numbers: int) -> None:
        cached = Cache(folder, max_bytes=12 * CELL).over(many)
        for number in numbers:
            _fill(cached, number)
            assert _held(folder) <= 12 * CELL + 100_000

    children = [_forked(lambda numbers=numbers: add(*numbers)) for numbers in ((0, 1, 2, 3), (4, 5, 6, 7))]  # type: ignore[misc]
    assert [_status(pid) for pid in children] == [0, 0]
    add(8, 9)
    assert _held(folder) > 4 * CELL


def test_an_object_larger_than_the_cache_is_read_all_the_same(many: Origin, folder: Path) -> None:
    cached = Cache(folder, max_bytes=2 * CELL).over(many)
    _fill(cached, 0, 0)
    assert _held(folder) <= 2 * CELL


def test_what_a_process_has_open_stays(many: Origin, folder: Path) -> None:
    """Lent to a child: it stays while the child lives, and goes when it is dead."""
    cached = Cache(folder, max_bytes=9 * CELL).over(many)
    _fill(cached, 0)
    ready, done = os.pipe()

    def use() -> None:
        path = Cache(folder).over(many).local_path("far://host/0")
        assert path is not None
        os.write(done, b"x")
        time.sleep(60)

    pid = _forked(use)
    assert os.read(ready, 1) == b"x"
    _fill(cached, 1, 2, 3)
    held = [_is_whole(cached, 0), _is_whole(cached, 1)]
    os.kill(pid, signal.SIGKILL)
    _status(pid)
    os.close(ready)
    os.close(done)
    assert held == [True, False]
    _fill(cached, 4, 5)
    assert not _is_whole(cached, 0)


def test_a_path_is_held_while_it_is_mapped_and_after_that_while_it_is_new(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.cache_folder._LENT", 3)
    for number in range(10):
        (tmp_path / str(number)).write_bytes(b"x")
    cached = Cache(folder).over(Origin(str(tmp_path)))
    paths = []
    for number in range(10):
        b"".join(cached.stream(f"far://host/{number}"))
        paths.append(Path(cached.local_path(f"far://host/{number}") or ""))
        if number == 0:
            with paths[0].open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    stays = [not cache_folder(str(folder)).drop(path.stem) for path in paths]
    assert stays == [True, *[False] * 6, True, True, True]
    mapped.close()


def test_files_of_others_are_left_alone(many: Origin, folder: Path) -> None:
    folder.mkdir()
    names = [
        "notes.txt",
        "0" * 32,
        "0" * 32 + ".data",
        "1" * 31 + ".penstock",
        "x" * 32 + ".penstock",
        "a.penstock-part",
    ]
    for name in names:
        (folder / name).write_bytes(b"x" * 3 * CELL)
        os.utime(folder / name, (1, 1))
    _fill(Cache(folder, max_bytes=6 * CELL).over(many), 0, 1, 2, 3)
    for name in names:
        assert (folder / name).stat().st_size == 3 * CELL


def test_a_folder_that_is_emptied_is_filled_again(many: Origin, folder: Path) -> None:
    cached = Cache(folder).over(many)
    _fill(cached, 0, 1)
    assert cached.local_path("far://host/0") is not None
    for path in folder.iterdir():
        path.unlink()
    _fill(cached, 0)
    folder_again = [path.name for path in folder.iterdir()]
    assert MARKER in folder_again
    assert cached.local_path("far://host/0") is not None
    pid = _forked(lambda: os._exit(5 if not cache_folder(str(folder)).drop(Path(_path(cached, 0)).stem) else 6))
    assert _status(pid) == 5


def _path(cached: Cached, number: int) -> str:
    path = cached.local_path(f"far://host/{number}")
    assert path is not None
    return path


# Disks


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_told_once_and_read_past(
    many: Origin,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    call: str,
) -> None:
    cached = Cache(folder).over(many)
    _fill(cached, 0)

    def no_room(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, no_room)
    with caplog.at_level(logging.WARNING, "penstock.storage"):
        _fill(cached, 0, 1, 2)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)
        _fill(cached, 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"the cache in {folder} keeps nothing more: {os.strerror(number)}; going on without"
    ]
    assert cached.local_path("far://host/1") is None
    assert cached.local_path("far://host/0") is not None


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert Cache(folder).over(origin).read(URL, 0, CELL) == CONTENT[:CELL]
    assert origin.fetched() == [1, 0, 0, 0]


def test_a_disk_that_cannot_reserve_is_written_all_the_same(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    cached = Cache(folder).over(origin)
    assert b"".join(cached.stream(URL)) == CONTENT
    assert cached.local_path(URL) is not None


def test_a_disk_that_was_full_is_tried_again_later(many: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = Cache(folder).over(many)
    cache_folder(str(folder)).stop(OSError(errno.ENOSPC, "no space"))
    _fill(cached, 0)
    assert not _is_whole(cached, 0)
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)
    _fill(cached, 0)
    assert _is_whole(cached, 0)


def test_a_limit_on_the_size_of_files_is_read_past(many: Origin, folder: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CELL, 2 * CELL))
        cached = Cache(folder).over(many)
        _fill(cached, 0, 1)
        assert cached.local_path("far://host/0") is None

    assert _status(_forked(limited)) == 0


def test_an_unbounded_cache_leaves_a_part_of_the_disk(
    many: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(many.folder)
    bound = os.statvfs_result((4096, 4096, 1000, 40, 40, *tuple(real)[5:]))  # 4 % of it is free
    cached = Cache(folder).over(many)
    monkeypatch.setattr(os, "statvfs", lambda path: bound)
    _fill(cached, 0)
    assert _held(folder) < CELL


def test_a_folder_that_cannot_be_is_an_error_when_it_is_used(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cached = Cache(tmp_path / "file" / "cache").over(origin)
    for use in (
        lambda: cached.read(URL, 0, 1),
        lambda: list(cached.stream(URL)),
        lambda: cached.local_path(URL),
        lambda: cached.put(URL),
    ):
        with pytest.raises(StorageError, match="cannot be kept there: Not a directory") as caught:
            use()
        assert caught.value.url == str(tmp_path / "file" / "cache")


def _as_nobody(work: Callable[[], object]) -> int:
    """Run something in a child that may write nothing."""

    def drop_rights() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        _markers.clear()  # opened by the parent, which may write
        work()

    return _status(_forked(drop_rights))


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that other users may look into; those of pytest are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_cache_that_may_only_be_read_still_serves(open_to_all: Path) -> None:
    folder = open_to_all / "cache"
    (open_to_all / "shard.tar").write_bytes(CONTENT)
    (open_to_all / "other").write_bytes(CONTENT)
    (open_to_all / "notes").touch()
    os.chmod(open_to_all / "notes", 0o666)
    origin = Origin(str(open_to_all))
    filled = Cache(folder).over(origin)
    b"".join(filled.stream(URL))
    filled.read("far://host/other", 0, 1)
    os.chmod(folder, 0o555)

    def read() -> None:
        cached = Cache(folder).over(origin)
        assert cached.local_path(URL) is not None
        assert cached.read(URL, 3, 2 * CELL) == CONTENT[3 : 2 * CELL]
        assert cached.read("far://host/other", 0, 2 * CELL) == CONTENT[: 2 * CELL]
        assert cached.read("far://host/other", 5, 9) == CONTENT[5:9]

    assert _as_nobody(read) == 0
    assert origin.fetched() == [1, 1, 1, 1]
    assert origin.asked("read other") == [f"read other 0 {CELL}", f"read other 0 {2 * CELL}"]


def test_a_folder_that_may_not_be_written_is_an_error(open_to_all: Path) -> None:
    (open_to_all / "shard.tar").write_bytes(CONTENT)
    (open_to_all / "notes").touch()
    os.chmod(open_to_all / "notes", 0o666)

    def read() -> None:
        with pytest.raises(StorageError, match="cannot be kept there: Permission denied"):
            Cache(open_to_all / "cache").over(Origin(str(open_to_all))).read(URL, 0, 1)

    os.chmod(open_to_all, 0o555)
    assert _as_nobody(read) == 0


def test_a_disk_that_cannot_be_locked_is_an_error(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with pytest.raises(StorageError, match="the cache cannot be locked: No locks available"):
        Cache(folder).over(origin).read(URL, 0, 1)
