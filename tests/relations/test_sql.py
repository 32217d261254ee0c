"""A query over the columns of all samples."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import PlanError


def test_a_query_gives_a_dataset() -> None:
    ds = ps.from_items([{"label": label, "n": n} for n, label in enumerate("abca")])
    rows = ds.sql("select label, count(*) as n, sum(n) as total from samples group by label order by label")
    assert len(rows) == 3
    assert rows.take_all()[0] == {"label": "a", "n": 2, "total": 3}
    assert rows.filter(ps.col("n") > 1).map(lambda row: row["label"]).take_all() == ["a"]


def test_a_query_without_an_order_gives_the_same_rows_every_time() -> None:
    x = np.random.default_rng(0).normal(size=50_000) * 1e8
    ds = ps.from_arrow(pa.table({"k": np.arange(50_000) % 100, "x": x}))
    query = "select k, sum(x) as total from samples group by k"
    want = ds.sql(query).take_all()
    for cpus in (1, 4):
        assert ds.on("local", cpus=cpus).sql(query).take_all() == want


@pytest.mark.parametrize("query", ["select nothing from samples", "selec 1"])
def test_a_wrong_query_is_an_error_that_shows_it(query: str) -> None:
    with pytest.raises(PlanError, match=query.split(" ")[0]):
        ps.from_items([{"k": 1}]).sql(query).take_all()


def test_times_are_times_in_a_query_and_in_its_result() -> None:
    noon = datetime(2020, 1, 31, 12, tzinfo=UTC)
    row = {"d": noon.date(), "t": time(12), "ts": noon.replace(tzinfo=None), "utc": noon, "span": timedelta(hours=3)}
    ds = ps.from_items([row])
    assert ds.sql("select * from samples").take_all() == ps.from_arrow(ds.to_arrow()).take_all()
    (found,) = ds.sql(
        "select d + 1 as d, ts + span as ts, ts - timestamp '2020-01-30' as span, hour(utc) as h from samples"
    ).take_all()
    assert found["d"].astype(object) == date(2020, 2, 1)
    assert found["ts"].astype("datetime64[us]").astype(object) == datetime(2020, 1, 31, 15)
    assert found["span"].astype("timedelta64[us]").astype(object) == timedelta(days=1, hours=12)
    assert found["h"] == 12


def test_decimals_stay_decimals_and_sums_of_integers_are_integers() -> None:
    digits = pa.array([Decimal(5)] * 2, pa.decimal128(38, 0))
    ds = ps.from_arrow(pa.table({"x": digits, "n": [2**62] * 2}))
    (found,) = ds.sql("select min(x) as x, sum(n) as n from samples").take_all()
    assert (found, type(found["x"]), type(found["n"])) == ({"x": 5, "n": 2**63}, Decimal, int)
    assert [type(row["x"]) for row in ds.groupby("x").count()] == [Decimal]


def test_a_table_without_rows_has_columns() -> None:
    empty = ps.from_arrow(pa.table({"n": pa.array([], pa.int64())}))
    assert empty.sql("select count(n) as n from samples").take_all() == [{"n": 0}]
    with pytest.raises(PlanError, match="the columns of an empty dataset are not known"):
        ps.from_items([]).sql("select 1").take_all()


@pytest.mark.parametrize("query", ["drop table samples", "insert into samples from samples", "select 1; select 2", ";"])
def test_only_one_query_is_accepted(query: str) -> None:
    with pytest.raises(PlanError, match=r"is not one query that returns rows, such as a select"):
        ps.from_items([{"k": 1}]).sql(query).take_all()


@pytest.mark.parametrize(
    ("row", "query", "problem"),
    [
        ({"k": 1}, "select k, k from samples", "two columns 'k': name one of them differently"),
        ({"A": 1, "a": 2}, "select 1", "the fields 'A' and 'a' are one name in SQL"),
        ({"k": Decimal(10**40)}, "select 1", r"field 'k' has decimal256\(41, 0\); cast it"),
    ],
)
def test_columns_that_sql_cannot_tell_apart_or_hold_are_named(row: dict[str, Any], query: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        ps.from_items([row]).sql(query).take_all()
