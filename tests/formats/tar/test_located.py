"""Located samples are read without their reader, and damage to one does not take the others along."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.blobs.content import Content, MappedFile
from penstock.errors import DataError, StorageError
from penstock.formats.tar import LocatedTar, TarReader, TarWriter
from penstock.formats.tar.located import OpenShard
from penstock.formats.tar.scan import open_shard
from penstock.plan import EVERYTHING


def write(path: Path, widths: list[int], size: int = 3) -> str:
    """Write one sample per width, with as many fields."""
    with TarWriter(path) as writer:
        for number, width in enumerate(widths):
            writer.write(
                {"__key__": f"k{number}", **{f"f{field}": bytes([number, field]) * size for field in range(width)}}
            )
    return str(path)


def locate(path: str, count: int) -> LocatedTar:
    return TarReader([path], ["a"], [path]).locate(np.zeros(count, np.int64), np.arange(count), EVERYTHING)


@pytest.mark.parametrize("width", range(1, 7))
def test_samples_of_every_width_are_read(width: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [width] * 3)
    found, errors = locate(path, 3).read()
    fields = [{f"f{field}": bytes([number, field]) * 3 for field in range(width)} for number in range(3)]
    assert found == [{"__key__": f"k{number}", "__url__": path, **fields[number]} for number in range(3)]
    assert errors == {}


def test_samples_of_different_fields_keep_their_order(tmp_path: Path) -> None:
    located = locate(write(tmp_path / "a.tar", [1, 3, 1, 2]), 4)
    found, _ = located.take(np.array([3, 1, 0])).read()
    assert [len(sample or {}) - 2 for sample in found] == [2, 3, 1]
    assert len(located) == 4
    assert located.nbytes.tolist() == [6, 18, 6, 12]


class DamagedBytes:
    """Bytes that cannot be read at one offset, as those of a remote shard that arrived damaged."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset = data, offset

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, span: slice) -> bytes:
        if span.start <= self._offset < span.stop:
            raise DataError("damaged", "a")
        return self._data[span]


def test_damaged_bytes_are_an_error_of_their_sample_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [2] * 5)
    located = locate(path, 5)
    (shard,) = located._shards
    damaged: Any = DamagedBytes(Path(path).read_bytes(), int(shard.index.start[6]))
    shard.content = Content(damaged)
    found, errors = located.read()
    assert [sample and sample["__key__"] for sample in found] == ["k0", "k1", "k2", None, "k4"]
    assert list(errors) == [3]
    assert errors[3].problem == "damaged"


@pytest.mark.parametrize("order", ["in order", "reversed"])
def test_samples_are_cut_out_of_one_copy_where_they_are_close_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    path = write(tmp_path / "a.tar", [3] * 20, size=10_000)
    rows = np.arange(20)[:: 1 if order == "in order" else -1]
    located = locate(path, 20).take(rows)
    copied: list[int] = []
    copy = MappedFile.copied

    def record(content: MappedFile, start: int, stop: int) -> mmap.mmap | None:
        copied.append(stop - start)
        return copy(content, start, stop)

    monkeypatch.setattr(MappedFile, "copied", record)
    found = located.read()
    assert len(copied) == 1
    few = located.take(np.array([0, 19]))
    assert [sample and sample["__key__"] for sample in few.read()[0]] == [f"k{rows[0]}", f"k{rows[-1]}"]
    assert len(copied) == 1, "only a little of the part between them is wanted"
    monkeypatch.setattr(MappedFile, "copied", lambda *_: None)
    assert located.read() == found


def test_a_shard_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    located = locate(write(tmp_path / "a.tar", [3] * 20, size=10_000), 20)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(MappedFile, "copied", fail)
    with pytest.raises(StorageError, match=r"cannot read the shard: Input/output error \(url: .*a\.tar\)"):
        located.read()


def test_released_pages_can_still_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [1] * 4, size=500_000)
    index, content = open_shard(path)
    assert content is not None
    shard = OpenShard("a", index, content)
    shard.release(mmap.PAGESIZE)
    assert shard.released == 0, "fewer bytes than are worth a call"
    shard.release()
    assert shard.released == len(content.bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    assert content.bytes[int(index.start[0]) : int(index.start[0]) + 3] == b"\0\0\0"
