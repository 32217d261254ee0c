"""A set of Parquet files is published together, finished after an interruption, and recognised when it is complete."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.formats.tables.parquet_writer import WrittenFile
from penstock.packing.parquet_set import ParquetSet, open_parquet_set, read_pack_record
from penstock.storage import open_storage

RECORD = {"what": "fingerprint", "rows": 5, "nbytes": 0, "skipped": 1, "append": False, "old": [], "packing": True}
NAMES = ["00000-of-00002.parquet", "00001-of-00002.parquet"]


def samples(count: int) -> ps.Dataset:
    return ps.from_items([{"id": i, "data": os.urandom(100)} for i in range(count)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_drafts(files: ParquetSet) -> list[WrittenFile]:
    """Write two draft files, of two and of three rows."""
    os.makedirs(files.draft, exist_ok=True)
    written = []
    for number, rows in enumerate((2, 3)):
        path = os.path.join(files.draft, f"{number:05d}.parquet")
        pq.write_table(pa.table({"id": list(range(rows))}), path)
        written.append(WrittenFile(path, rows, os.path.getsize(path)))
    return written


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_the_record_of_a_packing_run_has_the_checksums_of_its_files(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "out") if where == "disk" else f"memory://parquet-set-{time.time_ns()}/out"
    with open_parquet_set(url, None) as files:
        assert files.complete_run() is None
        drafts = write_drafts(files)
        checksums = [hashlib.sha256(Path(draft.path).read_bytes()).hexdigest() for draft in drafts]
        sizes = [draft.nbytes for draft in drafts]
        files.publish(drafts, NAMES, dict(RECORD))
        assert files.list_files() == dict(zip(NAMES, sizes, strict=True))
        assert files.count_rows(NAMES) == 5
        record = files.complete_run()
        assert record is not None
        assert files.result(record) == ps.Packed(url, tuple(NAMES), 5, 0, 1)
    assert read_pack_record(url, None) == record
    assert [(name, checksum) for _, name, _, _, checksum in record["files"]] == list(zip(NAMES, checksums, strict=True))


def test_a_set_that_lost_a_file_is_not_complete(tmp_path: Path) -> None:
    with open_parquet_set(str(tmp_path), None) as files:
        files.publish(write_drafts(files), NAMES, dict(RECORD))
        (tmp_path / NAMES[1]).unlink()
        assert files.complete_run() is None


def test_the_record_of_an_appended_set_lists_all_files_and_is_not_complete(tmp_path: Path) -> None:
    with open_parquet_set(str(tmp_path), None) as files:
        files.publish(write_drafts(files), NAMES, dict(RECORD))
        prefix = files.name_prefix(files.list_files(), append=True, packing=True)
        appended = [prefix + name for name in NAMES]
        files.publish(write_drafts(files), appended, {**RECORD, "append": True})
    record = read_pack_record(str(tmp_path), None)
    assert record is not None
    assert [name for _, name, *_ in record["files"]] == [*NAMES, *appended]
    assert record["what"] == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": [[1, 2]]}', '{"files": 3}'])
def test_a_damaged_record_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / ".penstock-parquet.json").write_text(text)
    assert read_pack_record(str(tmp_path), None) is None


def test_existing_files_are_not_overwritten_and_a_set_can_be_added(tmp_path: Path) -> None:
    samples(10).write_parquet(tmp_path, max_samples=4)
    with pytest.raises(PlanError, match="holds 3 Parquet files; append=True adds a set of files to them"):
        samples(3).write_parquet(tmp_path)
    assert samples(3).write_parquet(tmp_path, append=True).shards == ("append-001-00000-of-00001.parquet",)
    assert samples(2).write_parquet(tmp_path, append=True).shards == ("append-002-00000-of-00001.parquet",)
    assert [s["id"] for s in ps.read_parquet(tmp_path)] == [*range(10), *range(3), *range(2)]


def test_a_remote_set_has_the_bytes_of_a_local_one(tmp_path: Path) -> None:
    url = f"memory://written-{time.time_ns()}"
    ds = samples(300)
    packed = ds.write_parquet(url + "/out", max_bytes=8_000)
    ds.write_parquet(tmp_path, max_bytes=8_000)
    storage = open_storage(url)
    assert [one.url.rpartition("/")[2] for one in storage.list(url + "/out/")] == list(packed.shards)
    found = {name: b"".join(storage.stream(f"{url}/out/{name}")) for name in packed.shards}
    assert found == contents(tmp_path)
    with pytest.raises(PlanError, match="append=True"):
        ds.write_parquet(url + "/out")


def test_interrupted_renames_are_finished_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = samples(300)
    real_replace, renamed = os.replace, []

    def failing_replace(source: Any, target: Any) -> None:
        if str(target).endswith(".parquet"):
            renamed.append(target)
            if len(renamed) == 3:
                raise OSError("power failure")
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(StorageError, match="power failure"):
        ds.write_parquet(tmp_path, max_bytes=6_000)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="is incomplete"):
        len(ps.read_parquet(tmp_path))
    assert ds.write_parquet(tmp_path, max_bytes=6_000).samples == 300
    assert [s["id"] for s in ps.read_parquet(tmp_path)] == list(range(300))
