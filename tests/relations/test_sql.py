"""A query over the columns of all samples."""

from __future__ import annotations

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
