from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import DataError, PlanError, StageError, StorageError
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


def test_tar_to_parquet_and_back_keeps_keys_and_bytes(tmp_path: Path) -> None:
    samples = [{"__key__": f"a/{i}", "jpg": b"\xff\xd8" + bytes([i]), "cls": i, "txt": "x"} for i in range(20)]
    ps.from_items(samples).write_tar(str(tmp_path / "in"))
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "table")]) == 0
    assert "__url__" not in ps.read_parquet(str(tmp_path / "table")).first()
    assert main(["convert", str(tmp_path / "table"), str(tmp_path / "out"), "--max-bytes", "20KB"]) == 0
    expected, converted = (ps.read_tar(str(tmp_path / name)).take_all() for name in ("in", "out"))
    assert len({sample["__url__"] for sample in converted}) > 1
    assert [{**sample, "__url__": ""} for sample in converted] == [{**sample, "__url__": ""} for sample in expected]


@pytest.mark.parametrize(
    ("name", "read"), [("out.csv", ps.read_csv), ("out.jsonl", ps.read_json), ("out.tfrecord", ps.read_tfrecords)]
)
def test_the_format_of_rows_is_chosen_by_the_file_name(
    name: str, read: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"a": i, "b": i / 2} for i in range(10)]
    ps.from_items(rows).write_parquet(tmp_path / "table")
    assert main(["convert", str(tmp_path / "table"), str(tmp_path / name), "--json", "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 10
    assert read(str(tmp_path / name)).take_all() == rows
    assert main(["convert", str(tmp_path / name), str(tmp_path / "again"), "--format", "parquet"]) == 0
    assert ps.read_parquet(str(tmp_path / "again")).take_all() == rows


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


def test_a_folder_of_several_formats_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.jsonl").write_text("{}\n")
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "holds files of several formats (" in error
    assert "1 csv" in error
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.xyz").write_text("")
    with pytest.raises(PlanError, match=r"there are no files of a supported format, only a\.xyz"):
        ps.convert(tmp_path / "c", tmp_path / "out")
    with pytest.raises(StorageError, match="no such file or folder"):
        ps.convert(tmp_path / "d", tmp_path / "out")


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


@pytest.mark.parametrize("format", ["parquet", "tar", "csv", "json", "tfrecords"])
def test_a_missing_source_leaves_nothing_behind(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["convert", str(tmp_path / "missing.csv"), str(tmp_path / "out"), "--format", format])
    assert code != 0
    assert "no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
