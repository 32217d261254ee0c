"""TFRecord files: parsing and encoding, and errors that name file and record."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.formats.rows.tfrecord import encode_example, frame_records, masked_checksums, parse_example
from penstock.plan import Fields
from penstock.testing import fingerprint


def encoded_manually() -> bytes:
    """Return {"label": int64 [3, -1], "name": bytes [b"ab"], "x": float [0.5]} as a protocol buffer message."""

    def part(tag: int, content: bytes) -> bytes:
        return bytes([tag, len(content)]) + content

    ints = part(0x1A, part(0x0A, b"\x03" + b"\xff" * 9 + b"\x01"))
    texts = part(0x0A, part(0x0A, b"ab"))
    floats = part(0x12, part(0x0A, struct.pack("<f", 0.5)))
    entries = [(b"label", ints), (b"name", texts), (b"x", floats)]
    return part(0x0A, b"".join(part(0x0A, part(0x0A, name) + part(0x12, value)) for name, value in entries))


def test_an_example_is_parsed() -> None:
    got = parse_example(encoded_manually(), Fields())
    assert got.pop("label").tolist() == [3, -1]
    assert got == {"name": b"ab", "x": 0.5}
    assert parse_example(encoded_manually(), Fields(frozenset({"x"}))) == {"x": 0.5}
    assert parse_example(encoded_manually(), Fields(), ("name", "x"))["name"] == [b"ab"]


def test_an_example_is_encoded_to_the_same_bytes() -> None:
    assert encode_example({"label": [3, -1], "name": "ab", "x": 0.5}) == encoded_manually()


def test_unpacked_lists_are_parsed() -> None:
    # int64_list {value: 5 value: 300} and float_list {value: 0.5}, one tag for each value
    ints = b"\x1a\x05" + b"\x08\x05" + b"\x08\xac\x02"
    floats = b"\x12\x05" + b"\x0d" + struct.pack("<f", 0.5)
    entries = b"".join(
        b"\x0a" + bytes([len(e)]) + e
        for e in (
            b"\x0a\x01i\x12" + bytes([len(ints)]) + ints,
            b"\x0a\x01f\x12" + bytes([len(floats)]) + floats,
        )
    )
    got = parse_example(b"\x0a" + bytes([len(entries)]) + entries, Fields())
    assert got["i"].tolist() == [5, 300]
    assert got["f"] == 0.5


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=9),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40).map(lambda xs: np.array(xs, np.int64)),
    st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=9).map(lambda xs: np.array(xs, np.float32)),
    st.lists(st.binary(max_size=4), min_size=2, max_size=5),
    st.just(np.zeros(0, np.float32)),
    st.none(),
)


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: not name.startswith("__")), VALUES, max_size=5))
def test_examples_round_trip(sample: dict[str, Any]) -> None:
    assert fingerprint(parse_example(encode_example(sample), Fields())) == fingerprint(sample)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.zeros((2, 2)), "field 'v': a ndarray of shape"),
        (2**63, "field 'v'"),
        ({"a": 1}, "field 'v'"),
        ([1, "a"], "field 'v'"),
        (1j, "field 'v'"),
    ],
)
def test_the_error_of_a_value_that_cannot_be_stored_names_its_field(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_example({"v": value})


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_parsed_or_refused_without_a_crash(data: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError, struct.error):
        parse_example(data, Fields())


SAMPLES = [{"id": n, "text": b"x" * (n % 50), "v": np.arange(2 + n % 3)} for n in range(100)]


def masked_crc(data: bytes) -> int:
    """Compute a stored checksum by its definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_checksums_are_masked_crcs_by_their_definition() -> None:
    rng = random.Random(5)
    records = [b"", b"123456789", *(rng.randbytes(n) for n in (1, 3, 255, 256, 257, 3000))]
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_checksums(records).tolist() == [masked_crc(record) for record in records]
    assert masked_checksums([]).tolist() == []


def test_without_the_checksum_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_file(tmp_path / "a.tfrecord", SAMPLES[:2])
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtra, match=r"a package for TFRecord is not .* 'penstock\[formats\]'"):
        len(ps.read_tfrecords(tmp_path / "a.tfrecord"))


def record_file(path: Path, samples: list[dict[str, Any]]) -> list[int]:
    """Write a file without ``frame_records``; return the offsets of its records."""
    starts, out = [], b""
    for sample in samples:
        data = encode_example(sample)
        length = struct.pack("<Q", len(data))
        starts.append(len(out))
        checksums = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
        out += length + checksums[0] + data + checksums[1]
    path.write_bytes(out)
    return starts


def test_framed_records_have_lengths_and_checksums(tmp_path: Path) -> None:
    record_file(tmp_path / "a.tfrecord", SAMPLES)
    assert (
        b"".join(frame_records([encode_example(sample) for sample in SAMPLES]))
        == (tmp_path / "a.tfrecord").read_bytes()
    )


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_files_are_read_in_any_order(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    for number, samples in enumerate((SAMPLES[:37], SAMPLES[37:])):
        record_file(path := tmp_path / f"{number}.tfrecord", samples)
        path.write_bytes(compress(path.read_bytes()))
    ds = ps.read_tfrecords(str(tmp_path))
    assert fingerprint(ds.take_all()) == fingerprint(SAMPLES)
    assert len(ds) == 100
    assert [ds[i]["id"] for i in (0, 15, 16, 36, 37, 99)] == [0, 15, 16, 36, 37, 99]
    assert sorted(sample["id"] for sample in ds.shuffle(20)) == list(range(100))
    assert ps.read_tfrecords(str(tmp_path), lists=["id"]).first()["id"].tolist() == [0]


def test_a_damaged_record_is_one_error(tmp_path: Path) -> None:
    starts = record_file(path := tmp_path / "a.tfrecord", SAMPLES)
    data = bytearray(path.read_bytes())
    data[starts[50] + 20] ^= 0x10
    path.write_bytes(data)
    ds = ps.read_tfrecords(str(path))
    with pytest.raises(DataError, match=r"record is damaged: its checksum does not match.*a.tfrecord, key: record 50"):
        ds.take_all()
    assert [s["id"] for s in ds.on_error("skip").take_all()] == [n for n in range(100) if n != 50]


@pytest.mark.parametrize("byte", [0, 3, 7, 9])
def test_records_after_a_damaged_length_are_one_error(byte: int, tmp_path: Path) -> None:
    starts = record_file(path := tmp_path / "a.tfrecord", SAMPLES)
    data = bytearray(path.read_bytes())
    data[starts[40] + byte] ^= 0x40
    path.write_bytes(data)
    ds = ps.read_tfrecords(str(path))
    assert len(ds) == 41
    assert [s["id"] for s in ds.on_error("skip").take_all()] == list(range(40))
    with pytest.raises(DataError, match="length of record 40 is damaged: the rest of the file cannot be read"):
        ds.take_all()


def test_a_truncated_file_fails_at_its_last_record(tmp_path: Path) -> None:
    starts = record_file(path := tmp_path / "a.tfrecord", SAMPLES)
    for cut in (starts[60] + 5, starts[60] + 14, starts[61] - 1):
        path.write_bytes(path.read_bytes()[:cut])
        ds = ps.read_tfrecords(str(path))
        assert (len(ds), len(ds.on_error("skip").take_all())) == (61, 60)
        with pytest.raises(DataError, match="record 60 is truncated"):
            ds.take_all()
        record_file(path, SAMPLES)


def test_the_error_of_a_record_that_is_not_an_example_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(
        b"".join(frame_records([encode_example({"a": 1}), random.Random(1).randbytes(30)]))
    )
    with pytest.raises(DataError, match=r"key: record 1"):
        ps.read_tfrecords(str(tmp_path)).take_all()


def test_lists_must_be_field_names() -> None:
    with pytest.raises(PlanError, match="give a list of field names"):
        ps.read_tfrecords("a", lists="id")


@pytest.mark.parametrize("key", ["0001", "folder/größe", "bytes \udcff"])
def test_the_key_is_a_field_and_the_url_is_not(key: str) -> None:
    record = encode_example({"__key__": key, "__url__": "a.tar", "x": 3})
    assert parse_example(record, Fields()) == {"__key__": key, "x": 3}
    assert parse_example(record, Fields(frozenset({"x"}), meta=False)) == {"x": 3}


def test_a_file_of_records_keeps_the_keys_of_tar_samples(tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        for number in range(3):
            writer.write({"__key__": f"k{number}", "txt": b"x"})
    ps.read_tar(tmp_path / "a.tar").write_tfrecords(str(tmp_path / "out"))
    assert [sample["__key__"] for sample in ps.read_tfrecords(str(tmp_path / "out"))] == ["k0", "k1", "k2"]
