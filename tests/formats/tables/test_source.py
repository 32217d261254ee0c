"""Which files a source reads, what their folders add to them, and tables in memory."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.codecs.features import Value, metadata_of
from penstock.errors import DataError, MissingExtra, PlanError, StorageError
from penstock.formats.tables.source import ParquetSource, partitions_of, plain_table, require_arrow
from penstock.inspection.verify import tables_to_verify, verify_table
from penstock.plan import Fields


def write(path: Path, first: int, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": np.arange(first, first + rows)}), path)


def ids(ds: ps.Dataset) -> list[int]:
    return [sample["id"] for sample in ds]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (first, rows) in enumerate([(0, 25), (25, 0), (25, 40)]):
        write(tmp_path / f"data/part-{number}.parquet", first, rows)
    return tmp_path / "data"


def test_patterns_name_files(folder: Path) -> None:
    for pattern in (
        f"{folder}/part-{{0,1,2}}.parquet",
        f"{folder}/*.parquet",
        f"{folder}/part-0.parquet::{folder}/part-2.parquet",
    ):
        assert ps.read_parquet(pattern).count() == 65
    with pytest.raises(StorageError, match=r"matches no files|no file|no such"):
        len(ps.read_parquet(f"{folder}/none-*.parquet"))


@pytest.mark.parametrize(
    "wrong", [{"columns": "id"}, {"columns": []}, {"columns": [3]}, {"columns": ["a", "a"]}, {"workers": 0}]
)
def test_arguments_are_checked_where_they_are_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        ps.read_parquet("x.parquet", **wrong)


def test_a_source_is_described_by_its_call_without_credentials() -> None:
    source = ParquetSource(("http://me:secret@host/a.parquet", "b", "c", "d"), ("id",))
    assert "secret" not in source.describe()
    assert source.describe().endswith("'b', 'c', ..., columns=['id'])")
    assert pickle.loads(pickle.dumps(source)) == source


def test_a_missing_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"read_parquet .*penstock\[tables\]"):
        require_arrow("read_parquet")


# Hidden files and numbered sets


def test_hidden_and_temporary_subfolders_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 2)
    write(tmp_path / "_temporary/0/b.parquet", 2, 2)
    write(tmp_path / ".draft/c.parquet", 4, 2)
    assert ids(ps.read_parquet(tmp_path)) == [0, 1]
    assert ids(ps.read_parquet(tmp_path / "_temporary")) == [2, 3]
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(StorageError, match="no files of this format"):
        len(ps.read_parquet(tmp_path))


def test_a_folder_named_with_a_tilde_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ps.from_items([{"id": n} for n in range(3)]).write_parquet("~/out")
    assert ids(ps.read_parquet("~/out")) == [0, 1, 2]
    (file,) = tables_to_verify(("~/out",))
    assert verify_table(file) == []


def test_an_incomplete_set_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "00000-of-00003.parquet", 0, 2)
    write(tmp_path / "00002-of-00003.parquet", 2, 2)
    with pytest.raises(StorageError, match=r"set of 3 files is incomplete.*00001-of-00003"):
        len(ps.read_parquet(tmp_path))
    assert len(ps.read_parquet(tmp_path / "00002-of-00003.parquet")) == 2


# Partition columns


def test_partition_folders_add_columns(tmp_path: Path) -> None:
    write(tmp_path / "label=3/lang=de%20at/part-0.parquet", 0, 4)
    write(tmp_path / "label=12/lang=en/part-0.parquet", 4, 4)
    write(tmp_path / "label=12/lang=__HIVE_DEFAULT_PARTITION__/part-0.parquet", 8, 2)
    rows = ps.read_parquet(tmp_path).take_all()
    assert {(r["id"], r["label"], r["lang"]) for r in rows} >= {(0, 3, "de at"), (4, 12, "en"), (8, 12, None)}
    ds = ps.read_parquet(tmp_path).filter(ps.col("label") == 3).select("label", "id")
    assert ds.take_all() == [{"label": 3, "id": i} for i in range(4)]
    assert next(iter(ds.iter_batches(9)))["label"].tolist() == [3] * 4


def test_only_folders_right_above_a_file_add_columns() -> None:
    assert partitions_of(["/a=1/b/x.parquet"]) == [()]
    assert partitions_of(["/a=1/b=c/x.parquet"]) == [(("a", 1), ("b", "c"))]
    with pytest.raises(DataError, match=r"its folders name b, but those of /a=1/x\.parquet name a"):
        partitions_of(["/a=1/x.parquet", "/b=1/x.parquet"])


# Tables in memory


def test_a_table_is_one_shard_whose_batches_are_not_copied() -> None:
    table = pa.concat_tables([pa.table({"n": np.arange(3), "t": ["x"] * 3}), pa.table({"n": [3, 4], "t": ["y"] * 2})])
    reader = ps.from_arrow(table).plan.source.open()  # type: ignore[union-attr]
    located: Any = reader.locate(np.zeros(3, np.int64), np.array([4, 0, 3]), Fields())  # type: ignore[union-attr]
    assert list(located.take(slice(1, 3)).read()[0]) == [{"n": 0, "t": "x"}, {"n": 3, "t": "y"}]
    numbers = next(iter(ps.from_arrow(table).iter_batches(2)))["n"]
    assert numbers.__array_interface__["data"][0] == table["n"].chunk(0).buffers()[1].address


def test_a_table_keeps_the_features_of_its_schema() -> None:
    schema = pa.schema([("n", pa.int64())], metadata=metadata_of({"n": Value("int64")}))
    reader: Any = ps.from_arrow(pa.table({"n": [1]}, schema=schema)).plan.source.open()  # type: ignore[union-attr]
    assert reader.traits.features == {"n": Value("int64")}


def test_a_table_in_memory_has_plain_types() -> None:
    batch = pa.record_batch({"k": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert plain_table(batch).schema.field("k").type == pa.string()
    assert plain_table(batch).to_pydict() == {"k": ["a", "b", "a"]}
    with pytest.raises(PlanError, match="RecordBatch, not list"):
        plain_table([1])
    with pytest.raises(PlanError, match="two columns are named 'k'"):
        plain_table(pa.table([[1], [2]], names=["k", "k"]))
