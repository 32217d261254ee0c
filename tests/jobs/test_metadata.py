from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.jobs.metadata import check_metadata, fill_fields, write_metadata

ROWS: list[dict[str, Any]] = [{"input": f"{n}.wav", "n": n, "label": "ü, \n"} for n in range(3)]


@pytest.fixture
def drafts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("name", ["m.parquet", "m.csv", "m.tsv", "m.jsonl", "below/m.json"])
def test_rows_are_read_back_from_every_format(name: str, tmp_path: Path, drafts: str) -> None:
    path = str(tmp_path / name)
    check_metadata(path)
    write_metadata(ROWS, path, None, drafts)
    write_metadata(ROWS, path, None, drafts)  # replaces the file
    read: dict[str, Any] = {".parquet": ps.read_parquet, ".csv": ps.read_csv, ".tsv": _read_tsv}
    assert read.get(os.path.splitext(name)[1], ps.read_json)(path).take_all() == ROWS
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def _read_tsv(path: str) -> ps.Dataset:
    return ps.read_csv(path, delimiter="\t")


@pytest.mark.parametrize("name", ["m.parquet", "m.csv"])
def test_no_rows_give_an_empty_table(name: str, tmp_path: Path, drafts: str) -> None:
    write_metadata([], str(tmp_path / name), None, drafts)
    read: Any = ps.read_csv if name.endswith("csv") else ps.read_parquet
    assert read(str(tmp_path / name)).take_all() == []


def test_metadata_may_be_remote(drafts: str) -> None:
    for name in ("m.parquet", "m.jsonl"):
        write_metadata(ROWS, f"memory://metadata/{name}", None, drafts)
    assert ps.read_parquet("memory://metadata/m.parquet").take_all() == ROWS
    assert ps.read_json("memory://metadata/m.jsonl").take_all() == ROWS


@pytest.mark.parametrize("name", ["metadata", "m.xlsx", "m.csv.gz", "folder/"])
def test_an_unknown_extension_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"give a file that ends in \.parquet"):
        check_metadata(name)


def test_missing_fields_are_filled_with_none() -> None:
    assert fill_fields([{"input": "a", "x": 1}, {"input": "b", "y": 2}]) == [
        {"input": "a", "x": 1, "y": None},
        {"input": "b", "x": None, "y": 2},
    ]
    assert fill_fields([]) == []


def test_the_type_of_a_column_may_be_known_only_from_its_last_row(tmp_path: Path, drafts: str) -> None:
    day = datetime.date(2020, 5, 20)
    count = 9000  # more than are converted to Arrow at once
    rows: list[dict[str, Any]] = [{"input": str(n), "x": None, "y": 1, "z": []} for n in range(count)]
    rows.append({"input": "last", "x": day, "y": 0.5, "z": ["a"]})
    write_metadata(rows, str(tmp_path / "m.parquet"), None, drafts)
    stored = ps.read_parquet(str(tmp_path / "m.parquet")).take_all()
    assert (len(stored), stored[0]["y"], stored[-1]["y"], stored[-1]["x"]) == (count + 1, 1.0, 0.5, day)
    assert (list(stored[0]["z"]), list(stored[-1]["z"])) == ([], ["a"])


def test_values_without_a_common_type_are_an_error_and_the_old_file_stays(tmp_path: Path, drafts: str) -> None:
    path = str(tmp_path / "m.parquet")
    write_metadata(ROWS, path, None, drafts)
    with pytest.raises(DataError, match="'n'"):
        write_metadata([*ROWS, {"input": "x", "n": "text", "label": ""}], path, None, drafts)
    with pytest.raises(DataError, match=r"'n'.*key: big"):
        write_metadata([{"input": "big", "n": 1 << 70}], path, None, drafts)
    with pytest.raises(DataError, match="cannot be stored in CSV"):
        write_metadata([{"input": "x", "n": [1]}], str(tmp_path / "m.csv"), None, drafts)
    assert ps.read_parquet(path).take_all() == ROWS
    assert os.listdir(tmp_path) == ["m.parquet"]


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path: Path, drafts: str) -> None:
    (tmp_path / "file").write_text("")
    for name in ("m.parquet", "m.csv", "m.jsonl"):
        with pytest.raises(StorageError, match="file exists"):
            write_metadata(ROWS, str(tmp_path / "file" / name), None, drafts)


@pytest.mark.parametrize("name", ["m.parquet", "m.csv", "m.jsonl"])
def test_what_a_killed_process_left_is_removed(name: str, tmp_path: Path, drafts: str) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):  # this process may be writing now
        (tmp_path / f".{name}.{pid}-0123abcd.partial").touch()
    write_metadata(ROWS, str(tmp_path / name), None, drafts)
    assert sorted(os.listdir(tmp_path)) == [f".{name}.{os.getpid()}-0123abcd.partial", name]
    assert os.listdir(drafts) == []
