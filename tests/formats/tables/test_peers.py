"""Files of polars, DuckDB, pandas and Spark are read, and they read ours."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.testing import fingerprint

ROWS: list[dict[str, Any]] = [
    {
        "id": i,
        "ratio": None if i % 4 == 1 else i / 3,
        "text": None if i % 3 == 1 else f"zeile {i} ü",
        "data": bytes([i % 256]) * (i % 5),
        "numbers": np.arange(i % 4, dtype=np.int64),
        "even": np.array([i, -i], np.float64),
        "flag": i % 2 == 0,
        "inner": {"a": i, "b": [f"x{i}"]},
    }
    for i in range(100)
]


def assert_rows(found: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert fingerprint(found) == fingerprint(want)


def test_polars_files_are_read(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "id": [row["id"] for row in ROWS],
            "ratio": [row["ratio"] for row in ROWS],
            "text": [row["text"] for row in ROWS],
            "data": [row["data"] for row in ROWS],
            "numbers": [row["numbers"].tolist() for row in ROWS],
            "even": pl.Series([row["even"].tolist() for row in ROWS], dtype=pl.Array(pl.Float64, 2)),
            "flag": [row["flag"] for row in ROWS],
            "inner": [row["inner"] for row in ROWS],
            "kind": pl.Series(["a", "b"] * 50, dtype=pl.Categorical),
        }
    )
    frame.write_parquet(tmp_path / "polars.parquet", row_group_size=30)
    want = [{**row, "kind": "ab"[i % 2]} for i, row in enumerate(ROWS)]
    assert_rows(ps.read_parquet(tmp_path).take_all(), want)


def test_duckdb_files_are_read(tmp_path: Path) -> None:
    ps.from_items(ROWS).write_parquet(tmp_path / "ours")
    source, target = tmp_path / "ours/*.parquet", tmp_path / "duck.parquet"
    duckdb.sql(f"COPY (SELECT * FROM '{source}' ORDER BY id) TO '{target}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
    assert_rows(ps.read_parquet(target).take_all(), ROWS)


def test_duckdb_partitions_are_read(tmp_path: Path) -> None:
    query = "SELECT i AS id, i % 3 AS label, 'l' || (i % 2) AS lang FROM range(60) t(i)"
    target = tmp_path / "parts"
    duckdb.sql(f"COPY ({query}) TO '{target}' (FORMAT parquet, PARTITION_BY (label, lang))")
    rows = ps.read_parquet(target).take_all()
    want = {(i, i % 3, f"l{i % 2}") for i in range(60)}
    assert {(row["id"], row["label"], row["lang"]) for row in rows} == want


def test_pandas_files_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "id": np.arange(10, dtype=np.int32),
            "when": pd.date_range("2024-01-01", periods=10, freq="h"),
            "kind": pd.Categorical(["a", "b"] * 5),
            "gap": pd.array([1, None] * 5, dtype="Int64"),
            "nothing": [None] * 10,
        },
        index=pd.Index([*range(109, 99, -1)], name="key"),
    )
    frame.to_parquet(tmp_path / "pandas.parquet")
    ds = ps.read_parquet(tmp_path)
    assert ds[3] == {
        "id": 3,
        "when": np.datetime64("2024-01-01T03"),
        "kind": "b",
        "gap": None,
        "nothing": None,
        "key": 106,
    }
    batch = next(iter(ds.iter_batches(10)))
    assert batch["when"].dtype.kind == "M"
    assert batch["id"].dtype == np.int32
    assert batch["gap"] == [1, None] * 5


def test_files_as_spark_writes_them_are_read(tmp_path: Path) -> None:
    times = [datetime.datetime(2020, 1, 1) + datetime.timedelta(hours=i) for i in range(50)]
    table = pa.table(
        {
            "when": pa.array(times, pa.timestamp("us")),
            "word": pa.array(["often the same"] * 40 + [None] * 10),
            "deep": pa.array([{"a": [{"b": i, "c": None}], "m": None} for i in range(50)]),
            "tags": pa.array([[("k", i)] for i in range(50)], pa.map_(pa.string(), pa.int32())),
            "mostly": pa.array([None] * 49 + [1.5]),
        }
    )
    pq.write_table(
        table,
        tmp_path / "part-00000-c000.snappy.parquet",
        use_deprecated_int96_timestamps=True,
        compression="snappy",
        flavor="spark",
        store_schema=False,
        row_group_size=20,
    )
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-00000-c000.snappy.parquet.crc").touch()
    rows = ps.read_parquet(tmp_path).take_all()
    assert [row["when"] for row in rows] == [np.datetime64(time, "ns") for time in times]
    assert rows[7]["deep"] == {"a": [{"b": 7, "c": None}], "m": None}
    assert rows[7]["tags"] == {"k": 7}
    assert [row["mostly"] for row in rows] == [None] * 49 + [1.5]
    assert rows[45]["word"] is None


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    ps.from_items(ROWS).write_parquet(tmp_path / "ours", max_samples=40)
    assert len(list((tmp_path / "ours").iterdir())) > 1
    return tmp_path / "ours"


def test_pandas_reads_ours(ours: Path) -> None:
    frame = pd.read_parquet(ours)
    assert frame["id"].tolist() == list(range(100))
    assert frame["data"].tolist() == [row["data"] for row in ROWS]
    assert frame["numbers"][7].tolist() == [0, 1, 2]
    assert frame["inner"][9]["a"] == 9


def test_polars_reads_ours(ours: Path) -> None:
    found = pl.read_parquet(ours / "*.parquet").sort("id").to_dicts()
    want = [{**row, "numbers": row["numbers"].tolist(), "even": row["even"].tolist()} for row in ROWS]
    assert found == want


def test_duckdb_reads_ours(ours: Path) -> None:
    query = f"SELECT count(*), sum(id), sum(octet_length(data)), count(text) FROM '{ours}/*.parquet'"
    want = (100, 4950, sum(len(row["data"]) for row in ROWS), sum(row["text"] is not None for row in ROWS))
    assert duckdb.connect().execute(query).fetchone() == want


def test_our_own_files_are_read(ours: Path) -> None:
    assert_rows(ps.read_parquet(ours).take_all(), ROWS)
