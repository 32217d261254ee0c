from __future__ import annotations

import datetime
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import DataError, StorageError
from penstock.formats.tables.parquet_file import ParquetFile
from penstock.formats.tables.reader import ParquetReader
from penstock.formats.tables.source import ParquetSource
from penstock.plan import Fields
from penstock.storage import Memory, open_storage
from penstock.testing import fingerprint
from penstock.testing.servers import http_server


def write(path: Path, first: int, rows: int, group: int = 10, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.arange(first, first + rows)
    table = pa.table(
        {"id": ids, "text": [f"t{i}" for i in ids], "v": pa.array([[i, i] for i in ids], pa.list_(pa.int32()))}
    )
    for name, values in columns.items():
        table = table.append_column(name, values)
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (first, rows) in enumerate([(0, 25), (25, 0), (25, 40)]):
        write(tmp_path / f"data/part-{number}.parquet", first, rows)
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The row groups that are decoded, as (file, number)."""
    calls: list[tuple[str, int]] = []
    decode = ParquetFile.decode

    def recorded(self: ParquetFile, group: int, names: Any) -> Any:
        calls.append((os.path.basename(self.path), group))
        return decode(self, group, names)

    monkeypatch.setattr(ParquetFile, "decode", recorded)
    return calls


def test_files_are_shards_and_rows_are_samples(folder: Path) -> None:
    ds = ps.read_parquet(folder)
    assert len(ds) == 65
    assert [s["id"] for s in ds] == list(range(65))
    assert fingerprint(ds[30]) == fingerprint({"id": 30, "text": "t30", "v": np.array([30, 30], np.int32)})
    assert sorted(s["id"] for s in ds.shuffle()) == list(range(65))


def test_a_length_and_a_sample_need_only_a_footer_and_a_row_group(folder: Path, decoded: list[tuple[str, int]]) -> None:
    ds = ps.read_parquet(folder)
    assert len(ds) == 65
    assert decoded == []
    assert ds[44]["id"] == 44
    assert decoded == [("part-2.parquet", 1)]


def test_only_the_requested_columns_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns: set[tuple[str, ...]] = set()
    decode = ParquetFile.decode

    def recorded(self: ParquetFile, group: int, names: Any) -> Any:
        columns.add(tuple(names))
        return decode(self, group, names)

    monkeypatch.setattr(ParquetFile, "decode", recorded)
    assert ps.read_parquet(folder, columns=["v", "id"]).first().keys() == {"v", "id"}
    assert columns == {("v", "id")}
    columns.clear()
    assert ps.read_parquet(folder).select("text").take_all()[3] == {"text": "t3"}
    ps.read_parquet(folder).drop("v", "text").filter(ps.col("id") > 3).take_all()
    assert columns == {("text",), ("id",)}


def test_a_pass_decodes_every_row_group_once(folder: Path, decoded: list[tuple[str, int]]) -> None:
    for ds in (ps.read_parquet(folder), ps.read_parquet(folder).shuffle(7, shards=2).map(dict)):
        decoded.clear()
        assert sum(1 for _ in ds) == 65
        assert sorted(decoded) == sorted({*decoded})
        assert len(decoded) == 7


def test_a_filter_skips_row_groups_by_their_statistics(folder: Path, decoded: list[tuple[str, int]]) -> None:
    ds = ps.read_parquet(folder).filter((ps.col("id") >= 50) & (ps.col("text") != "t52"))
    assert [s["id"] for s in ds] == [50, 51, *range(53, 65)]
    assert set(decoded) == {("part-2.parquet", group) for group in (2, 3)}
    decoded.clear()
    shuffled = ds.shuffle(11)
    assert sorted(s["id"] for s in shuffled.epoch(0)) == [50, 51, *range(53, 65)]
    assert set(decoded) == {("part-2.parquet", group) for group in (2, 3)}


def test_a_filter_skips_files_by_their_partition(tmp_path: Path, decoded: list[tuple[str, int]]) -> None:
    for label in range(4):
        write(tmp_path / f"label={label}/p{label}.parquet", label, 4)
    assert ps.read_parquet(tmp_path).filter(ps.col("label").isin([1, 3])).count() == 8
    assert {name for name, _ in decoded} == {"p1.parquet", "p3.parquet"}


def test_a_filter_changes_no_position(folder: Path) -> None:
    condition = ps.col("id") >= 45
    by_statistics, by_sample = ps.read_parquet(folder).shuffle(9), ps.read_parquet(folder).shuffle(9)
    for rank in range(3):
        left = by_statistics.filter(condition).shard(rank, 3).epoch(2)
        right = by_sample.filter(lambda s: s["id"] >= 45).shard(rank, 3).epoch(2)
        assert [s["id"] for s in left] == [s["id"] for s in right]


def test_a_limit_before_a_filter_counts_all_rows(folder: Path) -> None:
    ds = ps.read_parquet(folder).filter(ps.col("id") > 2).limit(5).filter(ps.col("id") > 4)
    assert [s["id"] for s in ds] == [5, 6, 7]


def test_a_run_ends_with_its_threads(folder: Path) -> None:
    run = iter(ps.read_parquet(folder))
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock parquet")]


def test_a_loader_resumes_in_the_middle_of_a_file(folder: Path) -> None:
    ds = ps.read_parquet(folder).shuffle(8).batched(4)
    loader = ds.loader()
    run = iter(loader)
    seen = [next(run)["id"].tolist() for _ in range(5)]
    state = loader.state_dict()
    loader.close()
    again = ds.loader()
    again.load_state_dict(state)
    rest = [batch["id"].tolist() for batch in again]
    assert seen + rest == [batch["id"].tolist() for batch in ds.epoch(0)]


def test_worker_processes_get_the_rows(folder: Path) -> None:
    ds = (
        ps.read_parquet(folder)
        .filter(ps.col("id") > 11)
        .map(lambda s: s["id"] + int(s["v"][0]), on="processes", workers=1)
    )
    assert list(ds) == list(range(24, 130, 2))


def test_a_reader_pickles_as_its_arguments(folder: Path) -> None:
    reader = ParquetSource((str(folder),)).open()
    reader.locate(np.array([2, 2]), np.array([0, 1]), Fields())
    again = pickle.loads(pickle.dumps(reader))
    assert isinstance(again, ParquetReader)
    assert again.locate(np.array([2]), np.array([1]), Fields()).read()[0][0]["id"] == 26
    with pytest.raises(IndexError, match="row 40 of 40"):
        again.locate(np.array([2]), np.array([40]), Fields())
    reader.suspend()
    again.suspend()


# Damaged files and files that do not match


def error_of(ds: ps.Dataset) -> str:
    with pytest.raises((DataError, StorageError)) as caught:
        list(ds.iter_batches(8))
    return str(caught.value)


def test_a_file_that_is_cut_off_is_named(folder: Path) -> None:
    path = folder / "part-2.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert "part-2.parquet" in error_of(ps.read_parquet(folder))


def damage(path: Path, group: int) -> None:
    chunk = pq.read_metadata(path).row_group(group).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


def test_a_damaged_row_group_is_named_and_can_be_skipped(folder: Path) -> None:
    damage(folder / "part-2.parquet", 1)
    message = error_of(ps.read_parquet(folder))
    assert "row group 1 cannot be decoded" in message
    assert "part-2.parquet" in message
    ds = ps.read_parquet(folder).on_error("skip")
    assert [s["id"] for s in ds] == [*range(35), *range(45, 65)]
    assert [i for b in ds.iter_batches(7) for i in b["id"].tolist()] == [*range(35), *range(45, 65)]


def test_the_rows_before_a_damaged_row_group_are_delivered(folder: Path) -> None:
    damage(folder / "part-0.parquet", 2)
    for engine in ("local", "serial"):
        got: list[int] = []
        with pytest.raises(DataError, match="row group 2"):
            got.extend(sample["id"] for sample in ps.read_parquet(folder).on(engine))
        assert got == list(range(20))


def test_a_file_that_changes_is_noticed(folder: Path) -> None:
    ds = ps.read_parquet(folder, workers=1)
    assert len(ds) == 65
    write(folder / "part-2.parquet", 0, 41)
    with pytest.raises(StorageError, match="changed"):
        ds[64]


def test_columns_that_differ_between_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 3, extra=pa.array([1, 2, 3]))
    write(tmp_path / "b.parquet", 3, 3, extra=pa.array(["1", "2", "3"]))
    message = error_of(ps.read_parquet(tmp_path))
    assert "column 'extra' is string in this file and int64 in" in message
    assert "b.parquet" in message
    write(tmp_path / "b.parquet", 3, 3)
    assert "there is no column 'extra'" in error_of(ps.read_parquet(tmp_path))
    assert [s["id"] for s in ps.read_parquet(tmp_path, columns=["id"])] == list(range(6))
    assert [s["id"] for s in ps.read_parquet(tmp_path).select("id")] == list(range(6))
    write(tmp_path / "a.parquet", 0, 3)
    write(tmp_path / "b.parquet", 3, 3, extra=pa.array([1, 2, 3]))
    assert "a column 'extra' that" in error_of(ps.read_parquet(tmp_path))
    assert "no column 'none'" in error_of(ps.read_parquet(tmp_path, columns=["none"]))


def test_columns_of_one_name_are_named_and_others_can_be_read(tmp_path: Path) -> None:
    table = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    pq.write_table(table, tmp_path / "x.parquet")
    feather.write_feather(table, str(tmp_path / "x.arrow"), compression="uncompressed")
    for read, path in (ps.read_parquet, tmp_path / "x.parquet"), (ps.read_arrow, tmp_path / "x.arrow"):
        with pytest.raises(DataError, match="two columns are named 'a'; choose others"):
            read(path).take_all()
        assert read(path, columns=["b"]).take_all() == [{"b": 3}]


def test_files_may_differ_in_how_text_is_stored(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 2, more=pa.array(["a", "b"]))
    write(tmp_path / "b.parquet", 2, 2, more=pa.array(["c", None], pa.large_string()))
    write(tmp_path / "c.parquet", 4, 2, more=pa.nulls(2))
    write(tmp_path / "d.parquet", 6, 2, more=pa.array(["d", "d"]).dictionary_encode())
    batch = next(iter(ps.read_parquet(tmp_path).iter_batches(8)))
    assert batch["more"] == ["a", "b", "c", None, None, None, "d", "d"]


# Remote files


class RecordingMemory(Memory):
    """Records the ranges that are read."""

    def read(self, url: str, start: int, stop: int, **options: Any) -> Any:
        ranges_read.append((start, stop))
        return super().read(url, start, stop, **options)


ranges_read: list[tuple[int, int]] = []


@pytest.fixture
def remote(folder: Path) -> Iterator[str]:
    storage = open_storage("memory://")
    root = f"memory://tables-{datetime.datetime.now().timestamp()}"
    for path in sorted(folder.iterdir()):
        with storage.put(f"{root}/{path.name}") as upload:
            upload.write(path.read_bytes())
            upload.commit()
    yield root
    for file in list(storage.list(root + "/")):
        storage.delete(file.url)


def test_remote_files_are_the_same_dataset(folder: Path, remote: str) -> None:
    local_ds, remote_ds = ps.read_parquet(folder), ps.read_parquet(remote)
    for epoch in (0, 1):
        want = [s["id"] for s in local_ds.shuffle().epoch(epoch)]
        assert [s["id"] for s in remote_ds.shuffle().epoch(epoch)] == want
    state = local_ds.loader().state_dict()
    again = remote_ds.loader()
    again.load_state_dict(state)
    assert sum(1 for _ in again) == 65


def test_a_remote_row_costs_a_footer_and_a_row_group(remote: str) -> None:
    ds = ps.read_parquet(f"{remote}/part-2.parquet", columns=["id"], storage=RecordingMemory())
    ranges_read.clear()
    assert ds[35]["id"] == 60
    size = open_storage(remote).info(f"{remote}/part-2.parquet").size
    assert size is not None
    assert len(ranges_read) == 3  # the length of the footer, the footer, the column
    assert ranges_read[-1][1] - ranges_read[-1][0] < size / 8


def test_errors_of_remote_files_name_the_file(remote: str) -> None:
    storage = open_storage(remote)
    with storage.put(f"{remote}/part-1.parquet") as upload:
        upload.write(b"PAR1 and then nothing that would end it")
        upload.commit()
    assert "part-1.parquet" in error_of(ps.read_parquet(remote))


def test_files_on_an_http_server_are_read_by_ranges(folder: Path) -> None:
    with http_server(folder) as port:
        urls = [f"http://127.0.0.1:{port}/part-{number}.parquet" for number in range(3)]
        ds = ps.read_parquet(urls).filter(ps.col("id") > 20)
        assert [i for batch in ds.iter_batches(16) for i in batch["id"].tolist()] == list(range(21, 65))
        assert sorted(sample["id"] for sample in ds.shuffle(8)) == list(range(21, 65))
