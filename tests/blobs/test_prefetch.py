"""Ranges that arrive in the background."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from penstock.blobs import prefetch as arriving
from penstock.blobs.checksums import CELL
from penstock.blobs.prefetch import CHUNK, Fetcher, PrefetchedBytes, read_whole
from penstock.errors import DataError, StorageError
from penstock.storage import Info
from penstock.storage.retry import while_wanted

SIZE = 20 * CELL + 12_345
BYTES = np.random.default_rng(0).bytes(SIZE)
MARKS = np.array([zlib.crc32(BYTES[at : at + CELL]) for at in range(0, SIZE, CELL)], np.uint32)


@pytest.fixture(autouse=True)
def _threads_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "IDLE_S", 0.02)


@dataclass
class Slow:
    """A storage that takes its time, and remembers what it was asked for."""

    latency: float = 0.0
    asked: list[tuple[int, int]] = field(default_factory=list)
    damaged: int = 0  # how many answers come with a wrong byte
    broken: int = 0  # how many do not come
    going: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, url: str, start: int, stop: int, *, into: memoryview, tag: str | None = None) -> memoryview:
        with self.lock:
            self.asked.append((start, stop))
            self.going += 1
            self.most = max(self.most, self.going)
            damage, breaks = self.damaged > 0, self.broken > 0
            self.damaged -= damage
            self.broken -= breaks
        time.sleep(self.latency)
        with self.lock:
            self.going -= 1
        if breaks:
            raise StorageError("it broke", url)
        into[:] = BYTES[start:stop]
        if damage:
            into[0] ^= 1
        return into

    def stream(self, url: str) -> Iterator[bytes]:
        for at in range(0, SIZE, 1 << 18):
            yield BYTES[at : at + (1 << 18)]


def opened(storage: Any, fetcher: Fetcher | None = None, *, grid: bool = False) -> PrefetchedBytes:
    marks = MARKS if grid else np.zeros(0, np.uint32)
    return PrefetchedBytes(fetcher or Fetcher(), storage, "x://a", "x://a", Info(SIZE, "tag", True), marks)


def ranges(count: int, seed: int = 0) -> list[tuple[int, int]]:
    dice = random.Random(seed)
    edges = sorted(dice.sample(range(SIZE), 2 * count))
    return list(zip(edges[::2], edges[1::2], strict=True))


def want(bytes_: PrefetchedBytes, some: list[tuple[int, int]], *, ascending: bool) -> None:
    bytes_.want(np.array([a for a, _ in some]), np.array([b for _, b in some]), ascending=ascending)


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("memory", [1 << 30, 4 << 20])
@pytest.mark.parametrize("ascending", [True, False])
def test_what_is_read_is_what_is_stored_in_whatever_order(ascending: bool, memory: int, grid: bool) -> None:
    bytes_ = opened(Slow(), Fetcher(memory), grid=grid)
    some = ranges(120)
    if not ascending:
        random.Random(1).shuffle(some)
    for begin in range(0, len(some), 70):
        part = some[begin : begin + 70]
        want(bytes_, part, ascending=ascending)
        for start, stop in part:
            assert bytes_[start:stop] == BYTES[start:stop]


def test_a_range_nobody_asked_for_comes_too() -> None:
    bytes_ = opened(Slow())
    assert bytes_[SIZE - 10 :] == BYTES[-10:]
    assert bytes_[5:5] == b""
    assert bytes_[CHUNK - 3 : CHUNK + 3] == BYTES[CHUNK - 3 : CHUNK + 3]


def test_many_connections_fetch_at_once_and_ahead_of_the_reader() -> None:
    storage = Slow(latency=0.2)
    bytes_ = opened(storage)
    want(bytes_, [(0, SIZE)], ascending=True)
    assert bytes_[0:10] == BYTES[:10]
    assert storage.most == len(storage.asked) == 3, "one after the other"


def test_far_ranges_are_not_joined() -> None:
    storage = Slow()
    bytes_ = opened(storage)
    want(bytes_, [(5 * CELL, 5 * CELL + 100), (15 * CELL, 15 * CELL + 100)], ascending=True)
    assert bytes_[5 * CELL : 5 * CELL + 100] == BYTES[5 * CELL : 5 * CELL + 100]
    assert bytes_[15 * CELL : 15 * CELL + 100] == BYTES[15 * CELL : 15 * CELL + 100]
    assert sum(stop - start for start, stop in storage.asked) < 1000


def test_nothing_is_fetched_twice_by_a_pass_front_to_back() -> None:
    storage = Slow(latency=0.001)
    bytes_ = opened(storage)
    some = [(at, min(SIZE, at + 30_000)) for at in range(0, SIZE, 30_000)]
    for begin in range(0, len(some), 100):
        want(bytes_, some[begin : begin + 100], ascending=True)
        for start, stop in some[begin : begin + 100]:
            assert bytes_[start:stop] == BYTES[start:stop]
    assert sum(stop - start for start, stop in storage.asked) == SIZE


def test_memory_is_bounded() -> None:
    fetcher = Fetcher(memory=2 * CHUNK)
    bytes_ = opened(Slow(), fetcher)
    want(bytes_, [(0, SIZE)], ascending=True)
    time.sleep(0.2)
    assert fetcher._bytes <= 2 * CHUNK
    assert bytes_[0:SIZE] == BYTES
    assert fetcher._bytes <= 2 * CHUNK


def test_readers_that_go_front_to_back_hold_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "CHUNK", 1 << 18)
    monkeypatch.setattr(arriving, "FRONT", 1 << 20)
    fetcher = Fetcher()
    bytes_ = opened(Slow(), fetcher)
    want(bytes_, [(at, at + 10_000) for at in range(0, SIZE - 10_000, 10_000)], ascending=True)
    for at in range(0, SIZE - 10_000, 10_000):
        assert bytes_[at : at + 10_000] == BYTES[at : at + 10_000]
        assert fetcher._bytes <= 1 << 20


def test_buffers_are_used_again_and_ranges_never_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "CHUNK", 1 << 16)
    monkeypatch.setattr(arriving, "FRONT", 1 << 18)
    fetcher = Fetcher()
    wrong: list[int] = []

    def read(ascending: bool) -> None:
        bytes_ = opened(Slow(), fetcher)
        some = ranges(3000, seed=ascending)
        want(bytes_, some, ascending=ascending)
        wrong.extend(start for start, stop in some if bytes_[start:stop] != BYTES[start:stop])

    readers = [threading.Thread(target=read, args=(number % 2 == 0,)) for number in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong
    assert fetcher._buffers


def test_what_is_wanted_after_the_end_is_not_fetched() -> None:
    storage = Slow()
    fetcher = Fetcher()
    bytes_ = opened(storage, fetcher)
    fetcher.rest()
    want(bytes_, [(0, SIZE)], ascending=True)
    time.sleep(0.05)
    assert not storage.asked
    assert bytes_[5:10] == BYTES[5:10]


def test_what_nobody_wants_any_more_is_not_fetched() -> None:
    storage = Slow()
    bytes_ = opened(storage)
    with while_wanted(lambda: False):
        want(bytes_, [(0, SIZE)], ascending=True)
        with pytest.raises(StorageError, match="nobody waits"):
            bytes_[5:10]
    time.sleep(0.05)
    assert not storage.asked
    assert bytes_[5:10] == BYTES[5:10]


def test_a_damaged_range_is_fetched_again_once(caplog: pytest.LogCaptureFixture) -> None:
    bytes_ = opened(Slow(damaged=1), grid=True)
    assert bytes_[0 : 3 * CELL] == BYTES[: 3 * CELL]
    assert "fetched again" in caplog.text
    bytes_ = opened(Slow(damaged=1000), grid=True)
    with pytest.raises(DataError, match=r"not those that were stored.*x://a"):
        bytes_[0 : 3 * CELL]


def test_an_error_reaches_the_reader_and_is_not_for_ever() -> None:
    storage = Slow(broken=1000)
    bytes_ = opened(storage)
    with pytest.raises(StorageError, match="it broke"):
        bytes_[0:10]
    storage.broken = 0
    assert bytes_[0:10] == BYTES[:10]


def test_resting_leaves_no_thread_and_what_comes_later_comes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher()
    bytes_ = opened(Slow(latency=0.01), fetcher)
    want(bytes_, ranges(50), ascending=True)
    fetcher.rest()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock fetch"]
    assert bytes_[100:200] == BYTES[100:200]
    monkeypatch.setattr(arriving, "IDLE_S", 0.05)
    fetcher.rest()


@pytest.mark.parametrize("parts", [True, False])
def test_a_whole_object_comes_in_order(parts: bool) -> None:
    storage: Any = Slow()
    got = b"".join(read_whole(storage, "x://a", "x://a", Info(SIZE, None, parts), Fetcher()))
    assert got == BYTES
