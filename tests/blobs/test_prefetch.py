"""Ranges are prefetched in the background, verified, and bounded in memory."""

from __future__ import annotations

import mmap
import random
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from penstock.blobs import prefetch
from penstock.blobs.checksums import CELL
from penstock.blobs.prefetch import CHUNK, Fetcher, PrefetchedBytes, read_whole
from penstock.errors import DataError, StorageError
from penstock.storage import Info
from penstock.storage.retry import while_wanted

SIZE = 2 * CHUNK + 4 * CELL + 12_345  # three chunks
BYTES = np.random.default_rng(0).bytes(SIZE)
CHECKSUMS = np.array([zlib.crc32(BYTES[at : at + CELL]) for at in range(0, SIZE, CELL)], np.uint32)


@pytest.fixture(autouse=True)
def _threads_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "IDLE_S", 0.02)


@dataclass
class SlowStorage:
    """A storage with latency and scripted faults that records the requested ranges."""

    latency_s: float = 0.0
    requests: list[tuple[int, int]] = field(default_factory=list)
    urls: list[tuple[str, int]] = field(default_factory=list)
    damaged: int = 0  # the next requests that return a wrong byte
    broken: int = 0  # the next requests that fail
    in_flight: int = 0
    max_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, url: str, start: int, stop: int, *, into: memoryview, tag: str | None = None) -> memoryview:
        with self.lock:
            self.requests.append((start, stop))
            self.urls.append((url, start))
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            is_damaged, is_broken = self.damaged > 0, self.broken > 0
            self.damaged -= is_damaged
            self.broken -= is_broken
        time.sleep(self.latency_s)
        with self.lock:
            self.in_flight -= 1
        if is_broken:
            raise StorageError("the connection broke", url)
        into[:] = BYTES[start:stop]
        if is_damaged:
            into[0] ^= 1
        return into

    def stream(self, url: str) -> Iterator[bytes]:
        for at in range(0, SIZE, 1 << 18):
            yield BYTES[at : at + (1 << 18)]


def prefetched(storage: Any, fetcher: Fetcher | None = None, *, verified: bool = False) -> PrefetchedBytes:
    checksums = CHECKSUMS if verified else np.zeros(0, np.uint32)
    return PrefetchedBytes(fetcher or Fetcher(), storage, "x://a", "x://a", Info(SIZE, "tag", True), checksums)


def random_ranges(count: int, seed: int = 0) -> list[tuple[int, int]]:
    edges = sorted(random.Random(seed).sample(range(SIZE), 2 * count))
    return list(zip(edges[::2], edges[1::2], strict=True))


def announce(bytes_: PrefetchedBytes, ranges: list[tuple[int, int]], *, ascending: bool) -> None:
    bytes_.announce(np.array([a for a, _ in ranges]), np.array([b for _, b in ranges]), ascending=ascending)


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("max_bytes", [1 << 30, 4 << 20])
@pytest.mark.parametrize("ascending", [True, False])
def test_ranges_read_in_any_order_hold_the_stored_bytes(ascending: bool, max_bytes: int, verified: bool) -> None:
    bytes_ = prefetched(SlowStorage(), Fetcher(max_bytes), verified=verified)
    ranges = random_ranges(120)
    if not ascending:
        random.Random(1).shuffle(ranges)
    for begin in range(0, len(ranges), 70):
        part = ranges[begin : begin + 70]
        announce(bytes_, part, ascending=ascending)
        for start, stop in part:
            assert bytes_[start:stop] == BYTES[start:stop]


def test_a_range_that_was_not_announced_can_be_read() -> None:
    bytes_ = prefetched(SlowStorage())
    assert bytes_[SIZE - 10 :] == BYTES[-10:]
    assert bytes_[5:5] == b""
    assert bytes_[CHUNK - 3 : CHUNK + 3] == BYTES[CHUNK - 3 : CHUNK + 3]


@pytest.mark.parametrize("starts", [[7, 9, 5000, SIZE], [5000, 7, SIZE, 9]])
def test_empty_ranges_need_no_bytes(starts: list[int]) -> None:
    bytes_ = prefetched(SlowStorage())
    announce(bytes_, [(5000, 5010)], ascending=False)
    stops = [start + (10 if start == 5000 else 0) for start in starts]
    found = bytes_.cut(starts, stops)
    assert found == [BYTES[start:stop] for start, stop in zip(starts, stops, strict=True)]


def test_connections_fetch_concurrently_and_ahead_of_the_reader() -> None:
    storage = SlowStorage(latency_s=0.2)
    bytes_ = prefetched(storage)
    announce(bytes_, [(0, SIZE)], ascending=True)
    assert bytes_[0:10] == BYTES[:10]
    assert storage.max_in_flight == len(storage.requests) == 3, "requests ran one after another"


def test_distant_ranges_are_fetched_apart() -> None:
    storage = SlowStorage()
    bytes_ = prefetched(storage)
    announce(bytes_, [(5 * CELL, 5 * CELL + 100), (15 * CELL, 15 * CELL + 100)], ascending=True)
    assert bytes_[5 * CELL : 5 * CELL + 100] == BYTES[5 * CELL : 5 * CELL + 100]
    assert bytes_[15 * CELL : 15 * CELL + 100] == BYTES[15 * CELL : 15 * CELL + 100]
    assert sum(stop - start for start, stop in storage.requests) < 1000


def test_a_pass_from_front_to_back_fetches_every_byte_once() -> None:
    storage = SlowStorage(latency_s=0.001)
    bytes_ = prefetched(storage)
    ranges = [(at, min(SIZE, at + 30_000)) for at in range(0, SIZE, 30_000)]
    for begin in range(0, len(ranges), 100):
        announce(bytes_, ranges[begin : begin + 100], ascending=True)
        for start, stop in ranges[begin : begin + 100]:
            assert bytes_[start:stop] == BYTES[start:stop]
    assert sum(stop - start for start, stop in storage.requests) == SIZE


def test_objects_are_fetched_in_the_order_in_which_they_will_be_read() -> None:
    fetcher, storage = Fetcher(connections=1), SlowStorage()
    first, second = fetcher.next_priority(), fetcher.next_priority()
    info = Info(SIZE, "tag", True)
    later = PrefetchedBytes(fetcher, cast(Any, storage), "x://b", "x://b", info, priority=second)
    sooner = PrefetchedBytes(fetcher, cast(Any, storage), "x://a", "x://a", info, priority=first)
    with fetcher.lock:  # nothing is fetched before both are queued
        fetcher.enqueue(later._cover(0, SIZE), second)
        fetcher.enqueue(sooner._cover(0, SIZE), first)
    assert later[SIZE - 9 :] == BYTES[-9:]  # a reader waits for it: it comes before all others
    assert sooner[SIZE - 9 :] == BYTES[-9:]
    assert later[:9] == BYTES[:9]
    assert later[CHUNK : CHUNK + 9] == BYTES[CHUNK : CHUNK + 9]
    order = [url for url, start in storage.urls if (url, start) != ("x://b", 2 * CHUNK)]
    assert order == ["x://a"] * 3 + ["x://b"] * 2
    fetcher.stop()


def test_a_whole_object_is_fetched_once_while_others_are_read() -> None:
    fetcher, storage = Fetcher(max_bytes=2 * CHUNK), SlowStorage(latency_s=0.001)
    info = Info(SIZE, "tag", True)
    both = [read_whole(cast(Any, storage), url, url, info, fetcher) for url in ("x://a", "x://b")]
    heads = [next(chunks) for chunks in both]
    assert [head + b"".join(chunks) for head, chunks in zip(heads, both, strict=True)] == [BYTES, BYTES]
    assert sum(stop - start for start, stop in storage.requests) == 2 * SIZE


def test_the_memory_budget_is_not_exceeded() -> None:
    fetcher = Fetcher(max_bytes=2 * CHUNK)
    bytes_ = prefetched(SlowStorage(), fetcher)
    announce(bytes_, [(0, SIZE)], ascending=True)
    time.sleep(0.2)
    assert fetcher._bytes <= 2 * CHUNK
    assert bytes_[0:SIZE] == BYTES
    assert fetcher._bytes <= 2 * CHUNK


def test_readers_that_read_front_to_back_have_a_smaller_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CHUNK", 1 << 18)
    monkeypatch.setattr(prefetch, "SEQUENTIAL_BYTES", 1 << 20)
    fetcher = Fetcher()
    bytes_ = prefetched(SlowStorage(), fetcher)
    announce(bytes_, [(at, at + 10_000) for at in range(0, SIZE - 10_000, 10_000)], ascending=True)
    for at in range(0, SIZE - 10_000, 10_000):
        assert bytes_[at : at + 10_000] == BYTES[at : at + 10_000]
        assert fetcher._bytes <= 1 << 20


def test_buffers_are_reused_and_ranges_are_never_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CHUNK", 1 << 16)
    monkeypatch.setattr(prefetch, "SEQUENTIAL_BYTES", 1 << 18)
    allocated: list[int] = []

    def allocate(size: int) -> mmap.mmap:
        allocated.append(size)
        return mmap.mmap(-1, size)

    monkeypatch.setattr(prefetch, "new_buffer", allocate)
    fetcher, storage = Fetcher(), SlowStorage()
    wrong_starts: list[int] = []

    def read(ascending: bool) -> None:
        bytes_ = prefetched(storage, fetcher)
        ranges = random_ranges(3000, seed=ascending)
        announce(bytes_, ranges, ascending=ascending)
        wrong_starts.extend(start for start, stop in ranges if bytes_[start:stop] != BYTES[start:stop])
        announce(bytes_, ranges, ascending=ascending)
        for first in range(0, len(ranges), 40):
            starts, stops = zip(*ranges[first : first + 40], strict=True)
            cut = bytes_.cut(starts, stops)
            wrong_starts.extend(
                start for start, data in zip(starts, cut, strict=True) if not BYTES.startswith(data, start)
            )

    readers = [threading.Thread(target=read, args=(number % 2 == 0,)) for number in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong_starts
    assert len(allocated) < len(storage.requests)


def test_what_is_opened_ahead_does_not_displace_what_is_about_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK", "_FIRST"):
        monkeypatch.setattr(prefetch, name, CELL)
    for name in ("SEQUENTIAL_BYTES", "READ_AHEAD"):
        monkeypatch.setattr(prefetch, name, 4 * CELL)
    storage, fetcher = SlowStorage(), Fetcher()
    current, ahead = prefetched(storage, fetcher), prefetched(SlowStorage(), fetcher)
    current.window(0)
    ahead.window(0)
    starts = list(range(0, SIZE, CELL))
    for start in starts:  # the walk over headers is ahead of the reader
        current.window(start)
        announce(current, [(start, min(start + CELL, SIZE))], ascending=True)
        current.pass_over(start)
    for start in starts:
        assert current.cut([start], [min(start + CELL, SIZE)]) == [BYTES[start : start + CELL]]
    assert sorted(start for start, _ in storage.requests) == starts
    fetcher.stop()


def test_a_stopped_fetcher_prefetches_nothing_but_still_reads() -> None:
    storage = SlowStorage()
    fetcher = Fetcher()
    bytes_ = prefetched(storage, fetcher)
    fetcher.stop()
    announce(bytes_, [(0, SIZE)], ascending=True)
    time.sleep(0.05)
    assert not storage.requests
    assert bytes_[5:10] == BYTES[5:10]


def test_a_cancelled_reader_fetches_nothing() -> None:
    storage = SlowStorage()
    bytes_ = prefetched(storage)
    with while_wanted(lambda: False):
        announce(bytes_, [(0, SIZE)], ascending=True)
        with pytest.raises(StorageError, match="the read was cancelled"):
            bytes_[5:10]
    time.sleep(0.05)
    assert not storage.requests
    assert bytes_[5:10] == BYTES[5:10]


def test_a_damaged_range_is_fetched_a_second_time_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    bytes_ = prefetched(SlowStorage(damaged=1), verified=True)
    assert bytes_[0 : 3 * CELL] == BYTES[: 3 * CELL]
    assert "do not match their checksum, attempt 1 of 2" in caplog.text
    bytes_ = prefetched(SlowStorage(damaged=1000), verified=True)
    with pytest.raises(
        DataError, match=r"the bytes at offset 0 are not those that were stored: .* checksum does not match.*x://a"
    ):
        bytes_[0 : 3 * CELL]


def test_an_error_reaches_the_reader_and_the_next_read_tries_again() -> None:
    storage = SlowStorage(broken=1000)
    bytes_ = prefetched(storage)
    with pytest.raises(StorageError, match="the connection broke"):
        bytes_[0:10]
    storage.broken = 0
    assert bytes_[0:10] == BYTES[:10]


def test_stopping_ends_every_thread_and_later_reads_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher()
    bytes_ = prefetched(SlowStorage(latency_s=0.01), fetcher)
    announce(bytes_, random_ranges(50), ascending=True)
    fetcher.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock fetch"]
    assert bytes_[100:200] == BYTES[100:200]
    monkeypatch.setattr(prefetch, "IDLE_S", 0.05)
    fetcher.stop()


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_whole_object_is_read_in_order(has_ranges: bool) -> None:
    storage: Any = SlowStorage()
    got = b"".join(read_whole(storage, "x://a", "x://a", Info(SIZE, None, has_ranges), Fetcher()))
    assert got == BYTES


def test_the_size_of_an_object_allocates_nothing() -> None:
    class Zeros(SlowStorage):
        def read(self, url: str, start: int, stop: int, *, into: memoryview, tag: str | None = None) -> memoryview:
            return into

    info = Info(10**18, "t", True)
    fetcher, storage = Fetcher(), Zeros()
    whole = PrefetchedBytes(fetcher, storage, "u", "u", info)  # type: ignore[arg-type]
    whole.announce(np.array([5]), np.array([10**18]), ascending=False)
    assert len(whole._chunks) <= fetcher.max_bytes // CHUNK + 2
    chunks = read_whole(storage, "u", "u", info, fetcher)  # type: ignore[arg-type]
    assert 0 < len(next(chunks)) <= CHUNK
    chunks.close()  # type: ignore[attr-defined]
    fetcher.stop()
