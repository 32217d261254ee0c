"""LMDB environments are read by key order, counted without their values, and survive forks."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
import torch.utils.data

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.lmdb import LmdbSource, parse_datum
from penstock.formats.lmdb import _open as opened
from penstock.formats.rows.tfrecord import encode_example

FULL = os.environ.get("PENSTOCK_FULL") == "1"


def write(path: Path, records: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]], subdir: bool = True) -> Path:
    with lmdb.open(str(path), map_size=1 << 26, subdir=subdir) as env, env.begin(write=True) as transaction:
        for key, value in dict(records).items():
            transaction.put(key, value)
    return path


def numbered(start: int, stop: int) -> dict[bytes, bytes]:
    return {b"%06d" % n: b"value %d" % n for n in range(start, stop)}


def keys(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def test_records_are_samples_in_the_order_of_their_keys(tmp_path: Path) -> None:
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", numbered(0, 300)))
    assert len(ds) == 300
    assert ds.first() == {"__key__": "000000", "value": b"value 0"}
    assert ds[123] == {"__key__": "000123", "value": b"value 123"}
    assert keys(ds) == [f"{n:06d}" for n in range(300)]
    assert "read_lmdb(" in repr(ds)


def test_counting_reads_neither_keys_nor_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", numbered(0, 40)))
    monkeypatch.setattr("penstock.formats.lmdb._Keys.read", pytest.fail)
    assert len(ds) == 40


def test_environments_are_shards_however_they_are_stored(tmp_path: Path) -> None:
    write(tmp_path / "a", numbered(0, 10))
    write(tmp_path / "b.lmdb", numbered(10, 25), subdir=False)
    ds = ps.read_lmdb(tmp_path)
    assert keys(ds) == [f"{n:06d}" for n in range(25)]
    assert keys(ps.read_lmdb([tmp_path / "b.lmdb", tmp_path / "a"])) == [*keys(ds)[10:], *keys(ds)[:10]]
    shuffled = keys(ds.shuffle(seed=3))
    assert sorted(shuffled) == keys(ds)
    assert shuffled != keys(ds)


def test_ranks_and_states_work_as_for_any_source(tmp_path: Path) -> None:
    write(tmp_path / "a", numbered(0, 31))
    write(tmp_path / "b", numbered(31, 50))
    ds = ps.read_lmdb(tmp_path).shuffle(seed=1).batched(4)
    loaders = [ds.loader(rank, 2, uneven="keep") for rank in range(2)]
    seen: list[str] = []
    for loader in loaders:
        for _, batch in zip(range(3), loader, strict=False):
            seen += batch["__key__"]
    states = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
    for rank in range(3):
        loader = ds.loader(rank, 3, uneven="keep")
        loader.load_state_dict(states=states)
        seen += [key for batch in loader for key in batch["__key__"]]
    assert sorted(seen) == [f"{n:06d}" for n in range(50)]


@pytest.mark.parametrize("start_method", ["fork", "spawn"] if FULL else ["fork"])  # a spawned one imports torch
def test_workers_that_are_forked_after_a_first_read_read_too(tmp_path: Path, start_method: str) -> None:
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", numbered(0, 60)))
    assert ds.first()["value"] == b"value 0"
    loader = torch.utils.data.DataLoader(ds, None, num_workers=1, multiprocessing_context=start_method)  # type: ignore[arg-type,var-annotated]
    assert sorted(keys(loader)) == [f"{n:06d}" for n in range(60)]
    assert ds[59]["value"] == b"value 59"


def test_worker_processes_read_the_same(tmp_path: Path) -> None:
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", numbered(0, 60)))
    assert ds.map(dict, workers=2, on="processes").take_all() == ds.take_all()


def test_several_threads_and_datasets_share_an_environment(tmp_path: Path) -> None:
    path = write(tmp_path / "data.lmdb", numbered(0, 200))
    both = ps.read_lmdb(path, workers=4).zip(ps.read_lmdb(f"{tmp_path}/./data.lmdb"), suffix="_right")
    assert all(sample["value"] == sample["value_right"] for sample in both)


EXAMPLE = {"image": b"\xff\xd8", "label": 3}


@pytest.mark.parametrize(
    ("fields", "value", "expected"),
    [
        ("tf.Example", encode_example(EXAMPLE), EXAMPLE),
        ("msgpack", msgpack.packb(EXAMPLE), EXAMPLE),
        ("msgpack", msgpack.packb([b"\xff\xd8", 3]), EXAMPLE),
        ("pickle", pickle.dumps((b"\xff\xd8", 3)), EXAMPLE),
        ("pickle", pickle.dumps({"x": 1}), {"x": 1}),
        (json.loads, b'{"x": [1, 2]}', {"x": [1, 2]}),
    ],
)
def test_values_are_parsed_into_fields(tmp_path: Path, fields: Any, value: bytes, expected: Any) -> None:
    records = {b"k": value, b"__len__": pickle.dumps(1), b"__keys__": pickle.dumps([b"k"])}
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", records), fields, trust_pickle=True)
    assert len(ds) == 1
    assert ds.take_all() == [{"__key__": "k", **expected}]


def _varint(number: int, value: int) -> bytes:
    out, value = bytearray([number << 3]), value & (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _datum(data: bytes = b"", floats: bytes = b"", label: int = 0, encoded: int = 0) -> bytes:
    shape = b"".join(_varint(number, size) for number, size in ((1, 3), (2, 2), (3, 4)))
    stored = b"\x22" + bytes([len(data)]) + data if data else b""
    numbers = b"".join(b"\x35" + floats[at : at + 4] for at in range(0, len(floats), 4))
    return shape + stored + _varint(5, label) + numbers + _varint(7, encoded)


def test_records_of_caffe_are_images_with_labels(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8)
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", {b"k": _datum(pixels.tobytes(), label=700)}), fields="caffe")
    sample = ds.first()
    assert sample["label"] == 700
    np.testing.assert_array_equal(sample["image"], pixels.reshape(3, 2, 4).transpose(1, 2, 0))
    floats = parse_datum(_datum(floats=struct.pack("<24f", *range(24)), label=-1))
    np.testing.assert_array_equal(floats["image"], np.arange(24.0).reshape(3, 2, 4).transpose(1, 2, 0))
    assert floats["label"] == -1
    assert parse_datum(_datum(b"\xff\xd8jpeg", encoded=1, label=2)) == {"image": b"\xff\xd8jpeg", "label": 2}
    with pytest.raises(ValueError, match="not a Datum of Caffe: 5 values for 3x2x4"):
        parse_datum(_datum(b"12345"))


def test_pickle_needs_trust_and_other_arguments_are_checked_where_they_are_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="pass trust_pickle=True if you trust this data"):
        ps.read_lmdb(tmp_path, "pickle")
    with pytest.raises(PlanError, match=r"fields='avro': choose one of 'tf.Example'"):
        ps.read_lmdb(tmp_path, "avro")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"fields=\['image'\]: choose one of"):
        ps.read_lmdb(tmp_path, ["image"])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="needs local paths"):
        ps.read_lmdb("s3://bucket/data.lmdb")


def test_a_bad_record_is_an_error_with_its_key_and_can_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "data.lmdb", {b"a": b'{"x": 1}', b"b": b"{", b"c": b'{"x": 3}'})
    with pytest.raises(DataError, match="key: b") as caught:
        ps.read_lmdb(path, json.loads).take_all()
    assert str(path) in str(caught.value)
    assert keys(ps.read_lmdb(path, json.loads).on_error("skip")) == ["a", "c"]


def _missing(folder: Path) -> Path:
    return folder / "nothing"


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _not_lmdb(folder: Path) -> Path:
    (folder / "x.lmdb").write_bytes(os.urandom(9000))
    return folder / "x.lmdb"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_missing, "no such file or folder"),
        (_empty, "holds no LMDB environment"),
        (_not_lmdb, "cannot be opened: .*not an LMDB file"),
    ],
)
def test_what_is_not_an_environment_is_one_clear_error(
    tmp_path: Path, make: Callable[[Path], Path], problem: str
) -> None:
    with pytest.raises(StorageError, match=problem):
        ps.read_lmdb(make(tmp_path)).first()


def test_keys_that_are_not_text_stay_distinct(tmp_path: Path) -> None:
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", {b"\xff\x00": b"1", b"\xff\x01": b"2"}))
    assert [key.encode("utf-8", "surrogateescape") for key in keys(ds)] == [b"\xff\x00", b"\xff\x01"]


def test_a_forked_child_uses_no_environment_of_its_parent(tmp_path: Path) -> None:
    ds = ps.read_lmdb(write(tmp_path / "data.lmdb", numbered(0, 5)))
    assert ds.first()["value"] == b"value 0"
    assert opened
    child = os.fork()
    if not child:
        os._exit(0 if not opened and ds[4]["value"] == b"value 4" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ds[3]["value"] == b"value 3"


def test_an_environment_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.lmdb", {b"k": b"old"}, subdir=False)
    ds = ps.read_lmdb(path)
    assert ds[0]["value"] == b"old"
    reader = LmdbSource((str(path),)).open()
    assert reader.count(0) == 1
    os.replace(write(tmp_path / "b.lmdb", {b"k": b"new", b"l": b"new"}, subdir=False), path)
    assert [sample["value"] for sample in ds] == [b"new"] * 2
    assert ds[1]["value"] == b"new"
    assert [one.path for one in opened.values() if one.path.startswith(str(tmp_path))] == [str(path)]
    with pytest.raises(StorageError, match=r"replaced while it was being read \(url: .*a.lmdb"):
        reader.key(0, 0)


@pytest.mark.parametrize("first", ["open", "truncated"])
def test_a_truncated_environment_is_an_error(tmp_path: Path, first: str) -> None:
    path = write(tmp_path / "a.lmdb", numbered(0, 2000), subdir=False)
    if first == "open":
        assert len(ps.read_lmdb(path)) == 2000
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(StorageError, match=r"truncated: the file has [0-9,]+ bytes of [0-9,]+.*a.lmdb"):
        list(ps.read_lmdb(path))


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, r"the function in fields= returned None: return a dict"),
        ("text", "returned a str"),
        (3, "returned an int"),
        ({1: 2}, r"names of fields and the key must be text, but are \[1\]"),
        ({"__key__": 5}, "must be text"),
    ],
)
def test_a_function_that_returns_no_fields_fails_by_key(result: Any, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "data.lmdb", {b"a": b"1", b"b": b"2"})
    ds = ps.read_lmdb(path, fields=lambda value: {"x": 1} if value == b"1" else result)
    with pytest.raises(DataError, match=rf"{problem}.*key: b"):
        ds.take_all()
    assert ds.on_error("skip").take_all() == [{"__key__": "a", "x": 1}]


def test_an_async_function_of_fields_is_refused() -> None:
    async def parse(value: bytes) -> dict[str, Any]:
        return {"x": value}

    with pytest.raises(PlanError, match="parse is async"):
        ps.read_lmdb("x", fields=parse)  # type: ignore[arg-type]
