from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main


def test_shards_are_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"txt": "x" * n, "cls": n % 25} for n in range(30)]
    packed = ps.from_items(items).write_tar(str(tmp_path / "out"), max_samples=20)
    assert main(["info", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"2 shards, 30 samples, {packed.nbytes:,} bytes\n")
    assert "txt                       30             0            14            29               435" in out
    assert "field                samples     min bytes        median           max             total\n" in out
    assert "25 classes, 1 to 2 samples each" in out
    assert "and 5 more" in out
    assert main(["info", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["shards"], printed["samples"], printed["bad"], printed["bytes"]) == (2, 30, 0, packed.nbytes)
    assert printed["fields"][1] == {
        "name": "txt",
        "samples": 30,
        "least": 0,
        "median": 14,
        "most": 29,
        "total": 435,
    }
    assert sum(printed["classes"].values()) == 30


def test_tables_are_summarised_by_files_rows_and_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = ps.from_items([{"a": n, "b": "x"} for n in range(9)]).write_parquet(tmp_path / "table", max_samples=5)
    assert main(["info", str(tmp_path / "table")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"2 parquet files, 9 samples, {packed.nbytes:,} bytes\n")
    assert [line.split() for line in out.splitlines()[3:]] == [["a", "int"], ["b", "str"]]
    (tmp_path / "lab.csv").write_text("a,b\n1,x\n2,y\n")
    assert main(["info", str(tmp_path / "lab.csv"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"format": "csv", "files": 1, "samples": 2, "bytes": 12, "columns": {"a": "int", "b": "str"}}
    assert main(["info", str(tmp_path / "lab.csv"), str(tmp_path / "table")]) == 1
    assert "several formats (csv, parquet)" in capsys.readouterr().err


def test_shards_without_classes_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.from_items([{"txt": "a"}]).write_tar("memory://cli-info/out")
    assert main(["info", "memory://cli-info/out"]) == 0
    assert "classes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["info"],
        ["verify"],
        ["index"],
        ["show"],
        ["first", "-f", "cls"],
        ["proc", "-c", "false", "--on-failure", "skip", "-o"],
    ],
)
def test_names_in_a_shard_do_not_control_the_terminal(
    command: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "a\x1b[31m.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("k\x1b[2J.cls", "k\x1b[2J.t\x1b[31m", "other.cls", "k\x1b[2J.txt"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    output = [str(tmp_path / "out.tar")] if command[-1] == "-o" else []
    main([*command, *output, str(path)])
    printed = capfd.readouterr()
    assert "\\x1b" in printed.out + printed.err + caplog.text
    assert "\x1b" not in printed.out + printed.err + caplog.text
