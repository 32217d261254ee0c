"""One Parquet file: its footer, its statistics, damage to it, and which bytes of a remote file are fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import DataError, StorageError
from penstock.formats.tables.parquet_file import (
    ParquetFile,
    RemoteFile,
    TableStamp,
    first_line,
    local_stamp,
    open_parquet,
    plain_batches,
)
from penstock.plan import col


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ids = np.arange(40)
    inner = pa.array([{"a": int(i), "b": [int(i)]} for i in ids])
    table = pa.table({"id": ids, "text": [f"t{i:02d}" for i in ids], "inner": inner, "gap": pa.nulls(40, pa.int64())})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    return tmp_path / "x.parquet"


def opened(path: Path, *partition: tuple[str, Any]) -> ParquetFile:
    return open_parquet(str(path), str(path), None, partition)


def test_rows_are_found_by_the_footer(path: Path) -> None:
    file = opened(path)
    assert (file.rows, file.groups) == (40, 4)
    assert file.row_offsets.tolist() == [0, 10, 20, 30, 40]
    assert file.nbytes(0, ("id", "text")) > file.nbytes(0, ("id",)) > 0


def test_a_row_group_has_the_columns_in_the_requested_order(path: Path) -> None:
    (batch,) = opened(path, ("label", 3), ("lang", None)).decode(2, ("lang", "inner", "label", "id"))
    assert batch.schema.names == ["lang", "inner", "label", "id"]
    assert batch.to_pylist()[1] == {"lang": None, "inner": {"a": 21, "b": [21]}, "label": 3, "id": 21}
    assert batch.schema.field("label").type == pa.int64()


def test_dots_in_the_names_of_columns_are_not_paths_into_structs(tmp_path: Path) -> None:
    nested = pa.map_(pa.int64(), pa.struct([("x", pa.int64()), ("y", pa.list_(pa.int64()))]))
    columns = {"a": [{"b": 1}, {"b": 5}], "a.b": [2, 3], "m": pa.array([[(1, {"x": 2, "y": [3]})]] * 2, nested)}
    pq.write_table(pa.table({**columns, "seg.png": [b"x", b"y"]}), tmp_path / "x.parquet", row_group_size=1)
    file = opened(tmp_path / "x.parquet")
    (batch,) = file.decode(1, ("seg.png", "a.b", "a"))
    assert batch.to_pylist() == [{"seg.png": b"y", "a.b": 3, "a": {"b": 5}}]
    assert [file.may_match(group, col("a.b") == 3) for group in range(2)] == [False, True]


def test_statistics_and_partitions_rule_out_row_groups(path: Path) -> None:
    file = opened(path, ("label", 3))
    assert [file.may_match(group, col("id") >= 20) for group in range(4)] == [False, False, True, True]
    assert [file.may_match(group, col("text") == "t05") for group in range(4)] == [True, False, False, False]
    assert not file.may_match(0, col("label") == 4)
    assert not file.may_match(0, col("gap") == 1)
    assert file.may_match(0, col("inner") == 1)  # a nested column has no statistics
    assert file.may_match(0, col("id") > "x")  # not comparable: rows decide


def test_a_file_that_is_not_complete_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    contents = [b"", b"PAR1", b"just some text that is long enough", b"PAR1" + b"\0" * 100 + b"\xff\xff\xff\x7fPAR1"]
    for content in contents:
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"not a complete Parquet file.*bad\.parquet"):
            list(ps.read_parquet(bad).iter_batches(8))
    with pytest.raises(StorageError, match=r"cannot read the file.*gone\.parquet"):
        list(ps.read_parquet([str(tmp_path / "gone.parquet"), str(bad)]).iter_batches(8))


def test_a_file_that_is_cut_off_is_named(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"not a complete Parquet file.*x\.parquet"):
        opened(path)


def test_a_file_that_changes_is_noticed(path: Path) -> None:
    file = opened(path)
    stamp = path.stat()
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    with pytest.raises(StorageError, match=r"changed while it was being read.*x\.parquet"):
        file.decode(0, ("id",))


def test_batches_are_joined_and_have_plain_types() -> None:
    column = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()])
    (batch,) = plain_batches(pa.table({"k": column}))
    assert batch.schema.field("k").type == pa.string()
    assert batch.column("k").to_pylist() == ["a", "b", "c"]
    assert plain_batches(pa.table({"k": pa.array([], pa.int8())})) == []


class RecordingStorage:
    """A storage of one file that records the ranges that are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ranges: list[tuple[int, int]] = []
        self.tags: set[Any] = set()

    def read(self, url: str, start: int, stop: int, *, tag: str | None = None) -> bytes:
        self.ranges.append((start, stop))
        self.tags.add(tag)
        return self.data[start:stop]


def test_ranges_that_are_close_together_are_fetched_in_one_request() -> None:
    data = bytes(range(256)) * 20_000
    storage: Any = RecordingStorage(data)
    ranges = [(3_000_000, 3_000_100), (0, 100), (5_000, 5_100)]
    file = RemoteFile("memory://x", storage, TableStamp(len(data), "v1"), ranges)
    assert storage.ranges == [(0, 5_100), (3_000_000, 3_000_100)]
    file.seek(5_000)
    assert bytes(file.read(100)) == data[5_000:5_100]
    assert (file.tell(), len(storage.ranges)) == (5_100, 2)
    assert bytes(file.read(10)) == data[5_100:5_110]  # not fetched before
    assert storage.ranges[-1] == (5_100, 5_110)
    file.seek(-2, os.SEEK_END)
    assert (bytes(file.read()), bytes(file.read(5))) == (data[-2:], b"")
    assert storage.tags == {"v1"}  # a changed object is refused by the storage


def test_an_error_without_text_is_named_by_its_type() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"


def test_a_stamp_distinguishes_contents(path: Path) -> None:
    before = local_stamp(str(path), "x")
    path.write_bytes(path.read_bytes() + b"more")
    assert local_stamp(str(path), "x") != before
    with pytest.raises(StorageError, match="No such file"):
        local_stamp(str(path) + ".gone", "x")
