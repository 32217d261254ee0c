"""The database of a relation: what it may not do, what it needs, and that nothing of it stays on the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import MissingExtra, PlanError, StorageError
from penstock.relations.database import StagedTable, database

PLAN = ps.from_items([{"k": 1}]).on("local", memory="100MB", cpus=3).plan


@pytest.mark.parametrize(
    "statement",
    [
        "select * from read_csv('/etc/passwd')",
        "copy (select 1) to '/tmp/penstock-should-not-exist.csv'",
        "attach '/tmp/penstock-should-not-exist.db'",
        "install httpfs",
        "load httpfs",
        "set threads = 4",
        "set enable_external_access = true",
        "select * from PLAN",
    ],
)
def test_a_query_reaches_nothing_outside(statement: str) -> None:
    with pytest.raises(PlanError, match="sql"):
        ps.from_items([{"k": 1}]).sql(statement).take_all()
    assert not os.path.exists("/tmp/penstock-should-not-exist.csv")


def test_memory_and_threads_are_those_of_the_engine() -> None:
    with database(PLAN, "test") as con:
        ((threads, memory),) = con.sql("select current_setting('threads'), current_setting('memory_limit')").fetchall()
    assert (threads, memory) == (3, "95.3 MiB")


@pytest.mark.parametrize(("limit", "error"), [("memory_limit", PlanError), ("max_temp_directory_size", StorageError)])
def test_a_full_disk_and_too_little_memory_are_told_apart(limit: str, error: type[Exception]) -> None:
    advice = {PlanError: "raise on", StorageError: "set TMPDIR"}[error]
    with pytest.raises(error, match=advice), database(PLAN, "test"):
        raise duckdb.OutOfMemoryException(f"failed to offload\nThis limit was set by the '{limit}' setting.")


def test_without_duckdb_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"a package for groupby is not installed: .*penstock\[tables\]"):
        ps.from_items([{"k": 1}]).groupby("k").count().take_all()


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_column_of_integers_becomes_one_of_floats(memory: int) -> None:
    with database(PLAN, "test") as con:
        table = StagedTable(con, "samples", "test", ("a",), memory)
        for values in ([None], [1, 2], [2.5]):
            table.add(pa.table({"c0": values}))
        table.finish()
        assert con.sql("select c0 from samples order by c0").fetchall() == [(1.0,), (2.0,), (2.5,), (None,)]
        with pytest.raises(PlanError, match="field 'a' must have one type"):
            table.add(pa.table({"c0": ["text"]}))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_kept_to_the_last_unit(unit: str) -> None:
    times = pa.array([3, None, 1, 3], pa.timestamp(unit, "UTC"))
    spans = pa.array([5, 7, None, 5], pa.duration(unit))
    ds = ps.from_arrow(pa.table({"t": times, "d": spans}))
    got = ds.groupby("t", "d").count().to_arrow()
    assert got.schema.field("t").type == times.type
    assert got.column("t").cast(pa.int64()).to_pylist() == [1, 3, None]
    assert got.column("d").cast(pa.int64()).to_pylist() == [None, 5, 7]


GROUPING = """
import time

import penstock as ps
from penstock.relations.database import database
plan = ps.from_items([{"k": 1}]).on("local", memory="64MB").plan
with database(plan, "test") as con:
    con.execute("create table t as select range as k, repeat('x', 100) || range as s from range(1000000)").fetchall()
    print("spilled", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_the_disk(
    signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str
) -> None:
    process = subprocess.Popen(
        [warm_python, "-c", GROUPING],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        (folder,) = tmp_path.iterdir()
        assert sum(file.stat().st_size for file in folder.iterdir()) > 1_000_000
        process.send_signal(signal.SIGRTMIN if signum == signal.SIGKILL else signum)
    assert process.returncode != 0
    assert folder.exists() == (signum == signal.SIGKILL)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with database(PLAN, "test"):
        (own,) = tmp_path.iterdir()
        assert own != folder
        with database(PLAN, "test"):
            assert own.exists()
    assert not list(tmp_path.iterdir())
