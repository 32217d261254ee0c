"""Samples of tar shards and of standard input, and arguments that sources refuse."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError


def _tar(path: Path, *members: str) -> str:
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(members):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"%d" % (number % 10)))
    return str(path)


def test_a_sample_has_a_key_a_url_and_one_field_per_extension(tmp_path: Path) -> None:
    path = _tar(tmp_path / "a.tar", "d.x/0001.JPG", "d.x/0001.seg.Png", "d.x/0002.cls")
    assert list(ps.read_tar(path)) == [
        {"__key__": "d.x/0001", "__url__": path, "jpg": b"0", "seg.png": b"1"},
        {"__key__": "d.x/0002", "__url__": path, "cls": b"2"},
    ]


def test_members_that_are_not_fields_are_left_out(tmp_path: Path) -> None:
    path = _tar(tmp_path / "a.tar", "./1.cls", "README", ".DS_Store", "._1.cls", "./2.cls")
    assert [(s["__key__"], s["cls"]) for s in ps.read_tar(path)] == [("1", b"0"), ("2", b"4")]


@pytest.mark.parametrize("members", [("1.cls", "1.CLS"), ("1.cls", "2.cls", "1.txt")])
def test_the_error_of_a_repeated_field_or_key_names_shard_and_key(tmp_path: Path, members: tuple[str, ...]) -> None:
    path = _tar(tmp_path / "a.tar", *members)
    with pytest.raises(DataError) as caught:
        list(ps.read_tar(path))
    assert (caught.value.shard, caught.value.key) == (path, "1")


def test_all_notations_name_the_same_shards(tmp_path: Path) -> None:
    for number in range(3):
        _tar(tmp_path / f"s-{number}.tar", f"{number}.cls")
    notations: list[str | list[str]] = [
        f"{tmp_path}/s-{{0..2}}.tar",
        f"{tmp_path}/s-0.tar::{tmp_path}/s-1.tar::{tmp_path}/s-2.tar",
        f"{tmp_path}/*.tar",
        str(tmp_path),
        [f"{tmp_path}/s-0.tar", f"{tmp_path}/s-{{1..2}}.tar"],
        f"file:{tmp_path}/s-{{0..2}}.tar",
    ]
    for notation in notations:
        assert [s["__key__"] for s in ps.read_tar(notation)] == ["0", "1", "2"], notation


def test_the_folder_does_not_change_the_order(tmp_path: Path) -> None:
    orders = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for number in range(6):
            names = [f"{number}{i:02d}.cls" for i in range(20)]
            _tar(tmp_path / folder / f"s-{number}.tar", *names)
        orders.append([s["__key__"] for s in ps.read_tar(str(tmp_path / folder)).shuffle(10).epoch(1)])
    assert orders[0] == orders[1]


def test_a_missing_shard_is_a_storage_error_with_its_url(tmp_path: Path) -> None:
    _tar(tmp_path / "a.tar", "1.cls")
    with pytest.raises(StorageError, match="no such shard") as caught:
        list(ps.read_tar(f"{tmp_path}/{{a,b}}.tar"))
    assert caught.value.url == f"{tmp_path}/b.tar"


def test_workers_read_the_same_samples(tiny_shards: list[Path]) -> None:
    urls = list(map(str, tiny_shards))
    assert list(ps.read_tar(urls, workers=2)) == list(ps.read_tar(urls))


def _piped(python: str, path: str, code: str) -> str:
    script = f"import penstock as ps\nds = ps.read_tar('-')\n{code}"
    with open(path, "rb") as stdin:
        done = subprocess.run([python, "-c", script], stdin=stdin, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_standard_input_is_read_front_to_back(tmp_path: Path, warm_python: str) -> None:
    path = _tar(tmp_path / "a.tar", *(f"{i}.cls" for i in range(6)))
    code = "print([s['__key__'] for s in ds.skip(1).limit(3).map(dict).filter(lambda s: s['cls'] != b'2')])"
    assert _piped(warm_python, path, code) == "['1', '3']\n"


def test_a_stream_has_no_length_positions_or_state(tmp_path: Path, warm_python: str) -> None:
    path = _tar(tmp_path / "a.tar", "1.cls")
    code = """
cut = lambda d: list(d.shard(0, 2))
for ask in (len, lambda d: list(d.shuffle()), cut, lambda d: list(d.loader()), lambda d: d[0]):
    try:
        ask(ds)
    except Exception as exc:
        print(type(exc).__name__, exc)
"""
    lines = _piped(warm_python, path, code).splitlines()
    assert [line.split()[0] for line in lines] == ["TypeError", *["PlanError"] * 4]
    assert "count()" in lines[0]


def test_a_failure_in_a_stream_names_the_key(tmp_path: Path, warm_python: str) -> None:
    path = _tar(tmp_path / "a.tar", *(f"{i}.cls" for i in range(6)))
    code = """
def fail(s):
    if s["__key__"] == "3":
        raise ValueError("three")
    return s["__key__"]
print(list(ds.map(fail)))
"""
    assert "StageError: ValueError: three (stage: map(fail), key: 3)" in _piped(warm_python, path, code)


def test_names_of_the_package_are_loaded_on_first_use() -> None:
    assert {"Dataset", "read_tar", "vision"} <= set(dir(ps))
    assert all(getattr(ps, name) is not None for name in dir(ps))
    with pytest.raises(AttributeError, match=r"no attribute 'read_tape'.*read_tar"):
        ps.read_tape  # type: ignore[attr-defined]  # noqa: B018


def test_the_error_of_an_unknown_engine_lists_the_engines() -> None:
    with pytest.raises(PlanError, match=r"'local'.*'serial'"):
        ps.from_items([]).on("spark")  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match="no option cpu; it has: cpus, devices, memory, monitor, observer, ordered, report"
    ):
        ps.from_items([]).on("local", cpu=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "hint"), [({"cache": "folder"}, "ps.Cache"), ({"storage": "s3"}, "ps.S3"), ({"storage": ps.S3}, "ps.S3")]
)
def test_other_types_than_cache_and_storage_are_refused_at_the_call(given: Any, hint: str) -> None:
    readers: list[Any] = [ps.read_tar, ps.read_parquet, ps.read_arrow, ps.read_csv, ps.read_text]
    for read in [*readers, ps.read_files, ps.read_images] if "storage" in given else readers:
        with pytest.raises(PlanError, match=hint):
            read("a.tar", **given)


@pytest.mark.parametrize("manifest", ["", 3])
def test_a_manifest_is_a_path_or_a_url(manifest: Any) -> None:
    with pytest.raises(PlanError, match="is not a path or a URL"):
        ps.read_tar("a.tar", manifest=manifest)


@pytest.mark.parametrize(
    ("items", "advice"),
    [
        ({"x": [1, 2]}, r"not dict: write ps.from_arrow\(pyarrow.table\(columns\)\)"),
        (pd.DataFrame({"x": [1]}), r"not DataFrame: write ps.from_arrow\(pyarrow.Table.from_pandas\(frame\)\)"),
        (pa.table({"x": [1]}), r"not Table: write ps.from_arrow\(table\)"),
        (ps.from_items([1]), "not Dataset: write the Dataset itself"),
    ],
)
def test_from_items_says_what_to_write_for_a_table(items: Any, advice: str) -> None:
    with pytest.raises(PlanError, match=advice):
        ps.from_items(items)
