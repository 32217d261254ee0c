"""The target of a set of files is checked before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PlanError


@pytest.mark.parametrize("method", ["write_tar", "write_parquet", "write_csv", "write_json", "write_tfrecords"])
def test_a_target_without_a_name_and_a_dataset_without_an_end_are_refused(method: str, tmp_path: Path) -> None:
    ds = ps.from_items([{"cls": n} for n in range(4)])
    for target, problem in {
        "": "url='': give a path or a URL",
        "-": "files cannot be written to a pipe",
        str(tmp_path / "a{0..3}"): "braces stand for several names",
        str(tmp_path / "a::b"): "'::' stands for several names",
        str(tmp_path / "a\0b"): "give a path or a URL",
        b"bytes": "give a path or a URL",
    }.items():
        with pytest.raises(PlanError, match=problem):
            getattr(ds, method)(target)
    for shards in (None, 2):
        with pytest.raises(PlanError, match="no end"):
            getattr(ds.repeat(), method)(tmp_path / "out", shards=shards)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["write_csv", "write_json", "write_tfrecords"])
def test_a_file_that_the_plan_reads_is_not_written(tmp_path: Path, method: str) -> None:
    extensions = {"write_csv": "csv", "write_json": "jsonl", "write_tfrecords": "tfrecord"}
    reader = getattr(ps, method.replace("write", "read"))
    path, link = (tmp_path / f"{name}.{extensions[method]}" for name in ("a", "link"))
    getattr(ps.from_items([{"id": n} for n in range(3)]), method)(path)
    link.symlink_to(path)
    before = path.read_bytes()
    for source in (path, link):
        with pytest.raises(PlanError, match=r"the dataset reads from .*, where it is to be written"):
            getattr(reader(str(source)).filter(ps.col("id") > 1), method)(path, mode="replace")
    assert path.read_bytes() == before


def test_a_file_of_another_format_is_not_written(tmp_path: Path) -> None:
    ds = ps.from_items([{"a": "b"}])
    for method, name in [("write_json", "o.csv"), ("write_csv", "o.jsonl"), ("write_tfrecords", "o.tar")]:
        with pytest.raises(PlanError, match=rf"{name}: \.\w+ is not a suffix of \.\w+ files; give a folder"):
            getattr(ds, method)(tmp_path / name)
    with pytest.raises(PlanError, match="is not a suffix of tar shards"):
        ds.write_tar(tmp_path / "o.parquet")
    with pytest.raises(PlanError, match="is not a suffix of Parquet files"):
        ds.write_parquet(tmp_path / "o.csv")
    assert list(tmp_path.iterdir()) == []
