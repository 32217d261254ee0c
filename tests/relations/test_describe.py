"""``describe()`` summarises every field."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps


def test_describe_summarises_every_field() -> None:
    rows = [
        {"x": 1, "s": "b", "v": np.zeros(2)},
        {"x": 4, "s": None, "v": np.ones(2)},
        {"x": None, "s": "a", "v": None},
    ]
    got = {row["field"]: row for row in ps.from_items(rows).describe()}
    summary = {
        "type": "int",
        "count": 2,
        "missing": 1,
        "mean": 2.5,
        "std": pytest.approx(2.1213203),
        "min": "1",
        "max": "4",
    }
    assert got["x"] == {"field": "x", **summary}
    assert (got["s"]["min"], got["s"]["max"], got["s"]["mean"], got["s"]["missing"]) == ("a", "b", None, 1)
    assert (got["v"]["count"], got["v"]["type"], got["v"]["min"]) == (2, "array<float64>[2]", None)
    table = pa.table({"x": [1, 4, None], "s": ["b", None, "a"]})
    assert ps.from_arrow(table).describe().take_all() == [got["x"], got["s"]]
    assert [row["field"] for row in ps.from_items(rows).describe("s")] == ["s"]


def test_a_description_of_text_and_numbers_is_a_table() -> None:
    rows = [{"x": 1, "y": 0.5, "s": "b"}, {"x": 4, "y": None, "s": "a"}]
    table = ps.from_items(rows).describe().to_arrow()
    assert table.column("min").to_pylist() == ["1", "0.5", "a"]
    assert [row["max"] for row in ps.from_items(rows).describe("x", "y")] == [4, 0.5]


def test_decimals_are_numbers() -> None:
    (row,) = ps.from_items([{"x": Decimal("1.5")}, {"x": Decimal("2.5")}]).describe()
    assert (row["type"], row["mean"], row["min"], row["max"]) == ("Decimal", 2.0, 1.5, 2.5)
