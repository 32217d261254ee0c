"""Samples beyond the memory limit: same results, and nothing left on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import StorageError
from penstock.formats.tables.columns import ArrowColumns
from penstock.plan import EVERYTHING
from penstock.relations.keys import columns_of
from penstock.relations.store import SampleStore, StoreReader


def dataset(n: int) -> ps.Dataset:
    dice = np.random.default_rng(1)
    table = pa.table(
        {"k": dice.integers(0, n // 3, n), "x": dice.random(n), "text": [f"{i % 97:040d}" for i in range(n)]}
    )
    return ps.from_arrow(table)


def keep(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample]


@pytest.mark.parametrize(
    "verb",
    [
        lambda ds: ds.filter(ps.col("k") >= 0).sort("text", "k", descending=[True, False]),
        lambda ds: ds.groupby("k").mean("x"),
        lambda ds: ds.groupby("k").list("x"),
        lambda ds: ds.groupby("k", "text").count(),
        lambda ds: ds.distinct("k"),
        lambda ds: ds.join(ds.rename(y="x").drop("text").limit(2000).on("local", memory="20KB"), "k"),
        lambda ds: ds.flat_map(keep).sort("x"),
        lambda ds: ds.map(dict).groupby("k").sum("x"),
        lambda ds: ds.map(dict).distinct("text"),
    ],
    ids=["sort", "mean", "list", "count", "distinct", "join", "rows sorted", "rows grouped", "rows distinct"],
)
def test_a_memory_limit_changes_no_result(verb: Any) -> None:
    want = verb(dataset(4000)).take_all()
    assert verb(dataset(4000).on("local", memory="30KB")).take_all() == want


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_a_store_returns_what_was_added(memory: int) -> None:
    store = SampleStore(memory)
    store.add([{"a": 1}, 2])
    store.add(columns_of(pa.table({"a": [5, 6]})))
    store.add([{"a": 7}])
    assert store.has_spilled == (memory == 1)
    assert list(store.items()) == [{"a": 1}, 2, {"a": 5}, {"a": 6}, {"a": 7}]
    reader = StoreReader(store.items(), np.array([4, 0]))
    assert list(reader.read(np.array([1, 0]), EVERYTHING)) == [{"a": 1}, {"a": 7}]
    assert (reader.count(0), reader.key(0, 1)) == (2, "1")


def test_spilled_columns_are_columns() -> None:
    store = SampleStore(1)
    for low in (0, 100):
        store.add(columns_of(pa.table({"a": np.arange(low, low + 100), "t": ["x" * 50] * 100})))
    items = store.items()
    assert isinstance(items, ArrowColumns)
    assert [row["a"] for row in items.pick(np.array([150, 3]))] == [150, 3]


def test_a_full_disk_is_an_error_that_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.relations.store.os.pwrite", disk_full)
    with pytest.raises(StorageError, match="cannot spill samples to a temporary file: No space left on device"):
        dataset(500).on("local", memory="1KB").filter(ps.col("k") >= 0).sort("k").take_all()


def test_a_store_leaves_no_name_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = SampleStore(1)
    store.add([{"a": 1}])
    assert store.has_spilled
    assert not list(tmp_path.iterdir())
