"""Damaged, hostile and odd archives: good samples are read, losses have a place, and nothing hangs."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import DataError, StorageError
from penstock.formats.tar import TarReader, iter_samples, load_index
from penstock.formats.tar.index import write_beside
from penstock.formats.tar.scan import scan
from penstock.plan import EVERYTHING
from penstock.tarstream.raw import RawSample, open_raw

KEYS = [f"d/{number:03d}" for number in range(6)]
SAMPLE = 3 * (512 + 512)  # bytes of one sample with three small fields


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def member(name: str | bytes, data: bytes = b"data", kind: bytes = b"0", size: bytes | None = None) -> bytes:
    """Return one member: a plain header and padded data; ``size`` replaces the size field."""
    raw = name.encode() if isinstance(name, str) else name
    front = (
        raw.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + (size or b"%011o\0" % len(data)) + b"00000000000\0"
    )
    back = kind + bytes(100) + b"ustar\00000" + bytes(64 + 16 + 155 + 12)
    return front + b"%06o\0 " % (sum(front + back) + 256) + back + data + bytes(-len(data) % 512)


def pax(records: dict[str, str | bytes], kind: bytes = b"x") -> bytes:
    body = b""
    for name, value in records.items():
        raw = value.encode() if isinstance(value, str) else value
        length = len(name) + len(raw) + 3
        total = next(n for n in range(length, length + 20) if n == length + len(str(n)))
        body += b"%d %b=%b\n" % (total, name.encode(), raw)
    return member("././@PaxHeader", body, kind)


def sample(key: str) -> bytes:
    return b"".join(member(f"{key}.{field}", f"{key}{field}".encode()) for field in ("cls", "jpg", "json"))


END = bytes(1024)
GOOD = b"".join(map(sample, KEYS)) + END


def flipped(at: int, data: bytes = GOOD) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def between(extra: bytes) -> bytes:
    """Return the six samples, with ``extra`` after the third."""
    return GOOD[: 3 * SAMPLE] + extra + GOOD[3 * SAMPLE :]


def from_file(path: Path) -> tuple[list[str], list[tuple[int, DataError]]]:
    reader = TarReader([str(path)], [path.name], [str(path)], None)
    count = reader.count(0)
    found, errors = reader.locate(np.zeros(count, np.int64), np.arange(count), EVERYTHING).read()
    good = [row for row in found if row is not None]
    for row in good:
        fields = {name: value for name, value in row.items() if not name.startswith("__")}
        if row["__key__"] in KEYS:
            assert fields == {name: f"{row['__key__']}{name}".encode() for name in ("cls", "jpg", "json")}
    assert len(good) + len(errors) == count == len(found)
    return [row["__key__"] for row in good], sorted(errors.items(), key=lambda item: item[0])


def from_stream(data: bytes, url: str) -> tuple[list[str], list[tuple[int, DataError]]]:
    rows = list(iter_samples(io.BytesIO(data), url, EVERYTHING))
    good = [row["__key__"] for row, _ in rows if row is not None]
    return good, [(place, error) for place, (_, error) in enumerate(rows) if error is not None]


@dataclass(frozen=True)
class Case:
    """A bad archive: the keys that can be read, and the position of each loss and a part of its message."""

    data: bytes | Callable[[], bytes]
    good: list[str]
    losses: list[tuple[int, str]]
    key: str | None = None


def _gzip_bomb() -> bytes:
    bomb = zlib.compressobj(9, wbits=31)
    head = sample("a") + member("bomb.bin", b"", size=b"%011o\0" % (80 << 20))
    return b"".join([bomb.compress(head), *(bomb.compress(bytes(1 << 20)) for _ in range(80)), bomb.flush()])


LAST = KEYS[-1]
CASES = {
    "empty file": Case(b"", [], [(0, "empty")]),
    "one byte": Case(b"x", [], [(0, "inside a header at offset 1")]),
    "not a tar": Case(b"<html>not found</html>" * 100, [], [(0, "offset 0: not a tar archive?")]),
    "cut inside the first header": Case(GOOD[:300], [], [(0, "inside a header at offset 300")]),
    "cut inside a later header": Case(GOOD[: 3 * SAMPLE + 100], KEYS[:3], [(3, "inside a header")], KEYS[2]),
    "cut between header and data": Case(
        GOOD[: 3 * SAMPLE + 512], KEYS[:3], [(3, "declares 8 bytes, 0 are left")], KEYS[2]
    ),
    "cut inside data": Case(GOOD[: 3 * SAMPLE + 515], KEYS[:3], [(3, "declares 8 bytes, 3 are left")], KEYS[2]),
    "cut inside padding": Case(GOOD[: 3 * SAMPLE - 100], KEYS[:3], [(3, "without an end marker")], KEYS[2]),
    "cut between samples": Case(GOOD[: 3 * SAMPLE], KEYS[:3], [(3, "without an end marker at offset 9216")], KEYS[2]),
    "cut between members of a sample": Case(
        GOOD[: 3 * SAMPLE + 1024], KEYS[:3], [(3, "without an end marker")], KEYS[2]
    ),
    "no end marker": Case(GOOD[:-1024], KEYS, [(6, "without an end marker")], LAST),
    "cut inside the end marker": Case(GOOD[:-1000], KEYS, [(6, "inside a header")], LAST),
    "bit flip in a first name": Case(
        flipped(3 * SAMPLE + 2), KEYS[:3] + KEYS[4:], [(3, "damaged header at offset 9216")], KEYS[2]
    ),
    "bit flip in a last name": Case(
        flipped(4 * SAMPLE - 1022), KEYS[:3] + KEYS[4:], [(3, "damaged header at offset 11264")], KEYS[2]
    ),
    "bit flip in a size": Case(
        flipped(3 * SAMPLE + 1024 + 130),
        KEYS[:3] + KEYS[4:],
        [(3, "damaged header at offset 10240")],
        KEYS[2],
    ),
    "bit flip in a checksum": Case(
        flipped(3 * SAMPLE + 150), KEYS[:3] + KEYS[4:], [(3, "damaged header at offset 9216")], KEYS[2]
    ),
    "bit flip in a type": Case(flipped(3 * SAMPLE + 156), KEYS[:3] + KEYS[4:], [(3, "damaged header")], KEYS[2]),
    "bit flip in the very first header": Case(flipped(5), KEYS[1:], [(0, "damaged header at offset 0")]),
    "bit flip in the very last header": Case(flipped(6 * SAMPLE - 1020), KEYS[:5], [(5, "damaged header")], KEYS[4]),
    "two samples damaged": Case(
        flipped(4 * SAMPLE + 10, flipped(2 * SAMPLE + 10)),
        [*KEYS[:2], KEYS[3], KEYS[5]],
        [(2, "offset 6144"), (4, "offset 12288")],
    ),
    "a hole of zeros": Case(
        GOOD[:SAMPLE] + bytes(SAMPLE) + GOOD[2 * SAMPLE :],
        KEYS[:1],
        [(1, "follow the end marker")],
        KEYS[0],
    ),
    "noise over two samples": Case(
        GOOD[: 2 * SAMPLE] + bytes(range(256)) * 24 + GOOD[4 * SAMPLE :],
        KEYS[:2] + KEYS[4:],
        [(2, "offset 6144")],
        KEYS[1],
    ),
    "concatenated archives": Case(
        GOOD + b"".join(map(sample, ["x", "y"])) + END, KEYS, [(6, "concatenated archives")], LAST
    ),
    "bytes after the end": Case(GOOD + bytes(9000) + b"!", KEYS, [(6, "follow the end marker")], LAST),
    "a size that is not a number": Case(
        between(member("bad.jpg", b"", size=b"00000x00000\0")), KEYS, [(3, "its size is not a number")], KEYS[2]
    ),
    "a negative size": Case(
        between(member("bad.jpg", b"", size=b"-0000000010\0")), KEYS, [(3, "its size is not a number")], KEYS[2]
    ),
    "a negative base-256 size": Case(
        between(member("bad.jpg", b"", size=b"\xff" * 12)), KEYS, [(3, "its size is not a number")], KEYS[2]
    ),
    "an overflowing base-256 size": Case(
        between(member("bad.jpg", b"", size=b"\x80" + b"\xff" * 11)),
        KEYS[:3],
        [(3, "declares 309485009821345068724781055")],
        KEYS[2],
    ),
    "a member that declares 1 TB": Case(
        between(member("bad.jpg", b"", size=b"\x80" + (10**12).to_bytes(11, "big"))),
        KEYS[:3],
        [(3, "declares 1000000000000 bytes")],
        KEYS[2],
    ),
    "a member that declares 8 GB": Case(
        between(member("bad.jpg", b"", size=b"77777777777\0")), KEYS[:3], [(3, "8589934591")], KEYS[2]
    ),
    "a PAX size beyond the end": Case(
        between(pax({"size": "999999999999"}) + member("bad.jpg")),
        KEYS[:3],
        [(3, "declares 999999999999")],
        KEYS[2],
    ),
    "a PAX size that is not a number": Case(
        between(pax({"size": "-5"}) + member("bad.jpg")), KEYS, [(3, "malformed PAX size")], KEYS[2]
    ),
    "a PAX size of many digits": Case(
        between(pax({"size": "9" * 5000}) + member("bad.jpg")), KEYS, [(3, "malformed PAX size")], KEYS[2]
    ),
    "a PAX record with a wrong length": Case(
        between(member("x", b"99 path=a.jpg\n", b"x")), KEYS, [(3, "malformed PAX record")], KEYS[2]
    ),
    "a PAX record without a length": Case(
        between(member("x", b"path=a.jpg\n", b"x")), KEYS, [(3, "malformed PAX record")], KEYS[2]
    ),
    "a PAX record of length zero": Case(
        between(member("x", b"0 path=a\n", b"x")), KEYS, [(3, "malformed PAX record")], KEYS[2]
    ),
    "a PAX header of 2 MB": Case(
        between(member("x", bytes(2 << 20), b"x")), KEYS, [(3, "an extension header declares 2097152 bytes")], KEYS[2]
    ),
    "a long name of 2 MB": Case(
        between(member("x", b"a" * (2 << 20), b"L")), KEYS, [(3, "an extension header declares 2097152 bytes")], KEYS[2]
    ),
    "a PAX header without its member": Case(
        GOOD[:-1024] + pax({"path": "x.jpg"}) + END, KEYS, [(6, "has no member")], LAST
    ),
    "a PAX path with a NUL": Case(between(pax({"path": b"a\0b.jpg"}) + member("x")), KEYS, [(3, "NUL")], "a\0b"),
    "a duplicate field": Case(
        between(member("d/dup.jpg") + member("d/dup.jpg")),
        KEYS,
        [(3, "the field 'jpg' appears twice")],
        "d/dup",
    ),
    "a duplicate field in other case": Case(
        between(member("d/dup.jpg") + member("d/dup.JPG")), KEYS, [(3, "appears twice")], "d/dup"
    ),
    "a key that appears again": Case(between(sample(KEYS[0])), KEYS, [(3, "the key appears again")], KEYS[0]),
    "a key that appears again with another field": Case(
        between(member("d/001.txt")), KEYS, [(3, "the key appears again")], KEYS[1]
    ),
    "an absolute path": Case(between(member("/etc/pass.jpg")), KEYS, [(3, "absolute paths are refused")], "/etc/pass"),
    "a path with ..": Case(between(member("../../up.jpg")), KEYS, [(3, "'..' are refused")], "../../up"),
    "a path with .. inside": Case(between(member("a/../../up.jpg")), KEYS, [(3, "'..' are refused")], "a/../../up"),
    "a hidden absolute path": Case(
        between(member(".//etc/x.jpg") + member("/etc/y.jpg")),
        [*KEYS[:3], "etc/x", *KEYS[3:]],
        [(4, "absolute")],
        "/etc/y",
    ),
    "a reserved field": Case(between(member("d/r.__key__")), KEYS, [(3, "'__key__' is reserved")], "d/r"),
    "an old GNU sparse member": Case(
        between(member("d/sparse.bin", b"x" * 700, b"S")), KEYS, [(3, "sparse members")], "d/sparse"
    ),
    "a PAX sparse member": Case(
        between(pax({"GNU.sparse.major": "1", "GNU.sparse.name": "x"}) + member("d/sparse.bin")),
        KEYS,
        [(3, "sparse members")],
        "d/sparse",
    ),
    "a multi-volume member": Case(
        between(member("d/volume.bin", b"rest", b"M")), KEYS, [(3, "multi-volume")], "d/volume"
    ),
    "a gzip bomb": Case(_gzip_bomb, [], [(0, "more than 1000 times its size")]),
    "a truncated gzip": Case(
        lambda: gzip.compress(GOOD[:-1024] + member("d/big.jpg", os.urandom(9000)) + END)[:-5000],
        KEYS,
        [(6, "gz stream is damaged")],
        LAST,
    ),
    "a damaged bzip2": Case(lambda: bz2.compress(GOOD)[:-9] + bytes(9), [], [(0, "bz2 stream is damaged")]),
    "a gzip with a wrong checksum": Case(
        lambda: gzip.compress(GOOD)[:-8] + bytes(8), KEYS, [(6, "gz stream is damaged")], LAST
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_archive_yields_its_good_samples_and_a_clear_error(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    data = case.data() if callable(case.data) else case.data
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    good, losses = from_file(path)
    assert good == case.good
    assert [place for place, _ in losses] == [place for place, _ in case.losses]
    for (_, error), (_, words) in zip(losses, case.losses, strict=True):
        assert type(error) is DataError
        assert words in str(error)
        assert str(path) in str(error)
        assert error.shard == str(path)
    if case.key is not None:
        assert losses[0][1].key == case.key
    if case.good[: losses[0][0]] and "last good key" in str(losses[0][1]):
        assert f"last good key: {case.good[losses[0][0] - 1]!r}" in str(losses[0][1])


@pytest.mark.parametrize("name", CASES)
def test_a_bad_archive_yields_the_same_from_a_stream(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    data = case.data() if callable(case.data) else case.data
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    good, losses = from_file(path)
    streamed, streamed_losses = from_stream(data, str(path))
    if "bomb" in name:  # a stream yields samples before the bomb is detected
        assert "1000 times" in str(streamed_losses[-1][1])
        return
    assert streamed == good
    assert [(place, str(error)) for place, error in streamed_losses] == [(place, str(error)) for place, error in losses]


def test_there_are_at_least_25_kinds_of_bad_archives() -> None:
    assert len(CASES) >= 25


@pytest.mark.parametrize("at", range(0, len(GOOD) - 1024, 512))
def test_truncation_at_any_block_is_reported(at: int) -> None:
    index = scan(GOOD[:at])
    # The first sample counts as complete only once a second key shows that it was not cut.
    whole = at // SAMPLE if at >= SAMPLE + 1024 else 0
    assert index.keys()[:-1] == KEYS[:whole]
    assert list(index.bad) == [whole]


def test_every_bit_flip_in_a_header_is_detected() -> None:
    start = 3 * SAMPLE
    for offset in {*range(start, start + 512)} - {start + 155}:  # the byte after the checksum is not used
        index = scan(flipped(offset))
        assert len(index.bad) == 1, offset
        assert index.samples == len(KEYS), offset


def test_many_damaged_headers_take_linear_time() -> None:
    pair = member("a.jpg", b"") + b"\1" * 512
    index = scan(GOOD[: 3 * SAMPLE] + pair * 3000 + GOOD[3 * SAMPLE :])
    assert index.keys()[:3] == KEYS[:3]
    assert index.keys()[-3:] == KEYS[3:]


def test_a_sample_next_to_damage_is_good_only_if_an_earlier_one_had_its_fields() -> None:
    odd = member("d/odd.jpg") + member("d/odd.txt")
    intact = between(odd)
    assert scan(intact).samples == 7
    damaged = flipped(3 * SAMPLE + len(odd) + 3, intact)  # the header after the odd sample
    index = scan(damaged)
    assert [key for number, key in enumerate(index.keys()) if number not in index.bad] == KEYS[:3] + KEYS[4:]
    assert len(index.bad) == 1


@pytest.mark.parametrize("padding", [0, 512, 1024, 9216, 10240, 123, 1 << 19])
def test_padding_of_any_size_is_accepted(padding: int) -> None:
    assert not scan(GOOD + bytes(padding)).bad


def test_a_lone_zero_block_ends_an_archive() -> None:
    assert not scan(GOOD[:-512]).bad


def test_excessive_padding_is_reported_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(GOOD)
    os.truncate(path, 1 << 40)
    index = load_index(str(path))
    assert index.samples == 7
    assert "bytes follow the end marker" in index.bad[6]


def test_folders_links_and_names_without_a_field_are_skipped_and_counted() -> None:
    odd = [
        member("d", b"", b"5"),
        member("link.jpg", b"", b"2"),
        member("hard.jpg", b"", b"1"),
        member("pipe.jpg", b"", b"6"),
        member("README"),
        member("d/.DS_Store"),
        member("d/._001.jpg"),
        member("folder/", b"", b"0"),
        member("trailing."),
        member("volume.jpg", b"", b"V"),
    ]
    index = scan(between(b"".join(odd)))
    assert index.keys() == KEYS
    assert not index.bad
    assert index.skipped == len(odd)


def test_a_hard_link_that_declares_a_size_has_no_data() -> None:
    index = scan(between(member("hard.jpg", b"", b"1", size=b"00000001000\0")))
    assert index.keys() == KEYS
    assert not index.bad


def test_grouping_follows_the_first_dot_of_the_base_name() -> None:
    names = ["./a/b.seg.JPG", "a/b.Cls", "a.b/c.d.e", "x..y"]
    index = scan(b"".join(map(member, names)) + END)
    assert index.keys() == ["a/b", "a.b/c", "x"]
    assert [index.kinds[kind] for kind in index.kind] == [("seg.jpg", "cls"), ("d.e",), (".y",)]


def test_a_member_that_belongs_to_no_sample_does_not_split_one() -> None:
    index = scan(member("a.jpg") + member("README") + member("d", b"", b"5") + member("a.cls") + END)
    assert index.keys() == ["a"]
    assert index.kinds == [("jpg", "cls")]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40, 700, 1500])
@pytest.mark.parametrize("fields", [("jpg",), ("cls", "jpg"), ("a", "b.c", "d", "e", "f")])
def test_runs_of_any_length_and_number_of_fields_are_grouped_the_same(count: int, fields: tuple[str, ...]) -> None:
    data = b"".join(member(f"v1.0/{number}.{field}") for number in range(count) for field in fields)
    index = scan(data + END)
    assert index.keys() == [f"v1.0/{number}" for number in range(count)]
    assert [index.kinds[kind] for kind in index.kind] == [fields] * count
    assert index.first.tolist() == list(range(0, count * len(fields), len(fields)))
    assert index.start.tolist() == list(range(512, count * len(fields) * 1024, 1024))
    assert not index.bad


@pytest.mark.parametrize("odd", ["dup.jpg", "5.jpg", "/a.jpg", "../a.jpg", ".a.jpg", "x", "700.txt", "a.b/c.jpg"])
def test_an_odd_member_in_a_long_run_has_the_same_effect_as_among_a_few(odd: str) -> None:
    def entries(numbers: range) -> list[tuple[str, str | None]]:
        half = len(numbers) // 2
        first = b"".join(member(f"{n}.jpg") + member(f"{n}.txt") for n in numbers[:half])
        last = b"".join(member(f"{n}.jpg") + member(f"{n}.txt") for n in numbers[half:])
        index = scan(first + member("dup.txt") + member("dup.jpg") + member(odd) + last + END)
        found = [(key, index.bad.get(n)) for n, key in enumerate(index.keys())]
        return [entry for entry in found if not entry[0].isdigit() or entry[1]]

    assert entries(range(3, 9)) == entries(range(3, 9))
    assert entries(range(2000, 3600)) == [e for e in entries(range(2000, 2006)) if e[0] not in ("5", "700")]


def test_pax_and_gnu_names_and_sizes_are_read() -> None:
    long = "f" * 90 + "/" + "g" * 300
    data = (
        pax({"path": f"{long}.jpg", "mtime": "1.5"})
        + member("cut.jpg", b"one")
        + member("././@LongLink", f"{long}.cls\0".encode(), b"L")
        + member("cut.cls", b"two")
        + pax({"size": "700"})
        + member("z.jpg", b"y" * 700, size=b"00000000000\0")
        + member("b256.jpg", b"z" * 5, size=b"\x80" + (5).to_bytes(11, "big"))
        + pax({"comment": "hello"}, b"g")
        + member("after.jpg")
        + member("././@LongLink", b"somewhere\0", b"K")
        + member("twelve.jpg", b"x" * 8, size=b"000000000010")
    )
    index = scan(data + END)
    assert index.keys() == [long, "z", "b256", "after", "twelve"]
    assert index.size.tolist() == [3, 3, 700, 5, 4, 8]
    assert not index.bad


def test_signed_checksums_of_old_tars_hold() -> None:
    raw = bytearray(member("\xe9\xe8.jpg".encode("latin-1")))
    unsigned = int(raw[148:154], 8)
    raw[148:156] = b"%06o\0 " % (unsigned - 256 * 2)
    index = scan(bytes(raw) + END)
    assert index.keys() == ["\udce9\udce8"]


def test_names_that_are_not_utf8_keep_their_bytes() -> None:
    index = scan(member(b"caf\xe9.jpg") + member("caf\u00e9.jpg") + END)
    assert index.keys() == ["caf\udce9", "caf\u00e9"]


def test_a_missing_shard_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        load_index(str(tmp_path / "none.tar"))


def test_the_index_beside_a_truncated_shard_shows_which_samples_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(GOOD)
    write_beside(str(path), load_index(str(path)))
    path.write_bytes(GOOD[: 2 * SAMPLE])
    index = load_index(str(path))
    assert index.samples == 6
    assert list(index.bad) == [2, 3, 4, 5]
    assert "without an end marker" in index.bad[2]
    assert "the index beside it says 6 samples, 2 were found" in index.bad[5]


def test_samples_after_damage_keep_their_numbers_if_the_count_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(GOOD[: 2 * SAMPLE] + bytes(range(256)) * 24 + GOOD[4 * SAMPLE :])
    index = load_index(str(path), expected=6)
    assert list(index.bad) == [2, 3]
    assert index.key(5) == KEYS[5]


def test_damage_that_lost_no_sample_is_ignored_if_the_count_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(GOOD[:-1024])
    assert load_index(str(path)).samples == 7
    assert load_index(str(path), expected=6).samples == 6
    assert not load_index(str(path), expected=6).bad


def test_a_trusted_index_is_used_without_reading_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(GOOD)
    write_beside(str(path), load_index(str(path)))
    status = path.stat()
    path.write_bytes(flipped(3))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not load_index(str(path)).bad


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_formats_of_python_tarfile_are_read(format: int, tmp_path: Path) -> None:
    names = ["a.jpg", "a.cls", "\u00fcber/b.jpg", "x" * 80 + "/" + "y" * 90 + ".jpg"]
    if format != tarfile.USTAR_FORMAT:
        names += ["z" * 150 + "/" + "y" * 200 + ".jpg"]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = number, 1.5 if format == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(b"x" * number))
    index = load_index(str(path))
    assert index.keys() == list(dict.fromkeys(name.rsplit(".", 1)[0] for name in names))
    assert index.size.tolist() == list(range(len(names)))


def test_a_sparse_file_of_gnu_tar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"plain")
    hole: Any = tmp_path / "b.jpg"
    with open(hole, "wb") as file:
        for part in range(12):
            file.seek(part << 20)
            file.write(b"x" * 4096)
    (tmp_path / "c.jpg").write_bytes(b"plain")
    for format in ("oldgnu", "posix"):
        target = tmp_path / f"{format}.tar"
        os.system(f"cd {tmp_path} && tar --sparse --format={format} -cf {target} a.jpg b.jpg c.jpg")
        index = load_index(str(target))
        good = [key for number, key in enumerate(index.keys()) if number not in index.bad]
        assert good == ["a", "c"]
        assert list(index.bad.values()) == ["sparse members are not supported"]


@pytest.mark.parametrize("name", [name for name in CASES if "bomb" not in name])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_bad_archive_yields_the_same_when_it_is_copied(name: str, mapped: bool, tmp_path: Path) -> None:
    case = CASES[name]
    data = case.data() if callable(case.data) else case.data
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    found = list(open_raw(str(path), mapped=mapped))
    losses = [(place, str(item)) for place, item in enumerate(found) if isinstance(item, DataError)]
    keys, streamed_losses = from_stream(data, str(path))
    assert [item.key for item in found if isinstance(item, RawSample)] == keys
    assert losses == [(place, str(error)) for place, error in streamed_losses]
