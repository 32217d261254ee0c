from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ps.from_items([{"txt": f"{n}"} for n in range(9)]).write_tar(str(tmp_path / "out"), max_samples=3)
    return tmp_path / "out"


def test_intact_shards_have_no_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == "3 shards, no problems found\n"


def test_all_problems_are_listed_and_exit_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shard-000000.tar.index").unlink()
    (folder / "shard-000002.tar").unlink()
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{folder}/shard-000000.tar: its index is missing",
        f"{folder}/shard-000002.tar: it is in the manifest but does not exist",
        "3 shards, 2 with problems",
    ]
    assert main(["verify", str(folder), "--json"]) == 1
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed[0] == {"shard": f"{folder}/shard-000000.tar", "problem": "its index is missing"}
    assert len(printed) == 2


def test_parquet_files_are_read_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"a": n, "b": f"{n}" * 50} for n in range(90)]
    assert ps.from_items(items).write_parquet(tmp_path / "plain").samples == 90
    assert ps.pack(ps.from_items(items), tmp_path / "packed", format="parquet", max_samples=40).samples == 90
    assert main(["verify", str(tmp_path / "plain"), str(tmp_path / "packed")]) == 0
    assert capsys.readouterr().out == "4 files, no problems found\n"
    for name in ("plain/00000-of-00001", "packed/00000-of-00003"):
        path = tmp_path / f"{name}.parquet"
        data = bytearray(path.read_bytes())
        data[20:60] = bytes(40)
        path.write_bytes(data)
    (tmp_path / "packed/00001-of-00003.parquet").unlink()
    (tmp_path / "packed/00002-of-00003.parquet").write_bytes(b"none")
    assert main(["verify", str(tmp_path / "plain"), str(tmp_path / "packed")]) == 1
    out = capsys.readouterr().out
    assert "plain/00000-of-00001.parquet: row group 0: " in out
    assert "packed/00000-of-00003.parquet: its SHA-256 is " in out
    assert "packed/00001-of-00003.parquet: it was packed but does not exist" in out
    assert "packed/00002-of-00003.parquet: not a Parquet file: " in out
    assert out.endswith("4 files, 4 with problems\n")


def test_files_of_rows_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert main(["verify", str(tmp_path / "a.csv")]) == 1
    assert "verify checks either tar shards or Parquet files; these files are csv" in capsys.readouterr().err


def test_a_pattern_without_matches_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "missing" / "*.tar")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_ledger_is_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = ps.from_items([{"x": n} for n in range(9)]).shuffle().batched(2)
    for rank in range(2):
        list(ds.loader(rank, 2, uneven="keep", ledger=tmp_path))
    assert main(["verify", "--ledger", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "epoch 0: 9 delivered\nevery sample came exactly once\n"
    next(tmp_path.glob("*-1of2-*.ledger")).unlink()
    assert main(["verify", "--ledger", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 0: 4 delivered, 5 missing (not finished)"
    assert len([line for line in lines if line.startswith("missing: epoch 0: ")]) == 5
    assert lines[-1] == "NOT every sample came exactly once"
    assert main(["verify", "--ledger", str(tmp_path), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ok"], printed["epochs"][0]["missing"], len(printed["missing"])) == (False, 5, 5)


@pytest.mark.parametrize("arguments", [[], ["x.tar", "--ledger", "runs"]])
def test_either_shards_or_a_ledger_must_be_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 2
    assert "--ledger" in capsys.readouterr().err


def test_a_missing_ledger_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--ledger", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"penstock: there is no ledger in this folder (url: {tmp_path})\n"
