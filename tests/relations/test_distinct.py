"""Distinct values and samples are those of first occurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.errors import DataError
from tests.relations.conftest import EXAMPLES, ROWS, datasets, key_of, same, tables


def test_unique_keeps_the_order_of_first_occurrence() -> None:
    assert ps.from_items(ROWS).unique("k") == list(dict.fromkeys(row["k"] for row in ROWS))


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables())
def test_distinct_samples_are_the_first_of_each_value(rows: list[dict[str, Any]]) -> None:
    firsts = {fields: sorted(_first(rows, fields)) for fields in [("k",), ("k", "j")]}
    for ds in datasets(rows):
        for fields, want in firsts.items():
            assert [row["n"] for row in ds.distinct(*fields)] == want
        assert same(ds.unique("k"), [rows[n]["k"] for n in firsts[("k",)]])


def _first(rows: list[dict[str, Any]], fields: Sequence[str]) -> list[int]:
    found: dict[Any, int] = {}
    for number, row in enumerate(rows):
        found.setdefault(key_of(row, fields), number)
    return list(found.values())


def test_distinct_without_names_needs_samples_with_the_same_fields() -> None:
    with pytest.raises(DataError, match="samples differ in their fields"):
        ps.from_items([{"a": 1}, {"b": 1}]).distinct().take_all()
    assert ps.from_items([{"a": 1, "__key__": "x"}, {"a": 1, "__key__": "y"}]).distinct().count() == 1


@pytest.mark.parametrize(
    "values",
    [
        [3, None, 3, 1, None],
        ["b", "a", None, "b"],
        [True, None, True],
        [b"x", b"", b"x"],
        [0.5, math.nan, 0.5, math.nan],
    ],
    ids=["integers", "text", "booleans", "bytes", "floats"],
)
def test_the_first_sample_of_each_value_is_kept_whatever_its_type(values: list[Any]) -> None:
    found = [row["at"] for row in ps.from_items([{"v": v, "at": at} for at, v in enumerate(values)]).distinct("v")]
    assert found == [at for at, value in enumerate(values) if repr(value) not in map(repr, values[:at])]
