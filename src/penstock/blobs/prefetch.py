"""Bytes of remote objects that arrive in the background, by ranges, before they are read.

A reader says which ranges it will want; connections fetch them in that order, many at a time, joined where they lie
close and split where they are long, with some of what follows. Memory is bounded: what was read goes first, and
nothing is fetched far ahead of a reader that does not read. A read of what nobody asked for, or of what had to go,
fetches it at once. Ranges are verified by the grid of checksums that comes with an index.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.blobs.checksums import CELL, U32, first_damaged
from penstock.errors import DataError, StorageError
from penstock.storage import Info, Storage
from penstock.storage.retry import wanted, while_wanted

I64 = npt.NDArray[np.int64]

CHUNK = 8 << 20  # what one request asks for, at most
GAP = 256 << 10  # bytes nobody asked for that are cheaper to take along than to ask again
AHEAD = 64 << 20  # what follows, fetched before it is asked for
CONNECTIONS = 12
FRONT = 128 << 20  # held for readers that go front to back: more would only be memory that is touched afresh
LEAST = 1 << 30  # memory for ranges, or an eighth of the machine's
IDLE_S = 1.0  # after which a connection's thread ends
_QUEUED, _GOING, _HERE, _FAILED = range(4)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A range on its way, or here."""

    owner: PrefetchedBytes
    start: int
    stop: int
    state: int = _QUEUED
    view: memoryview | None = None  # of its bytes, in a buffer that other ranges will use after it
    error: Exception | None = None
    unread: int = 0  # wanted bytes that were not read yet
    keep: bool = False  # more of it may be asked for soon
    guess: bool = False  # nobody has asked for it yet
    urgent: bool = False  # somebody waits for it: it stays until it was read
    used: float = 0.0

    @property
    def size(self) -> int:
        return self.stop - self.start


class Fetcher:
    """Connections that fetch ranges of any number of objects, within one budget of bytes."""

    def __init__(self, memory: int | None = None, connections: int = CONNECTIONS) -> None:
        self.memory = memory or max(LEAST, _machine_memory() // 8)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.over = False  # nothing is fetched ahead any more
        self._connections = connections
        self._queue: deque[_Chunk] = deque()
        self._held: set[_Chunk] = set()  # going or here: what counts
        self._bytes = 0
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._buffers: list[bytearray] = []  # of ranges that are gone: fresh memory costs more than the bytes' way here

    def enqueue(self, chunks: Sequence[_Chunk], *, first: bool = False) -> None:
        """Have ranges fetched; with the lock held."""
        if first:
            self._queue.extendleft(reversed(chunks))
        else:
            self._queue.extend(chunks)
        while self._idle < len(self._queue) and len(self._threads) < self._connections:
            thread = threading.Thread(target=self._work, name="penstock fetch", daemon=True)
            self._threads.add(thread)
            self._idle += 1
            thread.start()
        self.changed.notify_all()

    def drop(self, chunk: _Chunk) -> None:
        """Forget a range; with the lock held."""
        chunk.owner.forget(chunk)
        if chunk in self._held:
            self._held.discard(chunk)
            self._bytes -= chunk.size
            self.changed.notify_all()
        view, chunk.view = chunk.view, None
        if view is not None and len(self._buffers) < self._connections and not self.over:
            buffer = view.obj
            if isinstance(buffer, bytearray) and len(buffer) == CHUNK:
                self._buffers.append(buffer)

    def buffer(self, size: int) -> memoryview:
        """Room for a range."""
        if 2 * size <= CHUNK or size > CHUNK:
            return memoryview(bytearray(size))
        with self.lock:
            kept = self._buffers.pop() if self._buffers else None
        return memoryview(bytearray(CHUNK) if kept is None else kept)[:size]

    def rest(self) -> None:
        """Fetch nothing any more but what somebody waits for."""
        with self.changed:
            self.over = True
            self._buffers.clear()
            for chunk in list(self._queue):
                if not chunk.urgent:
                    self.drop(chunk)
            self._queue = deque(chunk for chunk in self._queue if chunk.urgent)
            for chunk in [chunk for chunk in self._held if chunk.state == _HERE]:
                self.drop(chunk)
            threads = list(self._threads)
            self.changed.notify_all()
        until = time.monotonic() + 0.5
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        here = threading.current_thread()
        while (chunk := self._next(here)) is not None:
            self._fetch(chunk)
            with self.changed:
                self._idle += 1
                self.changed.notify_all()
            del chunk

    def _next(self, here: threading.Thread) -> _Chunk | None:
        """Wait for a range to fetch; ``None``: there was nothing to do for a while."""
        until = time.monotonic() + IDLE_S
        with self.changed:
            while True:
                chunk = self._fitting()
                if chunk is not None:
                    self._idle -= 1
                    return chunk
                left = 0.0 if self.over else until - time.monotonic()
                if left <= 0 and not self._queue:
                    self._idle -= 1
                    self._threads.discard(here)
                    return None
                self.changed.wait(max(left, 0.05))

    def _fitting(self) -> _Chunk | None:
        """The next range that may be fetched now."""
        while self._queue and self._queue[0].state != _QUEUED:
            self._queue.popleft()
        if not self._queue:
            return None
        urgent = next((chunk for chunk in self._queue if chunk.urgent), None)
        chunk = urgent or self._queue[0]
        if not self._make_room(chunk) and urgent is None and self._bytes:
            return None
        self._queue.remove(chunk)
        chunk.state = _GOING
        self._held.add(chunk)
        self._bytes += chunk.size
        return chunk

    def _make_room(self, chunk: _Chunk) -> bool:
        """Let go of what was read, oldest first; for something urgent, of anything."""
        memory = self.memory if chunk.keep else min(self.memory, FRONT)
        if self._bytes + chunk.size <= memory:
            return True
        here = [one for one in self._held if one.state == _HERE and not one.urgent]
        here.sort(key=lambda one: (one.unread > 0, one.used))
        for one in here:
            if one.unread > 0 and not chunk.urgent:
                break
            self.drop(one)
            if self._bytes + chunk.size <= memory:
                return True
        return False

    def _fetch(self, chunk: _Chunk) -> None:
        try:
            with while_wanted(lambda: chunk.urgent or not self.over):
                chunk.view = chunk.owner.fetched(chunk.start, chunk.stop)
            state = _HERE
        except Exception as exc:  # it belongs to whoever reads the range
            chunk.error, state = exc, _FAILED
        with self.changed:
            chunk.state, chunk.used = state, time.monotonic()
            if state == _FAILED:
                self._held.discard(chunk)
                self._bytes -= chunk.size
                if not chunk.urgent:  # a guess, or something that will be asked for again
                    chunk.owner.forget(chunk)
            self.changed.notify_all()


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * LEAST


@dataclass(slots=True, eq=False)
class PrefetchedBytes:
    """The bytes of one remote object; a slice of it waits until it is there.

    Attributes:
        url: What it is called in errors.
        info: Its size and tag.
        grid: Checksums of every MiB, where they are known.
    """

    fetcher: Fetcher
    storage: Storage
    place: str  # the URL with all it takes to read it
    url: str
    info: Info
    grid: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    _chunks: list[_Chunk] = field(default_factory=list)  # by start; they do not overlap
    _end: int = 0  # of what was wanted last: who goes on there will go on
    _last: _Chunk | None = None  # read last: the next read is likely to be there

    def __len__(self) -> int:
        return self.info.size or 0

    def want(self, starts: I64, stops: I64, *, ascending: bool) -> None:
        """Say which ranges will be read; ``ascending``: once each, front to back."""
        some = stops > starts
        starts, stops = starts[some], stops[some]
        if not len(starts):
            return
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        reach = np.maximum.accumulate(stops)
        dense = 4 * int((stops - starts).sum()) > int(reach[-1] - starts[0])  # what lies between will be read too
        cuts = np.flatnonzero(starts[1:] > reach[:-1] + (CHUNK if dense else GAP)) + 1
        runs = zip(
            starts[np.concatenate([[0], cuts])].tolist(), reach[np.append(cuts, len(reach)) - 1].tolist(), strict=True
        )
        with self.fetcher.lock:
            if self.fetcher.over or not wanted():
                return
            fresh: list[_Chunk] = []
            for start, stop in runs:
                fresh += self._cover(start, stop)
            self._note(starts, stops, keep=not ascending)
            first, last = int(starts[0]), int(stops[-1])
            if abs(first - self._end) <= GAP:
                follows = min(len(self), last + min(AHEAD, max(CHUNK, last - first)))
                guesses = self._cover(last, follows) if last < follows else []
                for chunk in guesses:
                    chunk.guess = chunk.unread == 0
                fresh += guesses
            self._end = last
            self.fetcher.enqueue(fresh)

    def _cover(self, start: int, stop: int) -> list[_Chunk]:
        """Chunks for what is not on its way yet of a range."""
        if len(self.grid):  # only whole cells can be verified
            start, stop = start // CELL * CELL, -(-stop // CELL) * CELL
        stop = min(stop, len(self))
        fresh: list[_Chunk] = []
        at = start
        for known in self._between(start, stop):
            fresh += self._pieces(at, known.start)
            at = max(at, known.stop)
        fresh += self._pieces(at, stop)
        for chunk in fresh:
            insort(self._chunks, chunk, key=lambda one: one.start)
        return fresh

    def _pieces(self, start: int, stop: int) -> list[_Chunk]:
        return [_Chunk(self, at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]

    def _between(self, start: int, stop: int) -> list[_Chunk]:
        """The chunks that hold a part of a range."""
        low = bisect_right(self._chunks, start, key=lambda one: one.start)
        low -= low > 0 and self._chunks[low - 1].stop > start
        high = low
        while high < len(self._chunks) and self._chunks[high].start < stop:
            high += 1
        return self._chunks[low:high]

    def _note(self, starts: I64, stops: I64, *, keep: bool) -> None:
        """Add to every chunk how much of it is wanted."""
        edges = np.array([chunk.start for chunk in self._chunks], np.int64)
        first, last = (np.searchsorted(edges, at, "right") - 1 for at in (starts, stops - 1))
        inside = first == last
        many = np.bincount(first[inside], weights=(stops - starts)[inside], minlength=len(edges))
        for start, stop in zip(starts[~inside].tolist(), stops[~inside].tolist(), strict=True):
            for number, chunk in enumerate(self._between(start, stop), int(np.searchsorted(edges, start, "right")) - 1):
                many[number] += min(stop, chunk.stop) - max(start, chunk.start)
        for number in np.flatnonzero(many).tolist():
            chunk = self._chunks[number]
            chunk.unread += int(many[number])
            chunk.keep, chunk.guess = chunk.keep or keep, False

    def forget(self, chunk: _Chunk) -> None:
        """Hold a chunk no more; with the fetcher's lock held."""
        low = bisect_right(self._chunks, chunk.start, key=lambda one: one.start) - 1
        if 0 <= low < len(self._chunks) and self._chunks[low] is chunk:
            del self._chunks[low]

    def __getitem__(self, sel: slice) -> bytes:
        """Read a range, waiting for it.

        Raises:
            StorageError: it cannot be read, or the object has changed.
            DataError: what was read is not what was stored.
        """
        start, stop, _ = sel.indices(len(self))
        if start >= stop:
            return b""
        with self.fetcher.lock:
            chunk = self._last
            if chunk is not None and chunk.view is not None and chunk.start <= start and stop <= chunk.stop:
                chunk.unread -= stop - start
                return chunk.view[start - chunk.start : stop - chunk.start].tobytes()
            parts = [self._part(start, stop)]
            while (got := sum(map(len, parts))) < stop - start:
                parts.append(self._part(start + got, stop))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, start: int, stop: int) -> bytes:
        """The beginning of a range, as far as one chunk holds it."""
        while True:
            found = self._between(start, start + 1)
            if not wanted():
                raise StorageError("nobody waits for it any more", self.url)
            if not found:
                self.fetcher.enqueue(self._cover(start, stop), first=True)
                continue
            chunk = found[0]
            if chunk.state == _HERE:
                break
            chunk.urgent = True
            if chunk.state == _FAILED:
                self.forget(chunk)
                assert chunk.error is not None
                raise chunk.error
            self.fetcher.changed.notify_all()
            self.fetcher.changed.wait(1.0)
        assert chunk.view is not None
        part = chunk.view[start - chunk.start : min(stop, chunk.stop) - chunk.start].tobytes()
        self._last = chunk
        chunk.unread -= len(part)
        chunk.urgent = False
        chunk.used = time.monotonic()
        if not chunk.keep:
            self._let_go_before(chunk)
        return part

    def _let_go_before(self, chunk: _Chunk) -> None:
        """Drop what a reader that goes front to back has passed."""
        while self._chunks[0] is not chunk and self._chunks[0].state == _HERE and self._chunks[0].unread <= 0:
            self.fetcher.drop(self._chunks[0])

    def fetched(self, start: int, stop: int) -> memoryview:
        """Fetch a range now, verified where that can be; what is damaged is fetched once more.

        Raises:
            StorageError: it cannot be read.
            DataError: it is damaged again.
        """
        data = self.fetcher.buffer(stop - start)
        for _ in range(2):
            self.storage.read(self.place, start, stop, into=data, tag=self.info.tag)
            bad = first_damaged(self.grid, data, start, len(self))
            if bad is None:
                return data
            if (forget := getattr(self.storage, "forget", None)) is not None:
                forget(self.place)  # what a cache has kept is no better
            log.warning("%s: the bytes from %d on are not what was stored; fetched again", self.url, bad)
        raise DataError(f"the bytes from {bad:,} on are not those that were stored", self.url)

    def close(self) -> None:
        """Hold nothing any more."""
        with self.fetcher.lock:
            for chunk in list(self._chunks):
                if chunk.state != _GOING:
                    self.fetcher.drop(chunk)


def read_whole(storage: Storage, place: str, url: str, info: Info, fetcher: Fetcher) -> Any:
    """All bytes of an object, in order, fetched by many connections; or by one where ranges cannot be had."""
    if not info.ranges or info.size is None:
        yield from storage.stream(place)
        return
    arriving = PrefetchedBytes(fetcher, storage, place, url, info)
    try:
        if len(arriving):
            arriving.want(np.array([0]), np.array([len(arriving)]), ascending=True)
        for at in range(0, len(arriving), CHUNK):
            yield arriving[at : min(at + CHUNK, len(arriving))]
    finally:
        arriving.close()
