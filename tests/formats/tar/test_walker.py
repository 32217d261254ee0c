"""A stream yields what a file yields, as it arrives and in bounded memory."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from penstock.formats.tar import ShardWriter, TarWriter, iter_samples
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan
from penstock.plan import EVERYTHING, Fields

ROWS = [{"__key__": f"k{n}", "cls": b"%d" % n, "jpg": bytes([n]) * 3000 * n} for n in range(20)]


def archive(compress: str | None = None) -> bytes:
    target = io.BytesIO()
    with TarWriter(target, compress=compress) as writer:
        for row in ROWS:
            writer.write(row)
    return target.getvalue()


class Trickle(io.RawIOBase):
    """A pipe that returns a few bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._data, self._step, self.consumed = data, step, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self.consumed : self.consumed + min(self._step, len(buffer))]
        buffer[: len(piece)] = piece
        self.consumed += len(piece)
        return len(piece)


@pytest.mark.parametrize("compress", [None, "gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("step", [1009, 70_000])
def test_a_slow_pipe_yields_all_samples(compress: str | None, step: int) -> None:
    stream = cast(BinaryIO, Trickle(archive(compress), step))
    found = list(iter_samples(stream, "-", EVERYTHING))
    assert found == [({**row, "__url__": "-"}, None) for row in ROWS]
    assert list(found[0][0] or {}) == ["__key__", "__url__", "cls", "jpg"]


@pytest.mark.parametrize("step", [512, 701, 5000, 1 << 20])
def test_spans_hold_their_bytes_however_the_stream_is_cut(step: int) -> None:
    """Headers of times, which tarfile and WebDataset write before each member, are stepped over; long names are not."""
    target = io.BytesIO()
    members = [(f"k{n % 7 * 'long/' * 9}{n:03d}.{field}", bytes([n]) * (n * 37)) for n in range(60) for field in "abc"]
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5
            tar.addfile(member, io.BytesIO(data))
    data = target.getvalue()
    buffer = ArchiveBuffer(b"", (data[at : at + step] for at in range(0, len(data), step)))
    found = []
    for run in ArchiveWalker[MemberSpan]("-", buffer).runs():
        assert isinstance(run, tuple)
        keys, fields, spans = run
        names = [f"{key}.{field}" for key in keys for field in fields]
        found += [(name, buffer.data[s[1] - buffer.base :][: s[2]]) for name, s in zip(names, spans, strict=True)]
        assert all(data[span[0] + 156] == ord("x") for span in spans)  # a member begins with its first header
    assert found == members


def test_a_sample_with_many_members_is_not_copied_for_each_of_them() -> None:
    target = io.BytesIO()
    with TarWriter(target) as writer:
        writer.write({"__key__": "k", **{f"f{n:04d}": bytes(500) for n in range(2000)}})
    data, joined = target.getvalue(), []

    class Counting(ArchiveBuffer):
        def _join_next(self, keep: int, stop: int) -> None:
            super()._join_next(keep, stop)
            joined.append(self.size)

    buffer = Counting(b"", (data[at : at + (64 << 10)] for at in range(0, len(data), 64 << 10)))
    assert sum(len(run[0]) for run in ArchiveWalker[MemberSpan]("-", buffer).runs() if isinstance(run, tuple)) == 1
    assert sum(joined) < 30 * len(data)


def test_samples_are_yielded_before_the_stream_ends() -> None:
    read, write = os.pipe()
    data = archive()
    with open(read, "rb") as source:
        feeder = threading.Thread(target=os.write, args=(write, data[:4096]))
        feeder.start()
        stream: Iterator[Any] = iter_samples(source, "-", EVERYTHING)
        assert next(stream)[0]["__key__"] == "k0"
        feeder.join()
        os.close(write)
        assert "truncated" in str([error for _, error in stream][-1])


def test_memory_is_bounded_by_one_sample() -> None:
    trickle = Trickle(archive(), 4096)
    stream = iter_samples(cast(BinaryIO, trickle), "-", EVERYTHING)
    next(stream)
    assert trickle.consumed <= 300_000


def test_an_endless_stream_that_is_no_archive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"y\n" * (size // 2)

    monkeypatch.setattr("penstock.formats.tar.walker._MAX_LEADING", 2 << 20)
    [(sample, error)] = iter_samples(cast(BinaryIO, Endless()), "-", EVERYTHING)
    assert sample is None
    assert "not a tar archive" in str(error)
    damaged = b"y" * 512 + archive()[512:]
    rows = list(iter_samples(cast(BinaryIO, io.BytesIO(damaged)), "-", EVERYTHING))
    assert [row["__key__"] for row, _ in rows if row is not None] == [f"k{n}" for n in range(1, 20)]


def test_unwanted_fields_are_dropped() -> None:
    found = [row for row, _ in iter_samples(io.BytesIO(archive()), "-", Fields(frozenset({"cls"}), meta=False))]
    assert found == [{"cls": row["cls"]} for row in ROWS]


def test_a_member_too_large_for_memory_is_refused_and_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.formats.tar.walker.MAX_MEMBER", 50_000)
    found = list(iter_samples(io.BytesIO(archive()), "-", EVERYTHING))
    assert [n for n, (row, _) in enumerate(found) if row is None] == [17, 18, 19]
    assert "more than 50000 bytes" in str(found[17][1])
    assert found[17][1] is not None
    assert found[17][1].key == "k17"


def test_standard_input_of_a_process_is_read(tmp_path: Path, warm_python: str) -> None:
    with ShardWriter(tmp_path / "a.tar.gz") as writer:
        for row in ROWS:
            writer.write(row)
    program = (
        "import sys\nfrom penstock.formats.tar import iter_samples\n"
        "class All:\n    def wants(self, name): return True\n"
        "sys.stdout.write(' '.join(row['__key__'] for row, _ in iter_samples(sys.stdin.buffer, '-', All())))"
    )
    with open(tmp_path / "a.tar.gz", "rb") as file:
        done = subprocess.run([warm_python, "-c", program], stdin=file, capture_output=True, check=True, text=True)
    assert done.stdout.split() == [row["__key__"] for row in ROWS]
