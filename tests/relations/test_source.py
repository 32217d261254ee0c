"""A computed source: nothing runs before it is read, and types are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.codecs.features import ClassLabel, Value, features_of, metadata_of
from penstock.errors import DataError, PlanError
from penstock.formats.tables.columns import ArrowColumns


def test_nothing_runs_before_it_is_read() -> None:
    calls: list[int] = []

    def recorded(x: int) -> dict[str, int]:
        calls.append(x)
        return {"k": x}

    ds = ps.from_items([1, 2]).map(recorded).groupby("k").count().sort("count")
    assert not calls
    ds.take_all()
    assert sorted(calls) == [1, 2]


def test_relations_of_relations_run_their_plans_in_threads() -> None:
    ds = ps.from_items([{"k": i % 3, "x": -i} for i in range(9)])
    names = ps.from_items([{"k": 1, "name": "one"}, {"k": 2, "name": "two"}]).map(dict).sort("name")
    assert ds.join(names, "k").groupby("name").count().take_all() == [
        {"name": "one", "count": 3},
        {"name": "two", "count": 3},
    ]
    assert [sample["x"] for sample in ds.sort("x").map(dict).sort("k")] == [-6, -3, 0, -7, -4, -1, -8, -5, -2]


def test_only_the_grouped_fields_are_read(tmp_path: Any) -> None:
    ps.from_items([{"__key__": str(i), "txt": "x" * 99, "cls": i % 3} for i in range(9)]).write_tar(str(tmp_path))
    ds = ps.read_tar(str(tmp_path)).decode(txt=lambda data: 1 // 0).groupby("cls").count()
    assert [row["count"] for row in ds.take_all()] == [3, 3, 3]


def test_columns_stay_columns() -> None:
    table = pa.table({"k": [3, 1, 2, 1], "x": pa.array([1.0, 2.0, None, 4.0], pa.float32())})
    ds = ps.from_arrow(table)
    for result in (ds.sort("k"), ds.distinct("k"), ds.join(ds.rename(y="x"), "k"), ds.with_columns(z=ps.col("x") * 2)):
        (found,) = {type(run) for run in result._run(0).runs() if len(run)}
        assert found is ArrowColumns
    assert ds.sort("k").to_arrow().schema.field("x").type == pa.float32()


def test_rows_that_are_samples_keep_their_features(tmp_path: Path) -> None:
    features = {"label": ClassLabel(("cat", "dog")), "x": Value("int64")}
    schema = pa.schema([("label", pa.int64()), ("x", pa.int64())], metadata=metadata_of(features))
    pq.write_table(pa.table({"label": [1, 0, 1], "x": [3, 2, 1]}, schema=schema), tmp_path / "a.parquet")
    ds = ps.read_parquet(str(tmp_path / "a.parquet"))
    for number, rows in enumerate((ds.sort("x"), ds.distinct("label"), ds.value_counts("label"))):
        rows.write_parquet(tmp_path / str(number))
        found = features_of(pq.read_schema(tmp_path / str(number) / "00000-of-00001.parquet").metadata)
        assert found is not None
        assert found["label"] == features["label"]


@pytest.mark.parametrize(
    ("read", "verb"),
    [
        (lambda ds: ds.groupby("k").sum("no").take_all(), "groupby"),
        (lambda ds: ds.value_counts("no").take_all(), "value_counts"),
        (lambda ds: ds.sort("no").take_all(), "sort"),
        (lambda ds: ds.unique("no"), "unique"),
        (lambda ds: ds["no"].take_all(), r"ds\['no'\]"),
    ],
)
def test_a_field_that_is_missing_is_reported_by_the_method_that_was_called(read: Any, verb: str) -> None:
    with pytest.raises(DataError, match=f"^{verb}: the sample has no field 'no'; the fields are k"):
        read(ps.from_items([{"k": 1}]))
    verb = verb if verb.isidentifier() else "select"
    with pytest.raises(PlanError, match=rf"^{verb}\(.*'no'\): no field 'no'; the fields are k"):
        read(ps.from_arrow(pa.table({"k": [1]})))
