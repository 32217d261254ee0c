"""Methods for tables: computed columns, counts of values, and what they refuse."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import PenstockError, PlanError
from tests.relations.conftest import same

EXPRESSIONS: dict[str, Any] = {
    "product": ps.col("a") * 2 + ps.col("b"),
    "difference": 1 - ps.col("a"),
    "share": ps.col("a") / 4,
    "rest": ps.col("b") % 3 + ps.col("a") // 2,
    "minus": -ps.col("c"),
    "large": ps.col("d") * 4,
    "square": ps.col("a") ** 2,
    "copy": ps.col("c"),
    "constant": "train",
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_gives_what_python_computes(name: str) -> None:
    table = pa.table(
        {
            "a": pa.array([1, None, -3], pa.int32()),
            "b": pa.array([5, 6, 7], pa.uint8()),
            "c": pa.array([0.1, 0.25, None], pa.float32()),
            "d": pa.array([2**62, 1, None]),
        }
    )
    ds = ps.from_arrow(table)
    expression = {name: EXPRESSIONS[name]}
    want = ps.from_items(ds.take_all()).with_columns(**expression).take_all()
    assert same(ds.with_columns(**expression).take_all(), want)
    if name == "large":
        assert want[0]["large"] == 2**64
    if name == "rest":
        assert [row["rest"] for row in want] == [2, None, -1]


def test_new_fields_are_computed_from_the_original_sample() -> None:
    ds = ps.from_arrow(pa.table({"a": [1, 2]})).with_columns(a=ps.col("a") + 1, b=lambda s: s["a"] * 10, c=ps.col("a"))
    assert ds.take_all() == [{"a": 2, "b": 10, "c": 1}, {"a": 3, "b": 20, "c": 2}]
    assert "with_columns(a=(col('a') + 1)" in repr(ds)


def test_a_field_that_is_replaced_keeps_its_place() -> None:
    table = ps.from_arrow(pa.table({"a": [1], "b": [2]}))
    for ds in (table, table.map(dict)):
        assert list(ds.with_columns(c=ps.col("b"), a=ps.col("a") * 2).first().items()) == [("a", 2), ("b", 2), ("c", 2)]


def test_only_the_fields_of_an_expression_are_read(tmp_path: Any) -> None:
    ps.from_items([{"a": i, "b": i, "c": i} for i in range(4)]).write_parquet(tmp_path / "t")
    ds = ps.read_parquet(str(tmp_path / "t")).with_columns(d=ps.col("a") + 1).select("d")
    assert "fields read: a" in ds.explain()
    assert ds.take(1) == [{"d": 1}]


def test_a_division_by_zero_fails_one_sample() -> None:
    ds = ps.from_arrow(pa.table({"a": [1, 2], "b": [1, 0]})).with_columns(c=ps.col("a") / ps.col("b"))
    with pytest.raises(PenstockError, match="division by zero"):
        ds.take_all()
    assert [row["c"] for row in ds.on_error("skip")] == [1.0]


def test_value_counts_are_sorted_by_count_then_by_value() -> None:
    got = ps.from_items([{"k": k} for k in "cabbac?"]).value_counts("k").take_all()
    assert [(row["k"], row["count"]) for row in got] == [("a", 2), ("b", 2), ("c", 2), ("?", 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ds: ds.shard(0, 2).groupby("k"),
        lambda ds: ds.shard(0, 2).limit(1).sort("k"),
        lambda ds: ds.shard(0, 2).sql("select 1"),
        lambda ds: ds.sql(""),
        lambda ds: ds.shard(0, 2).distinct("k"),
        lambda ds: ds.shard(0, 2).describe(),
        lambda ds: ds.groupby(),
        lambda ds: ds.groupby("k").sum(),
        lambda ds: ds.sort(),
        lambda ds: ds.sort("k", "k"),
        lambda ds: ds.sort("k", descending=[True, False]),
        lambda ds: ds.distinct(3),
        lambda ds: ds.with_columns(),
        lambda ds: ds.with_columns(c=ps.col("a") == 3),
        lambda ds: ds.join(ds, []),
        lambda ds: ds.join(ds.shard(0, 2), "k"),
        lambda ds: ds.join([{"k": 1}], "k"),
        lambda ds: ds.join(ds, "k", how="outer"),
        lambda ds: ds.train_test_split(stratify="k", by="x"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(wrong: Any) -> None:
    with pytest.raises(PlanError):
        wrong(ps.from_items([{"k": 1}]))
