"""Shards without an index are located as they arrive, with the samples and losses of a local scan."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.blobs import prefetch
from penstock.blobs.prefetch import Fetcher, PrefetchedBytes
from penstock.blobs.remote_bytes import RemoteBytes, StreamedBytes
from penstock.errors import DataError
from penstock.formats.tar import unindexed
from penstock.formats.tar.index import Index
from penstock.formats.tar.scan import scan
from penstock.formats.tar.unindexed import UnindexedShard
from penstock.storage import Info

GATE = threading.Event()


class InMemory:
    """A storage of one object, which can hold back what follows an offset until GATE is set."""

    def __init__(self, data: bytes, held_from: int | None = None) -> None:
        self.data, self.held_from = data, held_from
        self.requests: list[tuple[int, int]] = []

    def read(self, url: str, start: int, stop: int, *, into: memoryview, tag: str | None = None) -> memoryview:
        if self.held_from is not None and stop > self.held_from:
            assert GATE.wait(30)
        self.requests.append((start, stop))
        into[:] = self.data[start:stop]
        return into


def archive(samples: int, size: int = 3000, format: int = tarfile.GNU_FORMAT, name: str = "{:06}") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for number in range(samples):
            for extension, data in (("jpg", bytes([number % 251]) * (size + number % 700)), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{name.format(number)}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def open_ranges(storage: Any, done: list[Index] | None = None) -> UnindexedShard:
    info = Info(len(storage.data), "tag", True)
    return open_shard(PrefetchedBytes(Fetcher(), storage, "x://a.tar", "x://a.tar", info), done)


def open_shard(content: RemoteBytes, done: list[Index] | None) -> UnindexedShard:
    def completed(index: Index) -> Index:
        (done if done is not None else []).append(index)
        return index

    return UnindexedShard("x://a.tar", content, completed)


def as_rows(index: Index) -> list[Any]:
    fields = [index.kinds[kind] for kind in index.kind]
    begins = [
        [(int(index.start[first + i]), int(index.size[first + i])) for i in range(len(names))]
        for first, names in zip(index.first.tolist(), fields, strict=True)
    ]
    return [index.keys(), fields, begins, index.bad, index.lost, index.content_size]


def mend(data: bytes, at: int, by: bytes) -> bytes:
    return data[:at] + by + data[at + len(by) :]


SHAPES: dict[str, Callable[[], bytes]] = {
    "ordinary": lambda: archive(400),
    "PAX and unicode": lambda: archive(300, format=tarfile.PAX_FORMAT, name="ü é/{:06}"),
    "long names": lambda: archive(200, name="a" * 90 + "/" + "b" * 60 + "{:06}"),
    "tiny": lambda: archive(3000, size=1),
    "members larger than a request": lambda: archive(8, size=700_000),
    "damaged header": lambda: mend(archive(400), 512 * 601, b"garbage" * 70),
    "truncated": lambda: archive(300)[:500_123],
    "empty": lambda: b"",
    "not an archive": lambda: b"<html>" * 1000,
    "concatenated": lambda: archive(20) + archive(20),
    "without an end marker": lambda: archive(100)[:-10240].rstrip(b"\0") + bytes(512),
}


@pytest.fixture(autouse=True)
def _threads_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "IDLE_S", 0.02)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_unindexed_shard_has_the_samples_and_losses_of_a_local_one(
    shape: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "CHUNK", 1 << 17)
    monkeypatch.setattr(prefetch, "_FIRST", 1 << 14)
    data, done = SHAPES[shape](), list[Index]()
    if streamed:
        chunks = (data[at : at + 9_999] for at in range(0, len(data), 9_999))
        shard = open_shard(StreamedBytes(chunks, "x"), done)
    else:
        shard = open_ranges(InMemory(data), done)
    known, whole = 0, False
    rows: list[Any] = []
    while not whole:
        before = known
        known, whole = shard.grow(before)
        assert whole or known > before
        for part, places in shard.parts(np.arange(before, known)) if known > before else ():
            kinds = [part.index.kinds[part.index.kind[row]] for row in range(part.index.samples)]
            assert len(places) <= len(kinds)
            rows += zip(part.index.keys(), kinds, strict=True)
    local = scan(data)
    assert as_rows(done[0]) == as_rows(local)
    assert rows == list(zip(local.keys(), [local.kinds[kind] for kind in local.kind], strict=True))
    assert shard.whole is not None


def test_the_first_sample_is_there_before_the_rest_has_arrived() -> None:
    GATE.clear()
    try:
        shard = open_ranges(InMemory(archive(1500), held_from=2 << 20))
        known, whole = shard.grow(0)
        assert 0 < known < 1500
        assert not whole
        part, places = next(shard.parts(np.array([known - 1])))
        start = int(part.index.start[part.index.first[known - 1 - part.base]])
        assert part.content.cut([start], [start + 5]) == [bytes([(known - 1) % 251]) * 5]
        assert places.tolist() == [0]
        assert shard.fields() == ("jpg", "cls")
    finally:
        GATE.set()
    assert shard.grow(1499)[0] == 1500
    assert shard.grow(9999) == (1500, True)
    with pytest.raises(IndexError, match="sample 1500 of 1500"):
        list(shard.parts(np.array([1500])))


def test_every_byte_is_requested_once() -> None:
    storage = InMemory(archive(6000))
    shard = open_ranges(storage)
    known, whole = 0, False
    while not whole:
        before = known
        known, whole = shard.grow(before)
        for part, places in shard.parts(np.arange(before, known)) if known > before else ():
            members = part.index.first[np.arange(before, known)[places] - part.base]
            part.content.cut(part.index.start[members].tolist(), (part.index.start + part.index.size)[members].tolist())
    assert sum(stop - start for start, stop in storage.requests) == len(storage.data)


def test_a_shard_that_never_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unindexed, "MAX_UNINDEXED", 100)
    with pytest.raises(DataError, match=r"more than 100 samples.*x://a\.tar"):
        open_ranges(InMemory(archive(400))).grow(399)


def test_an_archive_without_members_has_no_samples() -> None:
    assert open_ranges(InMemory(bytes(10_240))).grow(0) == (0, True)
