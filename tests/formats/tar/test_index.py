"""An index survives a round trip through its file, is rebuilt when the shard changes, and never points outside it."""

from __future__ import annotations

import base64
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.blobs.checksums import CELL
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError
from penstock.formats.tar import Index, TarWriter, load_index, scan
from penstock.formats.tar.index import INDEX_SUFFIX

# A file of version 1, without checksums: two samples, "a" with txt and "b" with cls and txt.
VERSION_1 = (
    "eJwLCA7x9owwMOxggIBqpezMvJRiJavoaKWSihKlWJ1opeScYiUdCC9WRykpMQUoC2Tk5BeXQFjF2ZkFBalAYQMdpeT8vJLUvJL4"
    "4syqVCUrEwNLM6B8SWJuAVApmGeqYwbSAhTJSQXaY6SjlJuam5RaBGQbA21JBVpjZVQLcgsjAwLA2UxQmg1Kc6EKM6IpQ9cPE09M"
    "clZfxwQAEeAvAw=="
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write(tmp_path / "a.tar", 9)


def write(path: Path, count: int) -> Path:
    with TarWriter(path) as writer:
        for number in range(count):
            key = f"d/{number}" if number % 2 else f"\u00fc\udcff{number}"
            writer.write({"__key__": key, "cls": b"1", **({"jpg": b"22"} if number % 3 else {})})
    Path(str(path) + INDEX_SUFFIX).unlink()
    return path


def content_of(index: Index) -> list[object]:
    """Return all attributes, for comparison."""
    arrays = [getattr(index, name).tolist() for name in ("kind", "first", "start", "size", "edges")]
    return [
        *arrays,
        index.text,
        index.kinds,
        index.bad,
        index.lost,
        index.skipped,
        index.content_size,
        index.stamp,
        index.checksums.tolist(),
    ]


def test_an_index_survives_a_round_trip(shard: Path) -> None:
    index = replace(load_index(str(shard)), skipped=3, stamp=Stamp(1, 2, 3)).expecting(12, "the manifest")
    again = Index.from_bytes(index.to_bytes())
    assert content_of(again) == content_of(index)
    assert again.keys() == index.keys()
    assert [again.key(n) for n in range(12)] == index.keys()
    assert again.keys(slice(2, 4)) == index.keys(np.array([2, 3])) == index.keys()[2:4]


def test_an_empty_index_survives_a_round_trip() -> None:
    index = scan.scan(bytes(1024))
    assert content_of(Index.from_bytes(index.to_bytes())) == content_of(index)


def test_any_damaged_byte_of_the_file_is_detected(shard: Path) -> None:
    data = load_index(str(shard)).to_bytes()
    for at in range(len(data)):
        with pytest.raises(DataError, match="index is"):
            Index.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for at in range(0, len(data), 7):
        with pytest.raises(DataError, match="index is"):
            Index.from_bytes(data[:at])


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("start", 3, 10**9),
        ("start", 0, -1),
        ("size", 3, 10**9),
        ("size", 3, -1),
        ("size", 3, 2**63 - 1),
        ("first", 2, 10**6),
        ("first", 2, 2**63 - 1),
        ("first", 0, -1),
        ("kind", 2, 50),
        ("kind", 2, -1),
        ("edges", 1, 10**6),
        ("edges", 0, 1),
        ("edges", -1, 3),
    ],
)
def test_an_index_that_points_outside_is_refused(shard: Path, name: str, place: int, value: int) -> None:
    index = load_index(str(shard))
    array = getattr(index, name).copy()
    array[place] = value
    forged = replace(index, **{name: array})
    with pytest.raises(DataError, match="points outside"):
        Index.from_bytes(forged.to_bytes())


def test_a_malformed_header_is_a_data_error() -> None:
    for head in (b"{}", b"[]", b"nonsense", b'{"samples":"x","members":1}', b'{"samples":-5,"members":-5}'):
        body = b"PSTKIX01" + len(head).to_bytes(8, "little") + head + bytes(-len(head) % 8)
        with pytest.raises(DataError, match="malformed"):
            Index.from_bytes(body + zlib.crc32(body).to_bytes(4, "little"))


def test_a_scan_is_cached_and_never_written_beside_a_foreign_shard(shard: Path) -> None:
    before = sorted(shard.parent.iterdir())
    index = load_index(str(shard))
    assert sorted(shard.parent.iterdir()) == sorted([*before, shard.parent / "cache"])
    cached = list((shard.parent / "cache" / "index").iterdir())
    assert len(cached) == 1
    assert content_of(Index.from_bytes(cached[0].read_bytes())) == content_of(index)


def test_a_cached_index_is_used(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_index(str(shard))
    monkeypatch.setattr(scan, "scan", lambda *_: pytest.fail("scanned again"))
    assert content_of(load_index(str(shard))) == content_of(first)


def test_a_shard_that_changed_is_scanned_again(shard: Path) -> None:
    assert load_index(str(shard)).samples == 9
    time.sleep(0.01)
    write(shard, 4)
    assert load_index(str(shard)).samples == 4


def test_a_shard_replaced_by_one_of_the_same_size_and_time_is_scanned_again(shard: Path) -> None:
    load_index(str(shard))
    status = shard.stat()
    other = shard.with_name("other.tar")
    other.write_bytes(shard.read_bytes().replace(b"d/1", b"d/x"))
    data = bytearray(other.read_bytes())
    for at in range(0, len(data), 512):
        head = data[at : at + 512]
        if head[257:262] == b"ustar":
            head[148:156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(head)
    other.write_bytes(data)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(shard)
    keys = load_index(str(shard)).keys()
    assert "d/x" in keys


def test_a_damaged_cached_index_is_rebuilt(shard: Path) -> None:
    index = load_index(str(shard))
    cached = next((shard.parent / "cache" / "index").iterdir())
    cached.write_bytes(b"PSTKIX01 nonsense")
    assert content_of(load_index(str(shard))) == content_of(index)
    assert content_of(Index.from_bytes(cached.read_bytes())) == content_of(index)


def test_a_cache_that_cannot_be_written_is_not_an_error(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = shard.with_name("file")
    blocked.write_text("not a folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(blocked))
    assert load_index(str(shard)).samples == 9


def test_a_damaged_index_beside_a_shard_is_not_used(shard: Path) -> None:
    Path(str(shard) + INDEX_SUFFIX).write_bytes(b"PSTKIX01")
    assert load_index(str(shard)).samples == 9


def test_an_index_beside_a_shard_that_has_grown_is_out_of_date(shard: Path) -> None:
    small = load_index(str(write(shard.with_name("small.tar"), 4)))
    Path(str(shard) + INDEX_SUFFIX).write_bytes(small.to_bytes())
    index = load_index(str(shard))
    assert (index.samples, index.bad) == (9, {})


def test_an_index_of_version_1_is_read_without_checksums() -> None:
    index = Index.from_bytes(zlib.decompress(base64.b64decode(VERSION_1)))
    assert index.keys() == ["a", "b"]
    assert index.kinds == [("txt",), ("cls", "txt")]
    assert (index.stamp, index.checksums.tolist()) == (Stamp(4096, 5, 6), [])
    again = Index.from_bytes(index.to_bytes())
    assert content_of(again) == content_of(index)


def test_checksums_survive_a_round_trip(shard: Path) -> None:
    index = load_index(str(shard)).stamped(Stamp(2 * CELL + 1), np.array([1, 2**32 - 1, 3], np.uint32))
    assert content_of(Index.from_bytes(index.to_bytes())) == content_of(index)


def test_a_wrong_number_of_checksums_is_refused(shard: Path) -> None:
    index = load_index(str(shard)).stamped(Stamp(2 * CELL), np.array([1, 2, 3], np.uint32))
    with pytest.raises(DataError, match="points outside"):
        Index.from_bytes(index.to_bytes())
