"""Groups: a row for each value, on rows, on columns and spilled."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PlanError
from penstock.testing import numbers
from tests.relations.conftest import EXAMPLES, ROWS, datasets, groups, in_groups, same, tables


def test_count_gives_a_sorted_row_for_each_value() -> None:
    got = ps.from_items(ROWS).groupby("k").count().take_all()
    assert got == [{"k": k, "count": len(rows)} for k, rows in groups().items()]


def test_none_and_nan_are_groups_at_the_end() -> None:
    rows: list[dict[str, Any]] = [{"k": None}, {"k": float("nan")}, {"k": 2}, {"k": np.float64("nan")}, {"k": 1.5}]
    got = ps.from_items(rows).groupby("k").count().take_all()
    assert [row["k"] for row in got[:2]] == [1.5, 2]
    assert sorted((str(row["k"]), row["count"]) for row in got[2:]) == [("None", 1), ("nan", 2)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.sampled_from([("k",), ("j", "k")]))
def test_counts_and_lists_keep_every_sample(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    groups = in_groups([{**row, "n": n} for n, row in enumerate(rows)], fields)
    keys = [{f: group[0][f] for f in fields} for group in groups]
    for ds in datasets(rows):
        counts = [{**key, "count": len(group)} for key, group in zip(keys, groups, strict=True)]
        assert same(ds.groupby(*fields).count().take_all(), counts)
        lists = [{**key, "n_list": [row["n"] for row in group]} for key, group in zip(keys, groups, strict=True)]
        assert same(ds.groupby(*fields).list("n").take_all(), lists)


def test_groups_are_a_dataset() -> None:
    ds = numbers((5, 7)).map(lambda s: {**s, "odd": s["x"] % 2}).groupby("odd").count()
    assert len(ds) == 2
    assert ds.map(lambda row: row["count"]).take_all() == [6, 6]
    assert [row["odd"] for row in ds.shard(1, 2)] == [1]
    assert pickle.loads(pickle.dumps(ds)).take_all() == ds.take_all()
    assert "groupby('odd').count()" in repr(ds)


@pytest.mark.parametrize(
    "use",
    [
        lambda ds: ds.groupby("count").count(),
        lambda ds: ds.value_counts("count"),
        lambda ds: ds.groupby("n_sum").sum("n"),
    ],
    ids=["count", "value_counts", "sum"],
)
def test_a_result_does_not_overwrite_the_field_it_groups_by(use: Any) -> None:
    ds = ps.from_items([{"count": 1, "n": 2, "n_sum": 3}])
    with pytest.raises(PlanError, match="rename"):
        use(ds)
    assert ds.groupby("count").sum("n").take_all() == [{"count": 1, "n_sum": 2}]


@pytest.mark.parametrize(
    "values",
    [[np.int32(3), np.uint8(1), 3], [True, np.False_, np.True_], [np.float32(0.5), 0.25, np.float64(0.5)]],
    ids=["integers", "booleans", "floats"],
)
def test_numbers_of_numpy_and_of_python_are_of_one_type(values: list[Any]) -> None:
    ds = ps.from_items([{"k": value} for value in values])
    assert ds.groupby("k").count().take_all() == [{"k": values[1], "count": 1}, {"k": values[0], "count": 2}]
    assert ds.unique("k") == values[:2]
    assert [row["k"] for row in ds.sort("k")] == sorted(values)


@pytest.mark.parametrize("value", [(1,), {1}, frozenset([1])], ids=repr)
def test_tuples_and_sets_are_not_compared(value: Any) -> None:
    ds = ps.from_items([{"k": value}])
    for use in (ds.groupby("k").count(), ds.sort("k"), ds.join(ds, "k")):
        with pytest.raises(PlanError, match=f"must have one type, but are {type(value).__name__}; convert them first"):
            use.take_all()


def test_equal_values_of_different_types_are_one_group_when_spilled() -> None:
    rows = [{"k": kind(k)} for kind in (int, float) for k in range(6_000)]
    counts = ps.from_items(rows).on("local", memory="60KB").groupby("k").count().take_all()
    assert [(row["k"], row["count"]) for row in counts] == [(k, 2) for k in range(6_000)]


def test_a_group_in_several_pieces_becomes_one_list() -> None:
    table = pa.table({"k": np.arange(20_000) % 3, "x": np.arange(20_000), "text": ["some more bytes" * 4] * 20_000})
    got = ps.from_arrow(table).on("local", memory="1MB").groupby("k").list("x", "text").take_all()
    assert [row["k"] for row in got] == [0, 1, 2]
    assert [row["x_list"] for row in got] == [list(range(k, 20_000, 3)) for k in range(3)]


def test_what_cannot_be_added_is_named() -> None:
    ds = ps.from_items([{"k": "a", "x": Decimal(5 * 10**37)}, {"k": 1, "x": Decimal(5 * 10**37)}])
    with pytest.raises(PlanError, match=r"sum needs field names, not \['x'\]: write sum\('x'\)"):
        ds.groupby("k").sum(["x"])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"groupby: .*Overflow in SUM of DECIMAL.*convert the values first"):
        ds.map(lambda row: {**row, "k": 1}).groupby("k").sum("x").take_all()
    with pytest.raises(PlanError, match="value_counts: the values of field 'k' must have one type"):
        ds.value_counts("k").take_all()
