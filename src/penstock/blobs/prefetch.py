"""Byte ranges of remote objects, prefetched in background threads before they are read.

A reader announces the ranges it will read. Threads fetch them in that order over several connections: close ranges as
one request, long ones as several, plus some read-ahead. Objects that are read as they arrive are fetched one after the
other, in the order in which they will be read. Memory is bounded: ranges that were read are dropped first,
and prefetching pauses while the reader does. Reading a range that was not announced, or was dropped, fetches it at
once. Ranges are verified by the checksums that an index holds.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.blobs.checksums import CELL, U32, first_damaged
from penstock.blobs.remote_bytes import RemoteBytes, Window, new_buffer
from penstock.errors import DataError, StorageError
from penstock.lazy import cached_property
from penstock.storage import Info, Storage
from penstock.storage.protocol import LateBuffers
from penstock.storage.retry import wanted, while_wanted

I64 = npt.NDArray[np.int64]

CHUNK = 6 << 20  # the most bytes of one request: larger ones need more memory, whose first use costs more than requests
MAX_GAP = 256 << 10  # a gap up to this size costs less to fetch than a second request
READ_AHEAD = 64 << 20  # the most bytes that are fetched beyond what was announced
CONNECTIONS = 24  # half of them wait for a first byte where a round trip takes as long as receiving a chunk
SEQUENTIAL_BYTES = 192 << 20  # budget of readers that go front to back: more is only more memory to fault in
MIN_BUDGET = 1 << 30  # of all ranges together, unless an eighth of the machine's memory is more
MAX_SPARE_BUFFERS = 24
_FIRST = 1 << 20  # bytes of the first request for an object that is read as it arrives
IDLE_S = 1.0  # a thread without work for this long ends
_QUEUED, _IN_FLIGHT, _ARRIVED, _FAILED = range(4)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A range that one request fetches."""

    owner: PrefetchedBytes
    start: int
    stop: int
    priority: int = 0  # the lowest is fetched first
    state: int = _QUEUED
    data: mmap.mmap | None = None  # its bytes, at the beginning of a buffer that is reused after it
    reserved: bool = False  # it was fetched ahead of a reader that has not come so far: it is not dropped
    pins: int = 0  # readers that copy from the buffer without the lock: it is not reused before they are done
    error: Exception | None = None
    unread: int = 0  # announced bytes that were not read yet
    keep: bool = False  # its reader may read it again
    urgent: bool = False  # a reader waits for it: it is not dropped before it was read
    used_at: float = 0.0  # on the monotonic clock

    @property
    def size(self) -> int:
        return self.stop - self.start


class Fetcher:
    """Threads that fetch ranges of any number of objects within one memory budget; safe to share between threads.

    Attributes:
        max_bytes: The memory budget.
        stopped: Whether prefetching has stopped; reads still work.
    """

    def __init__(self, max_bytes: int | None = None, connections: int = CONNECTIONS) -> None:
        """Start nothing yet; the budget defaults to an eighth of the machine's memory, 1 GiB at least."""
        self.max_bytes = max_bytes or max(MIN_BUDGET, _machine_memory() // 8)
        self.lock = threading.Lock()
        self.arrived = threading.Condition(self.lock)  # readers wait for it
        self._work_arrived = threading.Condition(self.lock)  # fetching threads wait for it: a chunk wakes one of them
        self.stopped = False
        self._connections = connections
        self._queue: list[_Chunk] = []  # by priority and start
        self._priorities = itertools.count(1)
        self._held: set[_Chunk] = set()  # in flight or arrived: these count towards the budget
        self._bytes = 0
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        # For reuse, since faulting in new memory costs more than receiving the bytes. Anonymous maps, since a slice of
        # one is a bytes object.
        self._buffers: list[mmap.mmap] = []

    def next_priority(self) -> int:
        """Return a priority lower than all earlier ones."""
        return next(self._priorities)

    def enqueue(self, chunks: Sequence[_Chunk], priority: int) -> None:
        """Queue chunks of one object, and start the threads they need; call with the lock held."""
        for chunk in chunks:
            chunk.priority = priority
            insort(self._queue, chunk, key=lambda queued: (queued.priority, queued.start))
        while self._idle < len(self._queue) and len(self._threads) < self._connections:
            thread = threading.Thread(target=self._work, name="penstock fetch", daemon=True)
            self._threads.add(thread)
            self._idle += 1
            thread.start()
        self._work_arrived.notify(len(chunks))

    def urge(self, chunk: _Chunk) -> None:
        """Fetch a chunk before all others, since a reader waits for it; call with the lock held."""
        if not chunk.urgent:
            chunk.urgent = True
            self._work_arrived.notify()

    def drop(self, chunk: _Chunk) -> None:
        """Drop a chunk and reuse its buffer; call with the lock held."""
        chunk.owner.forget(chunk)
        if chunk in self._held:
            self._held.discard(chunk)
            self._bytes -= chunk.size
            self._work_arrived.notify()
        data, chunk.data = chunk.data, None
        if data is not None and not chunk.pins:
            self._reuse(data)

    def unpin(self, chunk: _Chunk, data: mmap.mmap) -> None:
        """Release one reader's claim on the buffer of a chunk; call with the lock held."""
        chunk.pins -= 1
        if not chunk.pins and chunk.data is None:  # the chunk was dropped in the meantime
            self._reuse(data)

    def _reuse(self, data: mmap.mmap) -> None:
        if len(data) == CHUNK and len(self._buffers) < MAX_SPARE_BUFFERS and not self.stopped:
            self._buffers.append(data)

    def buffer(self, size: int) -> mmap.mmap:
        """Return a buffer of at least ``size`` bytes, one that was used before where it fits."""
        if 2 * size <= CHUNK or size > CHUNK:
            return new_buffer(size)
        with self.lock:
            reused = self._buffers.pop() if self._buffers else None
        return new_buffer(CHUNK) if reused is None else reused

    def stop(self) -> None:
        """Stop prefetching and free what is held; only ranges that a reader waits for are still fetched.

        Waits up to half a second for the threads to end.
        """
        with self.lock:
            self.stopped = True
            self._buffers.clear()
            for chunk in list(self._queue):
                if not chunk.urgent:
                    self.drop(chunk)
            self._queue = [chunk for chunk in self._queue if chunk.urgent]
            for chunk in [chunk for chunk in self._held if chunk.state == _ARRIVED]:
                self.drop(chunk)
            threads = list(self._threads)
            self._work_arrived.notify_all()
        until = time.monotonic() + 0.5
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        thread = threading.current_thread()
        while (chunk := self._next(thread)) is not None:
            self._fetch(chunk)
            with self.lock:
                self._idle += 1
            del chunk

    def _next(self, thread: threading.Thread) -> _Chunk | None:
        """Wait for a chunk to fetch; return None after ``IDLE_S`` seconds, or when the fetcher has stopped."""
        until = time.monotonic() + IDLE_S
        with self.lock:
            while True:
                chunk = self._next_fitting()
                if chunk is not None:
                    self._idle -= 1
                    return chunk
                remaining_s = 0.0 if self.stopped else until - time.monotonic()
                if remaining_s <= 0 and not self._queue:
                    self._idle -= 1
                    self._threads.discard(thread)
                    return None
                self._work_arrived.wait(max(remaining_s, 0.05))

    def _next_fitting(self) -> _Chunk | None:
        """Take the next chunk that fits into the budget off the queue, urgent ones first."""
        if not self._queue:
            return None
        urgent = next((chunk for chunk in self._queue if chunk.urgent), None)
        chunk = urgent or self._queue[0]
        if not self._make_room(chunk) and urgent is None and self._bytes:
            return None
        self._queue.remove(chunk)
        chunk.state = _IN_FLIGHT
        self._held.add(chunk)
        self._bytes += chunk.size
        return chunk

    def _make_room(self, chunk: _Chunk) -> bool:
        """Drop chunks that were read, least recently used first; unread ones only if an urgent chunk needs the room."""
        # Objects that are read as they arrive are opened ahead: two of them have room beside the one that is read.
        budget = self.max_bytes if chunk.keep else min(self.max_bytes, SEQUENTIAL_BYTES * (1 + chunk.reserved))
        if self._bytes + chunk.size <= budget:
            return True
        droppable = [held for held in self._held if held.state == _ARRIVED and not (held.urgent or held.reserved)]
        droppable.sort(key=lambda held: (held.unread > 0, held.used_at))
        for held in droppable:
            if held.unread > 0 and not (chunk.urgent and self._bytes + chunk.size > self.max_bytes):
                break  # it would be fetched a second time
            self.drop(held)
            if self._bytes + chunk.size <= budget:
                return True
        return False

    def _fetch(self, chunk: _Chunk) -> None:
        try:
            with while_wanted(lambda: chunk.urgent or not self.stopped):
                chunk.data = chunk.owner.fetch(chunk.start, chunk.stop)
            state = _ARRIVED
        except Exception as exc:  # raised to the reader of the range
            chunk.error, state = exc, _FAILED
        with self.lock:
            chunk.state, chunk.used_at = state, time.monotonic()
            if state == _FAILED:
                self._held.discard(chunk)
                self._bytes -= chunk.size
                if not chunk.urgent:  # no reader waits for it: a later read fetches it again
                    chunk.owner.forget(chunk)
            self.arrived.notify_all()


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * MIN_BUDGET


class _RangeBuffer:
    """The buffer of a range, chosen when its bytes arrive: it may be one that was in use when they were requested."""

    def __init__(self, fetcher: Fetcher, size: int) -> None:
        self._fetcher, self._size = fetcher, size

    @cached_property
    def memory(self) -> mmap.mmap:
        return self._fetcher.buffer(self._size)

    def view(self) -> memoryview:
        return memoryview(self.memory)[: self._size]


@dataclass(slots=True, eq=False)
class PrefetchedBytes(RemoteBytes):
    """The bytes of one remote object; slicing it waits until the range has arrived.

    Attributes:
        fetcher: Fetches the ranges.
        storage: Holds the object.
        full_url: The URL with its credentials.
        url: The URL without credentials, for errors and logs.
        info: The size and tag of the object.
        checksums: The CRC-32 of every MiB; empty where they are unknown.
        priority: The priority of what is fetched ahead of ``window``.
    """

    fetcher: Fetcher
    storage: Storage
    full_url: str
    url: str
    info: Info
    checksums: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    priority: int = 0
    _chunks: list[_Chunk] = field(default_factory=list)  # by start; they do not overlap
    _end: int = 0  # of the last announced range: if the next one begins there, more is read ahead
    _last: _Chunk | None = None  # the chunk read last: the next read is likely to be in it too
    _window: tuple[_Chunk, mmap.mmap] | None = None  # the chunk that was returned as a window, and its buffer

    def __len__(self) -> int:
        return self.info.size or 0

    def announce(self, starts: I64, stops: I64, *, ascending: bool) -> None:
        """Announce ranges that will be read, so that they are fetched in the background.

        Args:
            starts: The offset of the first byte of each range.
            stops: The offset after the last byte of each.
            ascending: Each range is read once, front to back: chunks are dropped as they are passed.
        """
        nonempty = stops > starts
        starts, stops = starts[nonempty], stops[nonempty]
        if not len(starts):
            return
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        reach = np.maximum.accumulate(stops)
        dense = 4 * int((stops - starts).sum()) > int(reach[-1] - starts[0])  # the gaps are likely to be read too
        cuts = np.flatnonzero(starts[1:] > reach[:-1] + (CHUNK if dense else MAX_GAP)) + 1
        runs = zip(
            starts[np.concatenate([[0], cuts])].tolist(), reach[np.append(cuts, len(reach)) - 1].tolist(), strict=True
        )
        with self.fetcher.lock:
            if self.fetcher.stopped or not wanted():
                return
            added: list[_Chunk] = []
            room = self.fetcher.max_bytes  # what does not fit is fetched when it is read
            for start, stop in runs:
                if room <= 0:
                    break
                added += self._cover(start, min(stop, start + room))
                room -= stop - start
            self._count_unread(starts, stops, keep=not ascending)
            first, last = int(starts[0]), int(stops[-1])
            if abs(first - self._end) <= MAX_GAP:
                ahead = min(len(self), last + min(READ_AHEAD, max(CHUNK, last - first)))
                added += self._cover(last, ahead) if last < ahead else []
            self._end = last
            self.fetcher.enqueue(added, self.fetcher.next_priority())

    def _cover(self, start: int, stop: int) -> list[_Chunk]:
        """Add and return chunks for the parts of a range that no chunk covers yet."""
        if len(self.checksums):  # only whole cells can be verified
            start, stop = start // CELL * CELL, -(-stop // CELL) * CELL
        stop = min(stop, len(self))
        added: list[_Chunk] = []
        at = start
        for known in self._between(start, stop):
            added += self._split(at, known.start)
            at = max(at, known.stop)
        added += self._split(at, stop)
        for chunk in added:
            insort(self._chunks, chunk, key=lambda chunk: chunk.start)
        return added

    def _split(self, start: int, stop: int) -> list[_Chunk]:
        return [_Chunk(self, at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]

    def _between(self, start: int, stop: int) -> list[_Chunk]:
        """Return the chunks that overlap a range."""
        low = bisect_right(self._chunks, start, key=lambda chunk: chunk.start)
        low -= low > 0 and self._chunks[low - 1].stop > start
        high = low
        while high < len(self._chunks) and self._chunks[high].start < stop:
            high += 1
        return self._chunks[low:high]

    def _count_unread(self, starts: I64, stops: I64, *, keep: bool) -> None:
        """Add the announced bytes of every chunk to its ``unread``."""
        edges = np.array([chunk.start for chunk in self._chunks], np.int64)
        first, last = (np.searchsorted(edges, at, "right") - 1 for at in (starts, stops - 1))
        inside = first == last
        announced = np.bincount(first[inside], weights=(stops - starts)[inside], minlength=len(edges))
        for start, stop in zip(starts[~inside].tolist(), stops[~inside].tolist(), strict=True):
            for number, chunk in enumerate(self._between(start, stop), int(np.searchsorted(edges, start, "right")) - 1):
                announced[number] += min(stop, chunk.stop) - max(start, chunk.start)
        for number in np.flatnonzero(announced).tolist():
            chunk = self._chunks[number]
            chunk.unread += int(announced[number])
            chunk.keep = chunk.keep or keep

    def forget(self, chunk: _Chunk) -> None:
        """Remove a chunk; call with the fetcher's lock held."""
        low = bisect_right(self._chunks, chunk.start, key=lambda chunk: chunk.start) - 1
        if 0 <= low < len(self._chunks) and self._chunks[low] is chunk:
            del self._chunks[low]

    def __getitem__(self, sel: slice) -> bytes:
        """Read a range, and wait for it where it has not arrived.

        Raises:
            StorageError: The range cannot be read, the object has changed, or the reader was cancelled.
            DataError: The bytes do not match their checksums.
        """
        start, stop, _ = sel.indices(len(self))
        if start >= stop:
            return b""
        with self.fetcher.lock:
            parts = [self._part(start, stop)]
            while (got := sum(map(len, parts))) < stop - start:
                parts.append(self._part(start + got, stop))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def cut(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Read many ranges; neighbours in one chunk are copied without the lock."""
        out: list[bytes] = []
        ascending = sorted(starts) == list(starts) and sorted(stops) == list(stops)
        while (at := len(out)) < len(starts):
            if starts[at] == stops[at]:  # it may lie outside of what was announced
                out.append(b"")
                continue
            with self.fetcher.lock:
                chunk = self._arrived(starts[at], stops[at])
                low, high, data = chunk.start, chunk.stop, chunk.data
                assert data is not None
                chunk.pins += 1
            end = bisect_right(stops, high, at) if ascending else at
            while not ascending and end < len(starts) and low <= starts[end] and stops[end] <= high:
                end += 1
            ranges = zip(starts[at:end], stops[at:end], strict=True)
            out += [data[start - low : stop - low] for start, stop in ranges]
            with self.fetcher.lock:
                chunk.unread -= sum(stops[at:end]) - sum(starts[at:end])
                self.fetcher.unpin(chunk, data)
            if end == at:  # the range is not in one chunk
                out.append(self[starts[at] : stops[at]])
        return out

    def reach(self, offset: int) -> int:
        return len(self)

    def window(self, offset: int) -> Window:
        """Wait for the part that holds the byte at ``offset``, and fetch what follows it."""
        self._fetch_ahead(offset)
        with self.fetcher.lock:
            if self._window is not None:
                self.fetcher.unpin(*self._window)
                self._window = None
            chunk = self._arrived(offset, offset + CHUNK)
            assert chunk.data is not None
            chunk.pins += 1
            self._window = chunk, chunk.data
            return Window(chunk.start, chunk.stop, chunk.data)

    def _fetch_ahead(self, offset: int) -> None:
        """Fetch what follows ``offset``, and hold it until ``pass_over``."""
        with self.fetcher.lock:
            if self.fetcher.stopped or not wanted():
                return
            added = self._cover(0, _FIRST) if not offset else []
            added += self._cover(offset, min(len(self), -(-(offset + SEQUENTIAL_BYTES) // CHUNK) * CHUNK))
            for chunk in added:
                chunk.reserved = True
            self.fetcher.enqueue(added, self.priority)

    def fetch_small(self) -> None:
        """Fetch the object ahead, whole, if it is so small that a part of it would take as long."""
        if len(self) <= MAX_GAP:
            self._fetch_ahead(0)

    def pass_over(self, offset: int) -> None:
        """Record that all wanted bytes before ``offset`` were announced: the others need not be held."""
        with self.fetcher.lock:
            for chunk in self._chunks:
                if chunk.stop > offset:
                    break
                chunk.reserved = False

    def _part(self, start: int, stop: int) -> bytes:
        """Return the part of a range that one chunk holds, from its beginning; call with the fetcher's lock held."""
        chunk = self._arrived(start, stop)
        assert chunk.data is not None
        part = chunk.data[start - chunk.start : min(stop, chunk.stop) - chunk.start]
        chunk.unread -= len(part)
        return part

    def _arrived(self, start: int, stop: int) -> _Chunk:
        """Wait for the chunk that holds the byte at ``start``; call with the fetcher's lock held."""
        last = self._last
        if last is not None and last.data is not None and last.start <= start < last.stop:
            return last
        while True:
            found = self._between(start, start + 1)
            if not wanted():
                raise StorageError("the read was cancelled: nothing waits for it any more", self.url)
            if not found:
                self.fetcher.enqueue(self._cover(start, min(stop, start + READ_AHEAD)), 0)
                continue
            chunk = found[0]
            if chunk.state == _ARRIVED:
                break
            self.fetcher.urge(chunk)
            if chunk.state == _FAILED:
                self.forget(chunk)
                assert chunk.error is not None
                raise chunk.error
            self.fetcher.arrived.wait(1.0)
        self._last = chunk
        chunk.urgent = False
        chunk.used_at = time.monotonic()
        if not chunk.keep:
            self._drop_before(chunk)
        return chunk

    def _drop_before(self, chunk: _Chunk) -> None:
        """Drop the chunks that a reader which goes front to back has passed."""
        while (first := self._chunks[0]) is not chunk and first.state == _ARRIVED and first.unread <= 0:
            if first.reserved:
                return
            self.fetcher.drop(first)

    def fetch(self, start: int, stop: int) -> mmap.mmap:
        """Fetch a range in the calling thread and verify it; a damaged range is fetched once more.

        Raises:
            StorageError: The range cannot be read.
            DataError: The bytes do not match their checksums, twice.
        """
        buffer = _RangeBuffer(self.fetcher, stop - start)
        for attempt in (1, 2):
            if isinstance(self.storage, LateBuffers):
                self.storage.receive(self.full_url, start, stop, buffer.view, self.info.tag)
            else:
                self.storage.read(self.full_url, start, stop, into=buffer.view(), tag=self.info.tag)
            bad = first_damaged(self.checksums, buffer.view(), start, len(self))
            if bad is None:
                return buffer.memory
            if (forget := getattr(self.storage, "forget", None)) is not None:
                forget(self.full_url)  # a cached copy is damaged too
            log.warning(
                "%s: the bytes at offset %d do not match their checksum, attempt %d of 2", self.url, bad, attempt
            )
        raise DataError(
            f"the bytes at offset {bad:,} are not those that were stored: their checksum does not match", self.url
        )

    def close(self) -> None:
        """Drop all chunks but those in flight; the fetcher drops these when it needs their memory."""
        with self.fetcher.lock:
            for chunk in list(self._chunks):
                chunk.reserved = False
                if chunk.state != _IN_FLIGHT:
                    self.fetcher.drop(chunk)


def read_whole(
    storage: Storage, full_url: str, url: str, info: Info, fetcher: Fetcher, priority: int | None = None
) -> Iterator[bytes]:
    """Read all bytes of an object in order, over several connections where the storage can read ranges.

    Args:
        storage: Holds the object.
        full_url: The URL with its credentials.
        url: The URL without credentials, for errors and logs.
        info: The size and tag of the object.
        fetcher: Fetches the ranges.
        priority: From ``fetcher.next_priority``; by default after all objects so far.

    Raises:
        StorageError: The object cannot be read, or has changed.
    """
    if not info.ranges or info.size is None:
        yield from storage.stream(full_url)
        return
    priority = fetcher.next_priority() if priority is None else priority
    whole = PrefetchedBytes(fetcher, storage, full_url, url, info, priority=priority)
    try:
        at = 0
        while at < len(whole):
            start, stop, data = whole.window(at)
            yield data[at - start : stop - start]
            whole.pass_over(stop)
            at = stop
    finally:
        whole.close()
