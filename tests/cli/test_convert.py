from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import PlanError, StorageError


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


@pytest.mark.parametrize("format", ["parquet", "tar", "csv", "json", "tfrecords"])
def test_a_missing_source_leaves_nothing_behind(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["convert", str(tmp_path / "missing.csv"), str(tmp_path / "out"), "--format", format])
    assert code != 0
    assert "no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
