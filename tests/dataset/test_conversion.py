"""Conversion between formats keeps samples, and leaves nothing behind when it fails."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest

import penstock as ps
from penstock.dataset.conversion import format_of, format_to_inspect
from penstock.errors import DataError, PlanError, StageError
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

TYPED: list[dict[str, Any]] = [
    {
        "id": i,
        "text": f"row ä {i}",
        "score": i / 3,
        "ok": i % 2 == 0,
        "vector": np.arange(3, dtype=np.float32) + i,
        "maybe": None if i % 2 else 7,
        "blob": bytes([i, 255]),
        "nested": {"u": i, "v": ["p", "q"]},
        "day": np.datetime64("2024-01-01") + i,
    }
    for i in range(9)
]


def is_same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(np.array_equal(left, right))


def test_parquet_to_tar_and_back_keeps_fields_and_types(tmp_path: Path) -> None:
    ps.from_items(TYPED).write_parquet(tmp_path / "table")
    ps.convert(tmp_path / "table", tmp_path / "shards")
    members = ps.read_tar(str(tmp_path / "shards")).first()
    assert (members["id.json"], members["text.txt"], members["blob"]) == (b"0", "row ä 0".encode(), b"\x00\xff")
    ps.convert(tmp_path / "shards", tmp_path / "back")
    back = ps.read_parquet(str(tmp_path / "back")).take_all()
    assert len(back) == len(TYPED)
    for sample, expected in zip(back, TYPED, strict=True):
        assert all(is_same(sample[name], expected[name]) for name in expected)


def test_images_of_typed_tables_become_files(tmp_path: Path) -> None:
    image = {"bytes": b"\x89PNG", "path": None}
    ps.from_items([{"image": image, "label": 1}]).write_parquet(tmp_path / "table")
    ps.convert(tmp_path / "table", tmp_path / "shards", format="tar")
    assert ps.read_tar(str(tmp_path / "shards")).first()["image.png"] == b"\x89PNG"


def test_a_conversion_that_fails_leaves_no_files_and_names_the_sample(tmp_path: Path) -> None:
    samples = [{"__key__": f"s{i}", "x.json": b"1" if i < 7 else b"{"} for i in range(9)]
    ps.from_items(samples).write_tar(str(tmp_path / "in"))
    with pytest.raises(StageError, match="s7"):
        ps.convert(tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))
    with pytest.raises(PlanError, match="both tar; use `penstock pack`"):
        ps.convert(tmp_path / "in", tmp_path / "out.tar")


def test_bytes_cannot_be_written_to_csv(tmp_path: Path) -> None:
    ps.from_items([{"a": b"\xff"}]).write_parquet(tmp_path / "table")
    with pytest.raises(DataError, match="'a'"):
        ps.convert(tmp_path / "table", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_source_and_target_may_be_remote(tmp_path: Path) -> None:
    ps.from_items([{"__key__": "k", "cls": 3}]).write_tar(str(tmp_path / "in"))
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with s3_server(tmp_path / "root") as port:
        storage = ps.S3(
            endpoint=f"http://127.0.0.1:{port}", access_key=ACCESS_KEY, secret_key=SECRET_KEY, region="us-east-1"
        )
        ps.convert(tmp_path / "in", "s3://bucket/table", format="parquet", storage=storage)
        assert ps.read_parquet("s3://bucket/table", storage=storage).first() == {"__key__": "k", "cls": b"3"}
        ps.convert("s3://bucket/table", tmp_path / "back", storage=storage)
    assert ps.read_tar(str(tmp_path / "back")).first()["cls"] == b"3"


@pytest.mark.parametrize("format", [None, "parquet", "csv"])
def test_files_are_not_converted_into_their_own_folder(format: Any, tmp_path: Path) -> None:
    ps.from_items([{"a": 1}]).write_parquet(tmp_path / "table")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PlanError, match=r"reads from .*table, where it is to be written"):
        ps.convert(tmp_path / "table", tmp_path / "table", format=format)
    assert sorted(tmp_path.rglob("*")) == before
    ps.convert(tmp_path / "table", tmp_path / "table" / "rows.csv")  # a file beside its source is fine


@pytest.mark.parametrize(("source", "target", "name"), [(None, "x", "source"), ("x", 3, "target")], ids=str)
def test_an_argument_that_is_not_a_path_is_named(source: Any, target: Any, name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}=.*: give a path or a URL"):
        ps.convert(source, target)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.tar", "tar"),
        ("a.parquet", "parquet"),
        ("a.feather", "arrow"),
        ("a.tsv.gz", "csv"),
        ("A.JSONL", "json"),
        ("a.tfrecord.zst", "tfrecords"),
        ("s3://bucket/a.txt?version=3", "text"),
    ],
)
def test_a_format_is_recognised_by_the_name_of_a_file(name: str, format: str) -> None:
    assert format_of(name) == format_to_inspect(name) == format


def test_a_folder_has_the_format_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("sub/a.csv", "sub/.hidden.tar", "a.index", "manifest.json"):
        (tmp_path / name).write_text("")
    assert format_of(str(tmp_path)) == "csv"
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(PlanError, match="holds files of several formats"):
        format_of(str(tmp_path))


def test_the_format_to_inspect_is_tar_if_there_are_shards_or_nothing_is_recognised(tmp_path: Path) -> None:
    assert format_to_inspect(str(tmp_path)) == format_to_inspect(str(tmp_path / "missing")) == "tar"
    for name in ("a.csv", "b.csv", "c.jsonl"):
        (tmp_path / name).write_text("")
    assert format_to_inspect(str(tmp_path)) == "csv"
    (tmp_path / "d.tar").write_text("")
    assert format_to_inspect(str(tmp_path)) == "tar"


def test_a_value_that_cannot_be_stored_in_tar_is_named(tmp_path: Path) -> None:
    ps.from_items([{"a": {"b": Decimal("1.5")}}]).write_parquet(tmp_path / "table")
    with pytest.raises(PlanError, match="a value of type Decimal cannot be stored in a tar shard; map it to bytes"):
        ps.convert(tmp_path / "table", tmp_path / "shards")


def _environment(path: Path, records: dict[bytes, bytes]) -> Path:
    env = lmdb.open(str(path), map_size=1 << 24)
    with env.begin(write=True) as transaction:
        for key, value in records.items():
            transaction.put(key, value)
    env.close()
    return path


def test_an_lmdb_environment_becomes_shards(tmp_path: Path) -> None:
    source = _environment(tmp_path / "data.lmdb", {b"%04d" % n: b"value %d" % n for n in range(50)})
    assert format_of(str(source)) == "lmdb"
    packed = ps.convert(source, tmp_path / "packed")
    assert packed.samples == 50
    want = [(sample["__key__"], sample["value"]) for sample in ps.read_lmdb(str(source))]
    assert [(sample["__key__"], sample["value"]) for sample in ps.read_tar(packed.folder)] == want
    assert ps.convert(source, tmp_path / "packed") == packed


def test_the_records_of_lmdb_are_decoded_as_fields_say(tmp_path: Path) -> None:
    records = {b"%d" % n: msgpack.packb({"jpg": b"photo", "label": n}) for n in range(3)}
    source = _environment(tmp_path / "environment", records)
    ps.convert(source, tmp_path / "packed", fields="msgpack")
    assert [sample["jpg"] for sample in ps.read_tar(str(tmp_path / "packed"))] == [b"photo"] * 3
    ps.convert(source, tmp_path / "table", format="parquet", fields="msgpack")
    assert [row["label"] for row in ps.read_parquet(str(tmp_path / "table"))] == [0, 1, 2]
    with pytest.raises(PlanError, match="trust_pickle"):
        ps.convert(source, tmp_path / "other", fields="pickle")
    (tmp_path / "rows.csv").write_text("a\n1\n")
    with pytest.raises(PlanError, match="records of LMDB"):
        ps.convert(tmp_path / "rows.csv", tmp_path / "other", fields="msgpack")
